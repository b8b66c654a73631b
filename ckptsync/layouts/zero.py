"""DeepSpeed ZeRO-1, 2 and 3: join the fp32 masters of all ranks, and the model file beside them.

``param_shapes`` of a model file names the trained parameters, of which the optimizer has fp32
masters, cut over the ranks (see `zero_partitions`). Frozen parameters and buffers are only in the
model file. A model-parallel rank (``mp_rank``) is a pipeline stage, or cuts its tensors with others
(`zero_tensor_parallel`). `zero_files` says which files there are, and whether they are of one save.

A pipeline has a file for each layer, without names of parameters; the model files of its stages
have names and no weights. ``PipelineModule`` names layer 3's parameters ``3.<name>``; a module that
several layers share is ``tied_modules.<key>`` instead, and its layers' files do not say so. The
stages name their parameters under ZeRO and ``BF16_Optimizer``; a file is matched with a tied module
if only one fits.

Sources: ``deepspeed/utils/zero_to_fp32.py``, which this follows, except that frozen weights at
stage 1, which that drops, and tied ones, at which it aborts, come from the files themselves;
``save_state_dict`` and ``_build`` of ``deepspeed/runtime/pipe/module.py``, 0.19.8.
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
    """Return the directories with ZeRO files (tags), except universal checkpoints."""
    split = (name.rpartition("/") for name in names)
    folders = {root for root, _, base in split if is_zero_file(base)}
    return tuple(sorted(folders - set(universal_roots(names))))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the files of every rank, and of every expert and layer; their sizes are not known.

    Raise Incomplete if nothing here says what the files of all ranks are, Corrupt or Unsupported
    for wrong files.
    """
    zero = ZeroFiles(files, root)
    if zero.setup.stage == 3 and not zero.by_rank(OPTIM):
        # without one, the prefix of their names is a guess; a wrong name would be awaited for ever
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

    If optimizer files of stages 1 and 2 are missing, only the model's own copies are returned, with
    a remark; a merge that asks for masters then names the missing file. Raise Incomplete for other
    missing files, Corrupt if files disagree, Unsupported if they cannot be joined.
    """
    zero = ZeroFiles(files, root)
    optim = zero.all_optimizer_files() if zero.setup.stage == 3 else []
    zero.require([*zero.all_model_files(), *optim])
    ranks = [_read_rank(zero, mp) for mp in range(zero.setup.mp)]
    models = [file for rank in ranks for file in rank.models]
    check_agreement(zero.setup, models, [rank.optim for rank in ranks])
    refuse_offloaded(zero, models[0])
    joined, remarks = _join(zero, ranks)
    if not joined:
        raise Unsupported(f"{zero.title}: a DeepSpeed checkpoint without weights")
    reason = why_unlike(models[0])
    if reason:
        joined = tuple(replace(tensor, unlike=reason) for tensor in joined)
    remarks += [reason, *_remarks(zero, ranks)]
    joined = (replace(joined[0], remark="; ".join(filter(None, remarks))), *joined[1:])
    return without_extra_states(
        joined, (key for file in models for key in file.get("module", dict))
    )


def world(files: Files, root: str) -> int:
    """Return how many data-parallel ranks wrote it; raise as `ZeroFiles.setup` does."""
    return ZeroFiles(files, root).setup.world


def _read_rank(files: ZeroFiles, mp: int) -> MpRank:
    """Load and return what one model-parallel rank wrote, without optimizer files that are missing.

    ``absent`` names the first missing one, or the ``param_shapes`` that DeepSpeed 0.16 left out.
    Raise as `tensors`.
    """
    stage, models = files.setup.stage, [files.load(name) for name in files.model_files(mp)]
    names = files.optimizer_files(mp)
    absent = next((name for name in names if name not in files.sizes), "")
    if not absent and stage and param_shapes(models[0]) is None:
        # DeepSpeed 0.16 leaves it out of models with experts; slices do not give the order
        absent = f"param_shapes of {models[0].name}"
    optim = [files.load(name) for name in names if name in files.sizes]
    return MpRank(stage, models, optim, own_tensors(models[0]), absent)


def _join(files: ZeroFiles, ranks: Sequence[MpRank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tensors of all model-parallel ranks, and remarks on them.

    Raise Unsupported for combined kinds of parallelism, Corrupt if files are of different saves.
    """
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
        all_weights = {**ranks[0].own, **zero_partitions.expert_weights(files, counts)}
        return _rank_tensors(replace(ranks[0], own=all_weights)), []
    each = [_rank_tensors(rank) for rank in ranks]
    return join_ranks(each, first) if is_cut else each[0], []


def _join_stages(files: ZeroFiles, ranks: Sequence[MpRank]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Return the tensors of all pipeline stages, and remarks on names and on layers without a file.

    Of a tied module's copies the first stage's is returned. Raise Corrupt if a model file has
    weights as well.
    """
    if any(rank.own for rank in ranks):
        raise Corrupt(
            f"{files.title}: a model file with weights beside files of layers",
            hint="the files are of different saves",
        )
    weights_by_name = _layer_weights(files, [rank.first for rank in ranks])
    trained: dict[str, Tensor] = {}
    for rank in reversed(ranks):  # the first stage's copies win
        stage = replace(
            rank, own={name: weights_by_name[name] for name in trained_shapes(rank.first)}
        )
        trained |= {tensor.name: tensor for tensor in _rank_tensors(stage)}
    any_rank = replace(ranks[0], own=weights_by_name)
    tensors = [
        trained.pop(name) if name in trained else any_rank.own_tensor(name)
        for name in weights_by_name
    ]
    names = "the names are those of DeepSpeed's PipelineModule: numbers of layers, and tied_modules"
    return (*tensors, *trained.values()), [names, _missing_layers(files)]


def _remarks(files: ZeroFiles, ranks: Sequence[MpRank]) -> list[str]:
    """Return remarks on masters that are not read, frozen weights left out, and files left out.

    The last are of ranks that this save did not have.
    """
    first, setup, remarks = ranks[0].first, files.setup, list[str]()
    absent = [rank.absent for rank in ranks if rank.absent]
    if absent:
        remarks.append(
            f"{absent[0]} is missing, and others may be too: the merge uses the model's own"
            " weights, not the optimizer's fp32 masters"
        )
    optimizer = section(first.content, "optimizer")
    if setup.stage == 0 and ("fp32_groups_flat" in optimizer or "fp32_groups" in optimizer):
        # DeepSpeed's fp16 optimizers without ZeRO keep them flat, in an order that no file gives
        remarks.append(
            "the optimizer's fp32 masters have no names: the merge uses the model's own weights"
        )
    if setup.stage > 1 and first.content.get("frozen_param_shapes", {}) is None:
        # ``save_checkpoint(exclude_frozen_parameters=True)`` leaves None where stages 2 and 3 list
        # them (``engine.py``, 0.19.8)
        remarks.append(WITHOUT_FROZEN)
    rank_files = {
        **files.by_rank(OPTIM),
        **(files.by_rank(MODEL_OF_RANK) if setup.stage == 3 else {}),
    }
    extra = sorted(name for (_, rank), name in rank_files.items() if rank >= setup.world)
    if extra:
        remarks.append(
            f"{extra[0]} is of a rank that this save of {setup.world} ranks did not have, and is"
            " left out"
        )
    return remarks


# One model-parallel rank


@dataclass(frozen=True, slots=True)
class MpRank:
    """What one model-parallel rank wrote.

    ``models``: its model file; at stage 3 one of each data-parallel rank, which differ only in
    fragments of frozen parameters. ``own``: the tensors of the model itself, at stage 3 empty
    placeholders of the right dtype. ``optim``: the optimizer files. ``absent``: the name of what is
    missing to read masters; then ``optim`` is not used.
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
        """Return a tensor with the model's own copy only."""
        file, stored_tensor = self.own[name]
        return Tensor(
            name, stored_tensor.dtype, stored_tensor.shape, (_stored(file, stored_tensor),)
        )


def own_tensors(file: StateFile) -> ModelTensors:
    """Return the tensors of a model file's ``module``, under the names of the parameters.

    A module that overrides ``state_dict`` (TRL's value head model) has other names in ``module``.
    Extra states of modules are left out. Raise Unsupported for tensors that are not plain.
    """
    with name_in_errors(file.name):
        stored = list(named_tensors(file.get("module", dict)))
    tensors_by_name = {name: value for name, value in stored if not is_extra_state(name)}
    frozen = shapes_by_name(file.get("frozen_param_shapes", dict), file.name)
    shapes = {**trained_shapes(file), **frozen}
    parameters = {*shapes, *buffer_names(file), *file.get("shared_params", dict)}
    shapes_or_none = {name: shapes.get(name) for name in parameters if isinstance(name, str)}
    names = _parameter_names(tensors_by_name, shapes_or_none)
    return {names.get(name, name): (file, value) for name, value in tensors_by_name.items()}


def _parameter_names(
    own: Mapping[str, StoredTensor], parameters: Mapping[str, Shape | None]
) -> dict[str, str]:
    """Return the parameters' names for those names of ``own`` that have another common prefix.

    It is empty if the names are those of ``parameters`` (name → shape or None), or if no prefix
    fits.
    """
    unnamed, lacking = sorted(own.keys() - parameters.keys()), parameters.keys() - own.keys()
    if not unnamed or not lacking:  # as in most saves
        return {}
    ends: dict[str, list[str]] = {}
    for name in lacking:
        for end in _ends(name):
            ends.setdefault(end, []).append(name)
    common = Counter[tuple[str, str]]()  # prefixes, own and the parameter's → letters that follow
    for name in unnamed:
        # the longest common end, which only one parameter may have
        end = next((end for end in _ends(name) if end in ends), "")
        parameter, *more = ends.get(end, [""])
        shape = parameters.get(parameter)
        if end and not more and (not own[name].numel or shape in (None, own[name].shape)):
            common[name.removesuffix(end), parameter.removesuffix(end)] += len(end)
    if not common:
        return {}
    ((before, after), _) = common.most_common(1)[0]
    # frozen ones too, which stage 1 does not name
    names = {n: after + n.removeprefix(before) for n in unnamed if n.startswith(before)}
    return {} if own.keys() & set(names.values()) else names


def _ends(name: str) -> Iterator[str]:
    """Yield a name, then the name without its first component, without its first two, and so on."""
    while name:
        yield name
        name = name.partition(".")[2]


def _rank_tensors(rank: MpRank) -> tuple[Tensor, ...]:
    """Return one model-parallel rank's tensors; experts are those of all its data-parallel ranks.

    Raises as `tensors`.
    """
    groups = param_shapes(rank.first) if rank.stage else []
    if groups is None:  # every parameter may be a trained one
        names_of_buffers = buffer_names(rank.first)
        shapes = {
            name: stored_tensor.shape
            for name, (_, stored_tensor) in rank.own.items()
            if name not in names_of_buffers
        }
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
    """Return all tensors of the rank: trained, frozen, others of the model file, tied names.

    The ``trained`` ones have ``masters``. Raise Corrupt or Incomplete.
    """
    by_name = {
        tensor.name: tensor for tensor in (*_trained(rank, trained, masters), *_frozen(rank))
    }
    by_name |= {tensor.name: tensor for tensor in _untrained(rank, by_name)}
    by_name |= {tensor.name: tensor for tensor in _tied(rank, by_name)}
    return tuple(by_name.values())


def _stored(file: StateFile, value: StoredTensor) -> Copy:
    """Return the model's own copy of a tensor."""
    return Copy(value.dtype, value.shape, (file.part(value),) if value.numel else ())


def _trained(
    rank: MpRank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]
) -> Iterator[Tensor]:
    """Yield trained parameters: with fp32 masters, and at stages 1 and 2 with the model's own copy.

    A parameter without a master gets one without parts, which names the missing file. Raise Corrupt
    if the own copy has another shape, Incomplete if neither is here.
    """
    for name, shape in trained.items():
        file, model_copy = rank.own.get(name, (rank.first, None))
        stored = (_stored(file, model_copy),) if model_copy is not None and rank.stage < 3 else ()
        if model_copy is not None and stored and model_copy.shape != shape:
            raise Corrupt(
                f"{file.name}: {name} has the shape {model_copy.shape}, {shape} expected",
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
            name,
            model_copy.dtype if model_copy else trained_dtype(rank.first),
            shape,
            (master, *stored),
        )


def _frozen(rank: MpRank) -> Iterator[Tensor]:
    """Yield a tensor for each name in ``frozen_param_shapes`` of rank 0's model file.

    At stage 3 its one copy, of a flat grid, is joined from every rank's padded fragment. Else each
    copy is whole: first that in ``module``, then the fragment. Raise Corrupt if a fragment is
    missing, or if the shape or dtype is another.
    """
    title = rank.first.name
    fragments = [file.get("frozen_param_fragments", dict) for file in rank.models]
    shapes = shapes_by_name(rank.first.get("frozen_param_shapes", dict), title)
    for name, shape in shapes.items():
        file_fragments = [
            (file, fragments_of_file.get(name))
            for file, fragments_of_file in zip(rank.models, fragments, strict=True)
        ]
        stored = [
            (file, value) for file, value in file_fragments if isinstance(value, StoredTensor)
        ]
        if rank.stage == 3:
            if len(stored) < len(file_fragments):
                raise Corrupt(f"{title}: frozen {name} has no fragment in some rank's file")
            dtype, *other_dtypes = {value.dtype for _, value in stored}
            if other_dtypes:
                raise Corrupt(f"{title}: frozen {name} has fragments of different element types")
            parts = [file.part(value) for file, value in stored]
            copies = [zero_partitions.from_fragments(name, shape, dtype, parts)]
        else:
            stored = ([rank.own[name]] if name in rank.own else []) + stored
            odd = next((value for _, value in stored if value.shape != shape), None)
            if odd is not None or not stored:
                problem = f"has the shape {odd.shape}, {shape} expected" if odd else "is missing"
                raise Corrupt(
                    f"{title}: frozen {name} {problem}", hint="the file is damaged: fetch it again"
                )
            copies = [_stored(file, value) for file, value in stored]
        yield Tensor(name, copies[0].dtype, shape, tuple(copies))


def _untrained(rank: MpRank, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the model's own tensors that are neither in ``tensors`` nor names in ``shared_params``.

    They are buffers, at stage 1 frozen parameters, too, and at stage 0 all parameters. Raise
    Incomplete for an empty placeholder of stage 3, unless it is a buffer.
    """
    names_of_buffers = buffer_names(rank.first)
    tied = rank.first.get("shared_params", dict)
    for name, (_, value) in rank.own.items():
        if name in tensors or name in tied:
            continue
        if rank.stage == 3 and not value.numel and name not in names_of_buffers:
            raise Incomplete(
                f"{rank.first.name}: {name} is an empty placeholder, and no rank holds its values"
            )
        yield rank.own_tensor(name)


def _tied(rank: MpRank, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield, for each name in ``shared_params``, the tensor of its stored name, tied to that.

    If that is not in ``tensors``, raise Corrupt; but leave the name out if the file has no
    ``frozen_param_shapes``, since the save may lack frozen parameters (Trainer's with LoRA).
    """
    is_subset = rank.first.content.get("frozen_param_shapes") is None
    for name, stored in rank.first.get("shared_params", dict).items():
        has_tensor = isinstance(stored, str) and stored in tensors
        if not isinstance(name, str) or not (has_tensor or (is_subset and isinstance(stored, str))):
            raise Corrupt(
                f"{rank.first.name}: {brief(name)} shares its values with {brief(stored)}, which is"
                " missing"
            )
        if has_tensor:
            yield replace(tensors[stored], name=name, tied=stored)


# Pipelines


def _layer_weights(files: ZeroFiles, models: Sequence[StateFile]) -> ModelTensors:
    """Load every layer's file and return the tensors under ``PipelineModule``'s names.

    Of a tied module the lowest layer's are returned. Raise Incomplete if a tensor that ``models``,
    the stages' files, name is in no file; Unsupported if they name no parameters, so that nothing
    proves that all files are here, if a file holds something else, or as `_tied_prefix` and
    `_check_same`.
    """
    trained = {name: shape for model in models for name, shape in trained_shapes(model).items()}
    expected = trained.keys() | set().union(*map(buffer_names, models))
    if not trained:
        raise Unsupported(
            f"{files.title}: a pipeline that was trained without ZeRO and without bf16: its"
            " files name no parameters",
            hint="save the model itself from the training program",
        )
    by_name: dict[str, tuple[StateFile, StoredTensor]] = {}
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
            layer = dict(named_tensors(file.content))
        is_named = any(f"{number}.{key}" in expected for key in layer)
        prefix = f"{number}." if is_named else _tied_prefix(number, layer, trained, expected)
        for key, value in layer.items():
            _check_same(by_name.setdefault(prefix + key, (file, value)), (file, value))
    lost = sorted(expected - by_name.keys())
    if lost:
        absent = next(iter(files.named_layer_files(lost)), files.root or ".")
        raise Incomplete(
            f"{absent}: not found; {len(lost)} tensors, such as {lost[0]}, are in no layer's file",
            hint="each node writes the files of its own layers: add the other nodes' directories",
        )
    return by_name


def _missing_layers(files: ZeroFiles) -> str:
    """Return a remark with up to 20 layers, below the last, that have no file; empty if all have.

    Such a layer is a function, or frozen.
    """
    numbers = set(files.layer_files().values())
    missing = [str(n) for n in range(max(numbers, default=0)) if n not in numbers]
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
    expected: Iterable[str],
) -> str:
    """Return ``tied_modules.<key>.`` for the one tied module that fits, else ``<number>.``.

    A module fits if ``tensors`` have all of its names in ``expected``, and no shape differs from
    that in ``trained``. Raise Unsupported if several fit.
    """
    modules: dict[str, set[str]] = {}
    for name in expected:
        if name.startswith(_TIED):
            key, _, weight_name = name.removeprefix(_TIED).partition(".")
            modules.setdefault(key, set()).add(weight_name)
    fits = [
        key
        for key, inner_names in sorted(modules.items())
        if inner_names <= tensors.keys()
        and all(trained.get(f"{_TIED}{key}.{k}", t.shape) == t.shape for k, t in tensors.items())
    ]
    if len(fits) > 1:
        raise Unsupported(
            f"layer {number}: tied modules {', '.join(fits)} have the same shapes, and nothing says"
            " which one it is",
            hint="save the model itself from the training program",
        )
    return f"{_TIED}{fits[0]}." if fits else f"{number}."


def _check_same(
    first: tuple[StateFile, StoredTensor], second: tuple[StateFile, StoredTensor]
) -> None:
    """Raise Unsupported unless two files hold a tied module with the same values.

    Sizes and CRC32s of their records are compared: without CRC32s raise it, too. Nothing is
    compared if both are one entry, or if ``second`` is empty.
    """
    if first == second or not second[1].numel:
        return
    checksums = [
        part.checksum and (part.checksum.crc32, part.extent.size)
        for part in (file.part(value) for file, value in (first, second))
    ]
    if checksums[0] != checksums[1] or checksums[0] is None:
        raise Unsupported(
            f"{second[0].name}: has the names and shapes of a tied module that {first[0].name}"
            " holds, and other values",
            hint=(
                "a frozen layer beside tied ones? Nothing in the checkpoint tells them apart: save"
                " the model itself"
            ),
        )
