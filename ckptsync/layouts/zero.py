"""DeepSpeed ZeRO-1, 2 and 3: fp32 masters cut over the ranks, and the model file beside them.

``param_shapes`` of a model file names the trained parameters, of which the optimizer has fp32
masters (see `zero_partitions`). What else a model file holds lies there alone. A model-parallel
rank (``mp_rank``) is a pipeline stage, or cuts its tensors with others (`zero_tensor_parallel`).
`zero_files` says which files there are, and whether they are of one save.

A pipeline has a file for each layer, without names of parameters; model files of its stages have
names and no weights. ``PipelineModule`` names layer 3's parameters ``3.<name>``; a module that
several layers share is ``tied_modules.<key>`` instead, and its layers' files do not say so. The
stages name their parameters under ZeRO and ``BF16_Optimizer``; a file is matched with a tied module
if only one can be meant.

Sources: ``deepspeed/utils/zero_to_fp32.py``, which this follows, and where that drops weights
(frozen ones at stage 1) or aborts (tied ones), the files themselves; ``save_state_dict`` and
``_build`` of ``deepspeed/runtime/pipe/module.py``, 0.19.8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckptsync.errors import Corrupt, Incomplete, Unsupported, name_in_errors
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import ANY_TENSOR, StoredTensor
from ckptsync.layouts import zero_partitions
from ckptsync.layouts.state_dict import is_extra_state, named_tensors, without_extra_states
from ckptsync.layouts.zero_files import (
    MODEL_OF_RANK,
    OPTIM,
    ModelTensors,
    StateFile,
    ZeroFiles,
    buffer_names,
    check_agreement,
    expert_counts,
    is_zero_file,
    param_shapes,
    refuse_offloaded,
    section,
    shapes_by_name,
    trained_dtype,
    trained_shapes,
    universal_roots,
    why_unlike,
)
from ckptsync.layouts.zero_tensor_parallel import join_ranks
from ckptsync.tensors import Copy, Files, Shape, Tensor

_TIED = "tied_modules."
WITHOUT_FROZEN = (
    "the save left out frozen parameters, if there were any; --fill-from takes them from the model"
    " that was trained"
)
"""A remark on a save that says that it is not all of the model."""


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories with ZeRO files (tags), but for universal checkpoints."""
    split = (name.rpartition("/") for name in names)
    found = {root for root, _, base in split if is_zero_file(base)}
    return tuple(sorted(found - set(universal_roots(names))))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the files of every rank, and of every expert and layer.

    Only the ranks themselves know their sizes.

    Raises Incomplete if nothing here says what the files of all ranks are.
    """
    zero = ZeroFiles(files, root)
    if zero.setup.stage == 3 and not zero.by_rank(OPTIM):
        # their prefix is a guess without one; demanding a name that nobody writes never ends
        raise Incomplete(f"{zero.title}: no optimizer file here, which every node has at stage 3")
    models = zero.all_model_files()
    needed = [*models, *zero.all_optimizer_files()]
    if zero.has_experts() and models[0] in zero.sizes:
        needed += zero.expert_files(expert_counts(zero.load(models[0])) or ())
    layers = zero.layer_files()
    if layers:
        stages = [zero.load(name) for name in models if name in zero.sizes]
        names = [name for stage in stages for name in trained_shapes(stage)]
        needed += [*layers, *zero.named_layer_files(names)]
    return dict.fromkeys(needed)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return parameters, buffers and tied names, each with all its stored copies.

    Where optimizer files of stages 1 and 2 are not here, the model's own copies are what there is,
    and a remark says so: a model file holds all parameters, and whoever wants masters gets an error
    that names the missing file.
    """
    zero = ZeroFiles(files, root)
    optim = zero.all_optimizer_files() if zero.setup.stage == 3 else []
    zero.require([*zero.all_model_files(), *optim])
    ranks = [_read_rank(zero, mp) for mp in range(zero.setup.mp)]
    models = [file for rank in ranks for file in rank.models]
    check_agreement(zero.setup, models, [rank.optim for rank in ranks])
    refuse_offloaded(zero, models[0])
    found, remarks = _join(zero, ranks)
    if not found:
        raise Unsupported(f"{zero.title}: a DeepSpeed checkpoint without weights")
    reason = why_unlike(models[0])
    if reason:
        found = tuple(replace(tensor, unlike=reason) for tensor in found)
    remarks += [reason, *_remarks(zero, ranks)]
    found = (replace(found[0], remark="; ".join(filter(None, remarks))), *found[1:])
    return without_extra_states(found, (key for file in models for key in file.get("module", dict)))


def world(files: Files, root: str) -> int:
    """Return how many data-parallel ranks wrote it."""
    return ZeroFiles(files, root).setup.world


def _read_rank(files: ZeroFiles, mp: int) -> MpRank:
    stage, models = files.setup.stage, [files.load(name) for name in files.model_files(mp)]
    names = files.optimizer_files(mp)
    absent = next((name for name in names if name not in files.sizes), "")
    if not absent and stage and param_shapes(models[0]) is None:
        # of models with experts, saved by DeepSpeed 0.16; slices do not give the order of elements
        absent = f"param_shapes of {models[0].name}"
    optim = [files.load(name) for name in names if name in files.sizes]
    return MpRank(stage, models, optim, own_tensors(models[0]), absent)


def _join(files: ZeroFiles, ranks: Sequence[MpRank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tensors of all model-parallel ranks, and remarks on them."""
    first = ranks[0].first
    counts = expert_counts(first)
    is_pipeline = bool(files.layer_files())
    has_experts, is_cut = counts is not None, len(ranks) > 1 and not is_pipeline
    if has_experts + is_pipeline + is_cut + (has_experts and ranks[0].stage == 3) > 1:
        raise Unsupported(
            f"{files.title}: expert, pipeline and tensor parallel ranks in one checkpoint, or"
            " experts of ZeRO-3, cannot be joined yet"
        )
    if files.has_experts() and not has_experts:
        raise Corrupt(
            f"{first.name}: lists no experts, but there are files of experts",
            hint="they are of different saves",
        )
    if is_pipeline:
        return _join_stages(files, ranks)
    if counts is not None:
        own = {**ranks[0].own, **zero_partitions.expert_weights(files, counts)}
        return _rank_tensors(replace(ranks[0], own=own)), []
    each = [_rank_tensors(rank) for rank in ranks]
    return join_ranks(each, first) if is_cut else each[0], []


def _join_stages(files: ZeroFiles, ranks: Sequence[MpRank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return all stages' tensors; those of a tied module are in several, and are written once."""
    if any(rank.own for rank in ranks):
        raise Corrupt(
            f"{files.title}: a model file with weights beside files of layers",
            hint="the files are of different saves",
        )
    own = _layer_weights(files, [rank.first for rank in ranks])
    found: dict[str, Tensor] = {}
    for rank in reversed(ranks):  # the first stage's copies win
        held = replace(rank, own={name: own[name] for name in trained_shapes(rank.first)})
        found |= {tensor.name: tensor for tensor in _rank_tensors(held)}
    rest = replace(ranks[0], own=own)
    tensors = [found.pop(name) if name in found else rest.own_tensor(name) for name in own]
    names = "the names are those of DeepSpeed's PipelineModule: numbers of layers, and tied_modules"
    return (*tensors, *found.values()), [names, _missing_layers(files)]


def _remarks(files: ZeroFiles, ranks: Sequence[MpRank]) -> list[str]:
    """Return remarks on masters that are not read, and on what is left out."""
    first, setup, found = ranks[0].first, files.setup, list[str]()
    absent = [rank.absent for rank in ranks if rank.absent]
    if absent:
        found.append(
            f"{absent[0]} is missing, and others may be too: the merge uses the model's own"
            " weights, not the optimizer's fp32 masters"
        )
    optimizer = section(first.content, "optimizer")
    if setup.stage == 0 and ("fp32_groups_flat" in optimizer or "fp32_groups" in optimizer):
        # DeepSpeed's fp16 optimizers without ZeRO keep them flat, in an order that no file gives
        found.append(
            "the optimizer's fp32 masters have no names: the merge uses the model's own weights"
        )
    if setup.stage > 1 and first.content.get("frozen_param_shapes", {}) is None:
        # ``save_checkpoint(exclude_frozen_parameters=True)`` leaves None where stages 2 and 3 list
        # them (``engine.py``, 0.19.8)
        found.append(WITHOUT_FROZEN)
    there = {**files.by_rank(OPTIM), **(files.by_rank(MODEL_OF_RANK) if setup.stage == 3 else {})}
    extra = sorted(name for (_, rank), name in there.items() if rank >= setup.world)
    if extra:
        found.append(
            f"{extra[0]} is of a rank that this save of {setup.world} ranks did not have, and is"
            " left out"
        )
    return found


# One model-parallel rank


@dataclass(frozen=True, slots=True)
class MpRank:
    """What one model-parallel rank wrote.

    ``models``: its model file, at stage 3 one of each data-parallel rank, which repeat the first
    but for fragments of frozen parameters. ``own``: the tensors of the model itself, at stage 3
    empty placeholders of the right dtype. ``optim``: the optimizer files, unless ``absent`` names
    what is missing to read them.
    """

    stage: int
    models: Sequence[StateFile]
    optim: Sequence[StateFile]
    own: ModelTensors
    absent: str = ""

    @property
    def first(self) -> StateFile:
        """Return data-parallel rank 0's model file."""
        return self.models[0]

    def own_tensor(self, name: str) -> Tensor:
        """Return a tensor of the model itself."""
        file, own = self.own[name]
        return Tensor(name, own.dtype, own.shape, (_stored(file, own),))


def own_tensors(file: StateFile) -> ModelTensors:
    """Return the tensors of a model file's ``module``, under the names of the parameters.

    A module that overrides ``state_dict`` (TRL's value head model) has other names in ``module``.
    Extra states of modules are left out.
    """
    with name_in_errors(file.name):
        named = list(named_tensors(file.get("module", dict)))
    own = {name: value for name, value in named if not is_extra_state(name)}
    frozen = shapes_by_name(file.get("frozen_param_shapes", dict), file.name)
    shapes = {**trained_shapes(file), **frozen}
    parameters = {*shapes, *buffer_names(file), *file.get("shared_params", dict)}
    shapes_or_none = {name: shapes.get(name) for name in parameters if isinstance(name, str)}
    names = _parameter_names(own, shapes_or_none)
    return {names.get(name, name): (file, value) for name, value in own.items()}


def _parameter_names(
    own: Mapping[str, StoredTensor], named: Mapping[str, Shape | None]
) -> dict[str, str]:
    """Return the names of parameters for those of ``own`` that begin otherwise, all alike."""
    other, lacking = sorted(own.keys() - named.keys()), named.keys() - own.keys()
    if not other or not lacking:  # as in most saves
        return {}
    ends: dict[str, list[str]] = {}
    for name in lacking:
        for end in _ends(name):
            ends.setdefault(end, []).append(name)
    common = Counter[tuple[str, str]]()  # beginnings: own and the parameter's → what follows alike
    for name in other:
        # the longest common end, which only one may have
        end = next((end for end in _ends(name) if end in ends), "")
        parameter, *more = ends.get(end, [""])
        shape = named.get(parameter)
        if end and not more and (not own[name].numel or shape in (None, own[name].shape)):
            common[name.removesuffix(end), parameter.removesuffix(end)] += len(end)
    if not common:
        return {}
    ((before, after), _) = common.most_common(1)[0]
    # frozen ones too, which stage 1 does not name
    names = {n: after + n.removeprefix(before) for n in other if n.startswith(before)}
    return {} if own.keys() & set(names.values()) else names


def _ends(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without its first components."""
    while name:
        yield name
        name = name.partition(".")[2]


def _rank_tensors(rank: MpRank) -> tuple[Tensor, ...]:
    """Return one model-parallel rank's tensors; of experts, all ranks'."""
    groups = param_shapes(rank.first) if rank.stage else []
    if groups is None:  # every parameter may be a trained one
        named = buffer_names(rank.first)
        shapes = {name: own.shape for name, (_, own) in rank.own.items() if name not in named}
        return tensors_of(rank, shapes, {})
    trained: dict[str, Shape] = {}
    masters: dict[str, Copy] = {}
    is_read = bool(rank.optim) and not rank.absent
    if is_read and rank.stage == 3:
        masters = zero_partitions.stage3_masters(rank.optim, groups)
    for index, group in enumerate(groups):
        if zero_partitions.are_experts(group):
            trained |= zero_partitions.all_experts(group, rank.own)
        else:
            trained |= group
            if is_read and rank.stage < 3:
                masters |= zero_partitions.group_masters(rank.optim, index, group)
    if is_read and rank.stage < 3:
        masters |= zero_partitions.expert_masters(rank.first, rank.optim, groups, rank.own)
    return tensors_of(rank, trained, masters)


def tensors_of(
    rank: MpRank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]
) -> tuple[Tensor, ...]:
    """Return all tensors of the rank; those that are ``trained`` have ``masters``."""
    found = {tensor.name: tensor for tensor in (*_trained(rank, trained, masters), *_frozen(rank))}
    found |= {tensor.name: tensor for tensor in _others(rank, found)}
    found |= {tensor.name: tensor for tensor in _tied(rank, found)}
    return tuple(found.values())


def _stored(file: StateFile, value: StoredTensor) -> Copy:
    return Copy(value.dtype, value.shape, (file.part(value),) if value.numel else ())


def _trained(
    rank: MpRank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]
) -> Iterator[Tensor]:
    """Yield trained parameters: fp32 masters, and at stages 1 and 2 the model's own copy too."""
    for name, shape in trained.items():
        file, own = rank.own.get(name, (rank.first, None))
        stored = (_stored(file, own),) if own is not None and rank.stage < 3 else ()
        if own is not None and stored and own.shape != shape:
            raise Corrupt(
                f"{file.name}: {name} has the shape {own.shape}, {shape} expected",
                hint="it is of another save",
            )
        if rank.absent and not stored:
            raise Incomplete(
                f"{rank.absent}: not found; it holds some of {name}",
                hint="give the other nodes' directories too",
            )
        master = masters.get(name) or Copy(
            "F32", (prod(shape),), (), rank.absent or rank.first.name
        )
        yield Tensor(
            name, own.dtype if own else trained_dtype(rank.first), shape, (master, *stored)
        )


def _frozen(rank: MpRank) -> Iterator[Tensor]:
    """Yield parameters without an optimizer state.

    At stage 3 each rank has a fragment, padded. Else they are whole in the model file, in
    ``module`` and as the one fragment.
    """
    where = rank.first.name
    fragments = [file.get("frozen_param_fragments", dict) for file in rank.models]
    shapes = shapes_by_name(rank.first.get("frozen_param_shapes", dict), where)
    for name, shape in shapes.items():
        own = [(file, of.get(name)) for file, of in zip(rank.models, fragments, strict=True)]
        held = [(file, value) for file, value in own if isinstance(value, StoredTensor)]
        if rank.stage == 3:
            if len(held) < len(own):
                raise Corrupt(f"{where}: frozen {name} has no fragment in some rank's file")
            dtype, *more = {value.dtype for _, value in held}
            if more:
                raise Corrupt(f"{where}: frozen {name} has fragments of different element types")
            parts = [file.part(value) for file, value in held]
            copies = [zero_partitions.from_fragments(name, shape, dtype, parts)]
        else:
            held = ([rank.own[name]] if name in rank.own else []) + held
            odd = next((value for _, value in held if value.shape != shape), None)
            if odd is not None or not held:
                what = f"has the shape {odd.shape}, {shape} expected" if odd else "is missing"
                raise Corrupt(
                    f"{where}: frozen {name} {what}", hint="the file is damaged: fetch it again"
                )
            copies = [_stored(file, value) for file, value in held]
        yield Tensor(name, copies[0].dtype, shape, tuple(copies))


def _others(rank: MpRank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield buffers, and at stage 1 the frozen parameters, which only the model file holds."""
    named = buffer_names(rank.first)
    tied = rank.first.get("shared_params", dict)
    for name, (_, value) in rank.own.items():
        if name in found or name in tied:
            continue
        if rank.stage == 3 and not value.numel and name not in named:
            raise Incomplete(
                f"{rank.first.name}: {name} is an empty placeholder, and no rank holds its values"
            )
        yield rank.own_tensor(name)


def _tied(rank: MpRank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the names of ``shared_params`` that are not stored, tied to the ones that are.

    Where frozen parameters were excluded (Trainer does so with LoRA), names tied to one of them are
    still mentioned, and left out.
    """
    is_subset = rank.first.content.get("frozen_param_shapes") is None
    for name, stored in rank.first.get("shared_params", dict).items():
        is_there = isinstance(stored, str) and stored in found
        if not isinstance(name, str) or not (is_there or (is_subset and isinstance(stored, str))):
            raise Corrupt(
                f"{rank.first.name}: {brief(name)} shares its values with {brief(stored)}, which is"
                " missing"
            )
        if is_there:
            yield replace(found[stored], name=name, tied=stored)


# Pipelines


def _layer_weights(files: ZeroFiles, models: Sequence[StateFile]) -> ModelTensors:
    """Return every layer's tensors under ``PipelineModule``'s names.

    Raises Incomplete if a layer that a stage names has no file, Unsupported if the stages name no
    parameters: then nothing proves that all files are here.
    """
    trained = {name: shape for model in models for name, shape in trained_shapes(model).items()}
    named = trained.keys() | set().union(*map(buffer_names, models))
    if not trained:
        raise Unsupported(
            f"{files.title}: a pipeline that was trained without ZeRO and without bf16: its"
            " files name no parameters",
            hint="save the model itself from the training program",
        )
    found: dict[str, tuple[StateFile, StoredTensor]] = {}
    for name, number in files.layer_files().items():
        file = files.load(name)
        for key, value in file.content.items():
            if not isinstance(key, str) or not (
                is_extra_state(key) or isinstance(value, ANY_TENSOR)
            ):
                raise Unsupported(
                    f"{file.name}: {brief(key)} is no tensor, expected in a layer's file"
                )
        with name_in_errors(file.name):
            held = dict(named_tensors(file.content))
        is_named = any(f"{number}.{key}" in named for key in held)
        prefix = f"{number}." if is_named else _tied_prefix(number, held, trained, named)
        for key, value in held.items():
            _check_same(found.setdefault(prefix + key, (file, value)), (file, value))
    lost = sorted(named - found.keys())
    if lost:
        absent = next(iter(files.named_layer_files(lost)), files.root or ".")
        raise Incomplete(
            f"{absent}: not found; {len(lost)} tensors, such as {lost[0]}, are in no layer's file",
            hint="each node writes the files of its own layers: add the other nodes' directories",
        )
    return found


def _missing_layers(files: ZeroFiles) -> str:
    """Return a remark on layers without a file: frozen ones, or functions."""
    there = set(files.layer_files().values())
    missing = [str(n) for n in range(max(there, default=0)) if n not in there]
    return (
        f"layers {', '.join(missing[:20])} have no file: right if they are functions, without"
        " weights"
        if missing
        else ""
    )


def _tied_prefix(
    number: int,
    tensors: Mapping[str, StoredTensor],
    trained: Mapping[str, Shape],
    named: Iterable[str],
) -> str:
    """Return the prefix of the one tied module with these names and shapes, or its number."""
    modules: dict[str, set[str]] = {}
    for name in named:
        if name.startswith(_TIED):
            key, _, rest = name.removeprefix(_TIED).partition(".")
            modules.setdefault(key, set()).add(rest)
    fits = [
        key
        for key, own in sorted(modules.items())
        if own <= tensors.keys()
        and all(trained.get(f"{_TIED}{key}.{k}", t.shape) == t.shape for k, t in tensors.items())
    ]
    if len(fits) > 1:
        raise Unsupported(
            f"layer {number}: tied modules {', '.join(fits)} have the same shapes, and nothing says"
            " which one it is",
            hint="save the model itself from the training program",
        )
    return f"{_TIED}{fits[0]}." if fits else f"{number}."


def _check_same(one: tuple[StateFile, StoredTensor], other: tuple[StateFile, StoredTensor]) -> None:
    """Raise Unsupported unless two files hold a tied module of the same CRC32s."""
    if one == other or not other[1].numel:
        return
    sums = [
        part.checksum and (part.checksum.crc32, part.extent.size)
        for part in (file.part(value) for file, value in (one, other))
    ]
    if sums[0] != sums[1] or sums[0] is None:
        raise Unsupported(
            f"{other[0].name}: has the names and shapes of a tied module that {one[0].name} holds,"
            " and other values",
            hint=(
                "a frozen layer beside tied ones? Nothing in the checkpoint tells them apart: save"
                " the model itself"
            ),
        )
