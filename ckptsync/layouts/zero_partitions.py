"""Compute where the elements of parameters lie in DeepSpeed's flat partitions of fp32 masters.

Stages 1 and 2 flatten each parameter group and cut it into one partition a rank; stage 3 cuts every
parameter into ``ceil(numel / W)`` elements a rank, padded, in flat groups. Source:
``_zero2_merge_trainable_params`` and ``_zero3_merge_trainable_params`` of
``deepspeed/utils/zero_to_fp32.py``.

``param_slice_mappings`` is which elements of which parameter each rank says that its partition
holds. Stages 1 and 2 and ``BF16_Optimizer`` write it since DeepSpeed 0.8
(``deepspeed/runtime/bf16_optimizer.py``, ``deepspeed/utils/tensor_fragment.py``, 0.19.8). It shows
that a rank's file is its own. With
``round_robin_gradients`` the elements lie as parameters were dealt out to the ranks, which is the
order of ``param_shapes``, but ``_link_all_hp_params`` (``deepspeed/runtime/zero/stage_1_and_2.py``)
goes by the order before that, and so do the slices.

Experts of a mixture have a file each, and masters that are cut over fewer ranks than the rest.
Every rank numbers its own experts from 0; files and the merged model number them over all ranks.
Which experts a rank has follows from ``_create_expert_and_data_parallel``
(``deepspeed/utils/groups.py``) and ``use_data_before_expert_parallelism``; that it is so is seen in
what the ranks' partitions hold. Sources: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of
``deepspeed/runtime/engine.py``, 0.19.8.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import PickledObject, brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts.zero_files import (
    MASTERS,
    ModelTensors,
    StateFile,
    ZeroFiles,
    are_naturals,
    configuration,
    optimizer_state,
)
from ckptsync.tensors import Copy, Extent, Part, Shape

Groups = Sequence[dict[str, Shape]]
Slices = dict[str, tuple[int, int]]  # parameter → (first element in the partition, elements)


def concatenate(dtype: str, runs: Iterable[Part]) -> Copy:
    """Return all runs, end to end, as one flat tensor; raises Corrupt for strided ones."""
    parts, at = list[Part](), 0
    for run in runs:
        if run.strides:
            raise Corrupt(
                f"{run.extent.file}: a flat tensor whose elements do not follow each other"
            )
        if count := run.extent.size // ITEMSIZE[dtype]:
            parts.append(Part((at,), (count,), run.extent, None, run.checksum))
            at += count
    return Copy(dtype, (at,), tuple(parts))


def cut_flat(flat: Copy, start: int, count: int, into: int = 0) -> Iterator[Part]:
    """Yield ``count`` elements of a flat tensor from ``start``, as boxes from ``into`` on."""
    item, end = ITEMSIZE[flat.dtype], start + count
    index = max(0, bisect_right(flat.parts, start, key=lambda part: part.offsets[0]) - 1)
    while start < end:
        run = flat.parts[index]
        skip = start - run.offsets[0]
        size = min(end - start, run.sizes[0] - skip)
        extent = Extent(run.extent.file, run.extent.start + skip * item, size * item)
        yield Part((into,), (size,), extent, None, run.checksum)
        start, into, index = start + size, into + size, index + 1


def stage3_masters(optim: Sequence[StateFile], groups: Groups) -> dict[str, Copy]:
    """Return the fp32 master of every trained parameter at stage 3.

    Each parameter takes the same ``ceil(numel / W)`` elements of every rank; groups merge into one
    walk.
    """
    ranks = [_flat(file, "fp32_flat_groups", slice(None)) for file in optim]
    at, dtype = 0, _dtype(ranks)
    found: dict[str, Copy] = {}
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        numel = prod(shape)
        found[name] = Copy(dtype, (numel,), tuple(_across(ranks, at, numel)))
        at += -(-numel // len(ranks))
    if any(flat.grid != (at,) for flat in ranks):
        raise Corrupt(
            f"the parameters take {at} elements of every rank, the ranks have {_counts(ranks)}"
        )
    return found


def group_masters(
    optim: Sequence[StateFile], index: int, shapes: dict[str, Shape]
) -> dict[str, Copy]:
    """Return the masters of one parameter group at stages 1 and 2.

    ``optim``: the files of the ranks over which it is cut. Partitions in rank order are the
    flattened group; parameters follow each other, with gaps behind them.
    """
    ranks = [_flat(file, MASTERS, slice(index, index + 1)) for file in optim]
    whole = concatenate(_dtype(ranks), [run for flat in ranks for run in flat.parts])
    (count,) = whole.grid
    found: dict[str, Copy] = {}
    at = 0
    for (name, shape), gap in zip(
        shapes.items(), _alignments(optim[0], index, len(shapes)), strict=True
    ):
        numel = prod(shape)
        if at + numel > count:
            raise Corrupt(
                f"{name}: ends at element {at + numel}, the partitions of its group have {count}"
            )
        found[name] = Copy(whole.dtype, (numel,), tuple(cut_flat(whole, at, numel)))
        at += numel + gap
    # the padding that the ranks recorded; `BF16_Optimizer` leaves it in the partition
    recorded = (_of_group(file, "group_paddings", index) for file in optim)
    paddings = sum(n for n in recorded if type(n) is int)
    align = 2 * len(ranks)
    if -(-at // align) != -(-count // align) and count - at != paddings:
        raise Corrupt(f"a parameter group has {at} elements, its partitions {count}")
    _check_slices(optim, index, found)
    return found


def from_fragments(name: str, shape: Shape, dtype: str, parts: Sequence[Part]) -> Copy:
    """Return a frozen parameter at stage 3, of which each rank has ``ceil(numel / W)``."""
    flats = [concatenate(dtype, [part]) for part in parts]
    numel = prod(shape)
    each = -(-numel // len(flats))
    if any(flat.grid != (each,) for flat in flats):
        raise Corrupt(f"{name}: fragments of {_counts(flats)} elements, {each} expected")
    return Copy(dtype, (numel,), tuple(_across(flats, 0, numel)))


def _counts(flats: Iterable[Copy]) -> list[int]:
    return sorted({prod(flat.grid) for flat in flats})


def _flat(file: StateFile, key: str, which: slice) -> Copy:
    """Return one rank's tensors under ``key``, end to end."""
    held = optimizer_state(file).get(key)
    if not isinstance(held, (list, tuple)) or not all(
        isinstance(t, StoredTensor) and len(t.shape) == 1 for t in held
    ):
        raise Corrupt(f"{file.name}: no {key} of flat tensors")
    dtypes = {t.dtype for t in held}
    if len(dtypes) != 1 or not held[which]:
        raise Corrupt(f"{file.name}: {key} has {len(held)} tensors of {len(dtypes)} element types")
    return concatenate(dtypes.pop(), [file.part(tensor) for tensor in held[which]])


def _dtype(ranks: Sequence[Copy]) -> str:
    """Return the element type of all ranks' partitions; raises Corrupt where they differ."""
    dtypes = {flat.dtype for flat in ranks}
    if len(dtypes) != 1:
        raise Corrupt(
            f"the ranks' partitions have different element types: {', '.join(sorted(dtypes))}"
        )
    return dtypes.pop()


def _of_group(file: StateFile, key: str, group: int) -> Any:
    """Return the entry of one parameter group; None if the optimizer's state has none."""
    held = optimizer_state(file).get(key)
    return held[group] if isinstance(held, (list, tuple)) and group < len(held) else None


def _alignments(file: StateFile, group: int, count: int) -> Sequence[int]:
    """Return the elements of padding behind each parameter (DeepSpeed 0.19; none before)."""
    gaps = _of_group(file, "param_alignment_paddings", group)
    if gaps is None:
        return [0] * count
    if not isinstance(gaps, (list, tuple)) or len(gaps) != count or not are_naturals(gaps):
        raise Corrupt(f"{file.name}: param_alignment_paddings do not fit {count} parameters")
    return gaps


def _across(ranks: Sequence[Copy], at: int, numel: int) -> Iterator[Part]:
    """Yield ``numel`` elements of which each rank has an equal share from ``at`` on."""
    each = -(-numel // len(ranks))
    for rank, flat in enumerate(ranks):
        count = min(each, numel - rank * each)
        if count > 0:
            if at + count > flat.grid[0]:
                raise Corrupt(
                    f"rank {rank} has {flat.grid[0]} elements, expected at least {at + count}"
                )
            yield from cut_flat(flat, at, count, rank * each)


def _slices(file: StateFile, group: int) -> Slices | None:
    """Return what a rank's file says of a parameter group, but for empty slices; or None."""
    if optimizer_state(file).get("param_slice_mappings") is None:
        return None
    recorded = _of_group(file, "param_slice_mappings", group)
    if not isinstance(recorded, dict):
        raise Corrupt(f"{file.name}: param_slice_mappings do not fit parameter group {group}")
    found: Slices = {}
    for name, value in recorded.items():
        fields = value.state if isinstance(value, PickledObject) else None
        fields = fields if isinstance(fields, dict) else {}
        bounds: Any = [fields.get(key) for key in ("start", "numel")]
        if not isinstance(name, str) or not are_naturals(bounds):
            raise Corrupt(f"{file.name}: param_slice_mappings give {brief(name)} no elements")
        start, numel = bounds
        if numel:
            found[name] = start, numel
    return found


def _check_slices(optim: Sequence[StateFile], group: int, copies: Mapping[str, Copy]) -> None:
    """Raise Corrupt unless every rank's partition holds what its file says, or said."""
    held: dict[str, Slices] = {file.name: {} for file in optim}
    starts = {
        file.name: file.part(optimizer_state(file)[MASTERS][group]).extent.start for file in optim
    }
    for name, copy in copies.items():
        for part in copy.parts:
            item, file_name = ITEMSIZE[copy.dtype], part.extent.file
            held[file_name][name] = ((part.extent.start - starts[file_name]) // item, part.sizes[0])
    slices = {file.name: _slices(file, group) for file in optim}
    recorded = {file: own for file, own in slices.items() if own is not None}
    odd = next((file for file, found in recorded.items() if found != held[file]), None)
    if odd is not None and not _are_before_dealing(recorded, [file.name for file in optim], copies):
        name = min(dict(recorded[odd].items() ^ held[odd].items()))
        raise Corrupt(
            f"{odd}: its slice of {name} is {recorded[odd].get(name)}, {held[odd].get(name)}"
            " expected",
            hint="the file is of another rank, or of another save",
        )


def _are_before_dealing(
    recorded: Mapping[str, Slices], ranks: Sequence[str], copies: Mapping[str, Copy]
) -> bool:
    """Return whether the slices are those before ``_round_robin_reorder``."""
    # dealing takes the first rank's parameters, then the next rank's
    dealt = (n for rank in range(len(ranks)) for n in range(rank, len(copies), len(ranks)))
    order = sorted(zip(dealt, copies, strict=True))
    each = 2 * -(-sum(prod(copy.grid) for copy in copies.values()) // (2 * len(ranks)))
    held: dict[str, Slices] = {file: {} for file in ranks}
    at = 0
    for _, name in order:
        end = at + prod(copies[name].grid)
        for rank in range(at // each, -(-end // each)) if each else ():
            begin, behind = max(at, rank * each), min(end, (rank + 1) * each)
            held[ranks[rank]][name] = (begin - rank * each, behind - begin)
        at = end
    return all(found == held[file] for file, found in recorded.items())


# Experts

_LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]+)(\..*)")


def expert_weights(files: ZeroFiles, counts: Sequence[int]) -> ModelTensors:
    """Return every expert's own weights, under the names that the model file would give them.

    Experts are numbered over all ranks.

    Raises unless there are as many layers as ``counts`` says, each with all its experts, and all
    experts alike.
    """
    root = files.root or "."
    found: dict[str, tuple[StateFile, StoredTensor]] = {}
    layers: dict[str, dict[int, set[str]]] = {}
    for name, expert in files.expert_files(counts).items():
        file = files.load(name)
        for key, value in file.content.items():
            match = _LOCAL.fullmatch(key) if isinstance(key, str) else None
            if match is None or not isinstance(value, StoredTensor) or int(match[2]) != expert:
                raise Corrupt(f"{file.name}: {brief(key)} is no weight of expert {expert}")
            layers.setdefault(match[1], {}).setdefault(expert, set()).add(match[3])
            found[key] = (file, value)
    if len(layers) != len(counts):
        raise Corrupt(
            f"{root}: experts of {len(layers)} layers, {len(counts)} expected",
            hint="they are of different saves",
        )
    for prefix, experts in layers.items():
        if any(weights != experts[min(experts)] for weights in experts.values()):
            raise Corrupt(f"{root}: not all experts of {prefix} have the same weights")
    if sorted(map(len, layers.values())) != sorted(counts):
        raise Incomplete(f"{root}: some layers lack experts, {brief(counts)} expected")
    return found


def are_experts(names: Iterable[str]) -> bool:
    """Return whether a parameter group is of experts; raises Corrupt for a mixed one."""
    kinds = {_LOCAL.fullmatch(name) is not None for name in names}
    if len(kinds) > 1:
        raise Corrupt(
            "a parameter group has both experts and other parameters",
            hint="their masters are not cut alike",
        )
    return kinds == {True}


def all_experts(shapes: Mapping[str, Shape], own: ModelTensors) -> dict[str, Shape]:
    """Return the same parameters of all ranks' experts: ``shapes`` are those of one rank."""
    kinds = {(m[1], m[3]): shapes[m[0]] for m in map(_LOCAL.fullmatch, shapes) if m}
    return {
        m[0]: kinds[m[1], m[3]] for m in map(_LOCAL.fullmatch, own) if m and (m[1], m[3]) in kinds
    }


def _expert_sets(model: StateFile, optim: Sequence[StateFile], group: int) -> list[list[StateFile]]:
    """Return the ranks that share experts: every ``ep``-th, or neighbours if so configured."""
    world = len(optim)
    each = _of_group(optim[0], "partition_count", group)
    if type(each) is not int or not 0 < each <= world or world % each:
        raise Corrupt(
            f"{optim[0].name}: partition_count of group {group} is {brief(each)}, a divisor of"
            f" {world} expected"
        )
    ep = world // each
    if configuration(model).get("use_data_before_expert_parallelism") is True:
        return [list(optim[e * each : (e + 1) * each]) for e in range(ep)]
    return [list(optim[e::ep]) for e in range(ep)]


def expert_masters(
    model: StateFile, optim: Sequence[StateFile], groups: Groups, own: ModelTensors
) -> dict[str, Copy]:
    """Return the masters of all parameter groups of experts, under their names over all ranks."""
    per_rank: dict[str, int] = {}  # layer → how many of its experts one rank has
    for match in filter(None, (_LOCAL.fullmatch(name) for shapes in groups for name in shapes)):
        per_rank[match[1]] = max(per_rank.get(match[1], 0), int(match[2]) + 1)
    found: dict[str, Copy] = {}
    trained: set[tuple[str, str]] = set()
    for index, shapes in enumerate(groups):
        for number, files in enumerate(
            _expert_sets(model, optim, index) if are_experts(shapes) else ()
        ):
            for name, copy in group_masters(files, index, shapes).items():
                prefix, local, suffix = _LOCAL.fullmatch(name).groups()  # type: ignore[union-attr]
                found[f"{prefix}{number * per_rank[prefix] + int(local)}{suffix}"] = copy
                trained.add((prefix, suffix))
    # of each layer that is trained every expert has masters, and each is one that has a file
    odd = next((name for name in found if name not in own), None)
    if odd is not None:
        raise Corrupt(
            f"{model.name}: the optimizer has {odd}, of which there is no file",
            hint="the files are of different saves",
        )
    for one in filter(None, map(_LOCAL.fullmatch, own)):
        if (one[1], one[3]) in trained and one[0] not in found:
            raise Corrupt(f"{model.name}: {one[0]} has no master, other experts of its layer do")
    return found
