"""What one model-parallel rank of DeepSpeed holds: parameters, buffers and tied names, each with all its stored copies.

``param_shapes`` of the model file names the trained parameters; without it, the slices that ``BF16_Optimizer`` records. Which
files hold their fp32 masters differs (partitions, experts, universal); what else a model file says does not.

Experts of a mixture have a file each, and masters that are cut over fewer ranks than the rest. Every rank numbers its own experts
from 0; files and the merged model number them over all ranks. Which experts a rank has follows from
``_create_expert_and_data_parallel`` (``deepspeed/utils/groups.py``) and ``use_data_before_expert_parallelism``; that it is so is
seen in what the ranks' partitions hold. Sources: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of
``deepspeed/runtime/engine.py``, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import zero_masters
from ckptsync.layouts.names import inside, join
from ckptsync.layouts.zero_files import (
    EXPERT,
    EXPERT_OPTIM,
    StateFile,
    buffers,
    configuration,
    load,
    of_rank,
    optimizer_state,
    section,
)
from ckptsync.layouts.zero_masters import Groups
from ckptsync.model import Copy, Files, Shape, Tensor

Held = Mapping[str, tuple[StateFile, Stored]]


@dataclass(frozen=True, slots=True)
class Rank:
    """``models``: its model file, at stage 3 one of each data-parallel rank.

    These repeat the first but for fragments of frozen parameters. ``own``: the tensors of the model itself, at stage 3 empty
    placeholders of the right dtype. ``optim``: the optimizer files, unless ``absent`` names one that is not here.
    """

    files: Files
    stage: int
    models: Sequence[StateFile]
    optim: Sequence[StateFile]
    own: Held
    absent: str = ""

    @property
    def first(self) -> StateFile:
        """Return data-parallel rank 0's model file."""
        return self.models[0]

    def own_copies(self, name: str, shape: Shape) -> tuple[Copy, ...]:
        """Return the model's own copy, if it has one of that shape."""
        file, own = self.own.get(name, (None, None))
        if file is None or own is None or own.shape != shape:
            return ()
        return (Copy(own.dtype, own.shape, (file.part(self.files, own),) if own.numel else ()),)


def own_of(file: StateFile) -> dict[str, tuple[StateFile, Stored]]:
    """Return the tensors of a model file's ``module``."""
    return {name: (file, value) for name, value in file.get("module", dict).items() if isinstance(value, Stored)}


def groups_of(file: StateFile) -> list[dict[str, Shape]] | None:
    """Return ``param_shapes``: shapes of the trained parameters by group, in the order of their elements; None without ZeRO."""
    if file.content.get("param_shapes") is None:
        return None
    found: list[dict[str, Shape]] = []
    known: set[str] = set()
    for group in file.get("param_shapes", list):
        found.append(_shapes(group, file.name))
        if not known.isdisjoint(group):
            raise Corrupt(f"{file.name}: a parameter is in two parameter groups")
        known.update(group)
    return found


def _shapes(value: Any, name: str) -> dict[str, Shape]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and _is_shape(v) for k, v in value.items()):
        raise Corrupt(f"{name}: param_shapes are not shapes by name")
    return value


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MOST_AXES and all(type(n) is int and n >= 0 for n in value)


# Trained parameters and their masters


def rank_tensors(rank: Rank) -> tuple[Tensor, ...]:
    """Return one model-parallel rank's tensors; of experts, all ranks'."""
    groups = trained_groups(rank)
    masters = trained_masters(rank, groups)
    if unordered(rank):
        rank = replace(rank, absent="param_shapes of the trained parameters")
    trained: dict[str, Shape] = {}
    for group in groups:
        trained |= _everywhere(group, rank.own) if _is_of_experts(group) else group
    return tensors_of(rank, trained, masters)


def trained_groups(rank: Rank) -> Groups:
    """Return names and shapes by parameter group, in the order of their elements; experts as the first rank numbers its own."""
    groups = groups_of(rank.first)
    if rank.stage == 0:
        return []
    if groups is not None:
        return groups
    own = {name: value.shape for name, (_, value) in rank.own.items()}
    if rank.absent:
        named = buffers(rank.first)
        return [{name: shape for name, shape in own.items() if name not in named}]
    files = []
    for number in zero_masters.group_numbers(rank.optim[0]):
        is_of_experts = _is_of_experts(zero_masters.slices(rank.optim[0], number) or {})
        files.append(_expert_sets(rank.first, rank.optim, number)[0] if is_of_experts else rank.optim)
    is_dealt = section(configuration(rank.first), "zero_optimization").get("round_robin_gradients") is True
    return zero_masters.groups_of_slices(files, own, dealt=is_dealt)


def unordered(rank: Rank) -> str:
    """Return a remark on masters in an order that no file gives: with ``round_robin_gradients`` slices are not where they say.

    Older DeepSpeed leaves both ``param_shapes`` and ``ds_config`` out of checkpoints with experts (``_save_moe_checkpoint``, 0.16).
    """
    is_ordered = groups_of(rank.first) is not None or bool(configuration(rank.first)) or len(rank.optim) < 2
    if rank.absent or is_ordered or "zero_stage" not in optimizer_state(rank.optim[0]):
        return ""
    return "no file tells the order of the fp32 masters, and they are not read: the weights are the model's own"


def trained_masters(rank: Rank, groups: Groups) -> dict[str, Copy]:
    """Return the fp32 master of each trained parameter, where all optimizer files are here."""
    if rank.absent or not rank.optim or unordered(rank):
        return {}
    if rank.stage == 3:
        return zero_masters.stage3_masters(rank.files, rank.optim, groups)
    found: dict[str, Copy] = {}
    for index, group in enumerate(groups):
        if not _is_of_experts(group):
            found |= zero_masters.group_masters(rank.files, rank.optim, index, group)
    return found | _expert_masters(rank, groups)


# All tensors of a rank


def tensors_of(rank: Rank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]) -> tuple[Tensor, ...]:
    """Return all tensors of the rank, of which those that are ``trained`` have ``masters``, unless their files are absent."""
    found = {tensor.name: tensor for tensor in (*_trained(rank, trained, masters), *_frozen(rank))}
    found |= {tensor.name: tensor for tensor in _others(rank, found)}
    found |= {tensor.name: tensor for tensor in _tied(rank, found)}
    return tuple(found.values())


def _trained(rank: Rank, trained: Mapping[str, Shape], masters: Mapping[str, Copy]) -> Iterator[Tensor]:
    """Yield what the optimizer holds: fp32 masters, and at stages 1 and 2 the model's own copy too."""
    for name, shape in trained.items():
        _, own = rank.own.get(name, (None, None))
        stored = rank.own_copies(name, shape) if rank.stage < 3 else ()
        if own is not None and rank.stage < 3 and not stored:
            raise Corrupt(
                f"{rank.own[name][0].name}: {name} has the shape {own.shape}, {shape} expected", hint="it is of another save"
            )
        if rank.absent and not stored:
            raise Incomplete(f"{rank.absent}: not there; it holds some of {name}", hint="give the other nodes' directories too")
        master = masters.get(name) or Copy("F32", (prod(shape),), (), rank.absent or rank.first.name)
        yield Tensor(name, own.dtype if own else master.dtype, shape, (master, *stored))


def _frozen(rank: Rank) -> Iterator[Tensor]:
    """Yield parameters without an optimizer state: at stage 3 a fragment a rank, padded; else whole in the model file."""
    shapes = _shapes(rank.first.get("frozen_param_shapes", dict), rank.first.name)
    for name, shape in shapes.items():
        copies = _whole(rank, name, shape) if rank.stage < 3 else (_fragments(rank, name, shape),)
        yield Tensor(name, copies[0].dtype, shape, copies)


def _whole(rank: Rank, name: str, shape: Shape) -> tuple[Copy, ...]:
    """Return what the model file has of a frozen parameter: in ``module``, and again as its fragment."""
    held = [rank.own.get(name, (None, None)), (rank.first, rank.first.get("frozen_param_fragments", dict).get(name))]
    found = [(file, value) for file, value in held if file is not None and isinstance(value, Stored)]
    odd = next((value for _, value in found if value.shape != shape), None)
    if odd is not None or not found:
        what = f"has the shape {odd.shape}, {shape} expected" if odd else "is not there"
        raise Corrupt(f"{rank.first.name}: frozen {name} {what}", hint="the file is damaged: fetch it again")
    return tuple(Copy(value.dtype, shape, (file.part(rank.files, value),) if value.numel else ()) for file, value in found)


def _fragments(rank: Rank, name: str, shape: Shape) -> Copy:
    held = [file.get("frozen_param_fragments", dict).get(name) for file in rank.models]
    if not all(isinstance(fragment, Stored) for fragment in held):
        raise Corrupt(f"{rank.first.name}: frozen {name} has no fragment in some rank's file")
    if len({fragment.dtype for fragment in held}) > 1:
        raise Corrupt(f"{rank.first.name}: frozen {name} has fragments of different element types")
    parts = [file.part(rank.files, fragment) for file, fragment in zip(rank.models, held, strict=True)]
    return zero_masters.from_fragments(name, shape, held[0].dtype, parts)


def _others(rank: Rank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield buffers, and at stage 1 the frozen parameters, which only the model file holds."""
    named = buffers(rank.first)
    tied = rank.first.get("shared_params", dict)
    for name, (_, value) in rank.own.items():
        if name in found or name in tied:
            continue
        if rank.stage == 3 and not value.numel and name not in named:
            raise Incomplete(f"{rank.first.name}: {name} is an empty placeholder, and no rank holds its values")
        yield Tensor(name, value.dtype, value.shape, rank.own_copies(name, value.shape))


def _tied(rank: Rank, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the names of ``shared_params`` that are not stored, tied to the ones that are.

    Where frozen parameters were excluded (Trainer does so with LoRA), names tied to one of them are still mentioned, and left out.
    """
    is_subset = rank.first.content.get("frozen_param_shapes") is None
    for name, stored in rank.first.get("shared_params", dict).items():
        is_there = isinstance(stored, str) and stored in found
        if not isinstance(name, str) or not (is_there or (is_subset and isinstance(stored, str))):
            raise Corrupt(f"{rank.first.name}: {brief(name)} shares its values with {brief(stored)}, which is not there")
        if is_there:
            yield replace(found[stored], name=name, tied=stored)


# Experts

_LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]+)(\..*)")
_MOST_EXPERTS = 1 << 16  # of a layer


def expert_counts(model: StateFile) -> list[int] | int | None:
    """Return the experts of each layer; one number for all where an old DeepSpeed wrote it; None if there are no experts.

    Raises Unsupported for AutoEP, which keeps experts in other ways.
    """
    if model.content.get("ds_autoep_layers") or model.content.get("autoep_layers"):
        raise Unsupported(
            f"{model.name}: experts as AutoEP keeps them cannot be joined yet", hint="convert it with ds_to_universal"
        )
    counts = model.content.get("num_experts")
    if counts is None:
        return None
    numbers = counts if isinstance(counts, list) else [counts]
    if any(type(n) is not int or not 0 < n < _MOST_EXPERTS for n in numbers) or len(numbers) >= _MOST_EXPERTS:
        raise Corrupt(f"{model.name}: num_experts is {brief(counts)}")
    return counts if isinstance(counts, (list, int)) else None


def expert_names(root: str, counts: list[int] | int) -> list[str]:
    """Return the files of all experts. Old ones have no layer in their names; how many layers there are, only their content says."""
    if isinstance(counts, int):
        return [join(root, f"expert_{e}_mp_rank_00_model_states.pt") for e in range(counts)]
    wanted = [(layer, e) for layer, count in enumerate(counts) for e in range(count)]
    return [join(root, f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt") for layer, e in wanted]


def has_experts(files: Files, root: str) -> bool:
    """Return whether there are files of experts, or of their optimizer states."""
    return bool(of_rank(files.sizes(), root, EXPERT)) or any(map(EXPERT_OPTIM.fullmatch, inside(files.sizes(), root)))


def expert_weights(files: Files, root: str, counts: list[int] | int) -> dict[str, tuple[StateFile, Stored]]:
    """Return every expert's own weights, named as the model file would name them with the experts numbered over all ranks.

    Raises unless there are as many layers as ``counts`` says, each with all its experts, and all experts alike.
    """
    found: dict[str, tuple[StateFile, Stored]] = {}
    layers: dict[str, dict[int, frozenset[str]]] = {}
    for name in expert_names(root, counts):
        parts = EXPERT.fullmatch(name.rpartition("/")[2])
        expert = int(parts[2]) if parts else 0
        file = load(files, name)
        for key, value in file.content.items():
            match = _LOCAL.fullmatch(key) if isinstance(key, str) else None
            if match is None or not isinstance(value, Stored) or int(match[2]) != expert:
                raise Corrupt(f"{file.name}: {brief(key)} is no weight of expert {expert}")
            layer = layers.setdefault(match[1], {})
            layer[expert] = layer.get(expert, frozenset()) | {match[3]}
            found[key] = (file, value)
    numbers = [counts] * len(layers) if isinstance(counts, int) else counts
    if len(layers) != len(numbers):
        raise Corrupt(
            f"{root or '.'}: experts of {len(layers)} layers, {len(numbers)} expected", hint="they are of different saves"
        )
    for prefix, experts in layers.items():
        if len(set(experts.values())) != 1:
            raise Corrupt(f"{root or '.'}: not all experts of {prefix} have the same weights")
    if sorted(len(experts) for experts in layers.values()) != sorted(numbers):
        raise Incomplete(f"{root or '.'}: some layers lack experts, {brief(counts)} expected")
    return found


def _is_of_experts(names: Iterable[str]) -> bool:
    """Return whether a parameter group is of experts; DeepSpeed never mixes them with others. Raises Corrupt if one does."""
    kinds = {_LOCAL.fullmatch(name) is not None for name in names}
    if len(kinds) > 1:
        raise Corrupt("a parameter group has both experts and other parameters", hint="their masters are not cut alike")
    return kinds == {True}


def _everywhere(shapes: Mapping[str, Shape], own: Held) -> dict[str, Shape]:
    """Return the same parameters of all ranks' experts: ``shapes`` are those of one rank."""
    kinds = {(m[1], m[3]): shapes[m[0]] for m in map(_LOCAL.fullmatch, shapes) if m}
    return {m[0]: kinds[m[1], m[3]] for m in map(_LOCAL.fullmatch, own) if m and (m[1], m[3]) in kinds}


def _expert_sets(model: StateFile, optim: Sequence[StateFile], group: int) -> list[list[StateFile]]:
    """Return the ranks that share their experts: every ``ep``-th one, or neighbours if DeepSpeed was configured so."""
    world = len(optim)
    counts = optimizer_state(optim[0]).get("partition_count")
    each = counts[group] if isinstance(counts, (list, tuple)) and group < len(counts) else None
    if type(each) is not int or not 0 < each <= world or world % each:
        raise Corrupt(f"{optim[0].name}: partition_count is {brief(counts)}, a divisor of {world} expected for group {group}")
    ep = world // each
    if configuration(model).get("use_data_before_expert_parallelism") is True:
        return [list(optim[e * each : (e + 1) * each]) for e in range(ep)]
    return [list(optim[e::ep]) for e in range(ep)]


def _expert_masters(rank: Rank, groups: Groups) -> dict[str, Copy]:
    """Return the masters of all parameter groups of experts, of all ranks, under their names over all ranks."""
    per_rank: dict[str, int] = {}  # layer → how many of its experts one rank has
    for local in filter(None, (_LOCAL.fullmatch(name) for shapes in groups for name in shapes)):
        per_rank[local[1]] = max(per_rank.get(local[1], 0), int(local[2]) + 1)
    found: dict[str, Copy] = {}
    trained: set[tuple[str, str]] = set()
    for index, shapes in enumerate(groups):
        for number, files in enumerate(_expert_sets(rank.first, rank.optim, index) if _is_of_experts(shapes) else ()):
            for name, copy in zero_masters.group_masters(rank.files, files, index, shapes).items():
                prefix, own, suffix = _LOCAL.fullmatch(name).groups()  # type: ignore[union-attr]
                found[f"{prefix}{number * per_rank[prefix] + int(own)}{suffix}"] = copy
                trained.add((prefix, suffix))
    # the masters are of experts that have files, and of all of them: of each layer that is trained, every expert alike
    odd = next((name for name in found if name not in rank.own), None)
    if odd is not None:
        raise Corrupt(
            f"{rank.first.name}: the optimizer has {odd}, of which there is no file", hint="the files are of different saves"
        )
    for name, match in ((name, _LOCAL.fullmatch(name)) for name in rank.own):
        if match and (match[1], match[3]) in trained and name not in found:
            raise Corrupt(f"{rank.first.name}: {name} has no master, other experts of its layer do")
    return found
