"""Compute where the elements of parameters lie in DeepSpeed's flat partitions of fp32 masters.

Stages 1 and 2 flatten each parameter group and cut it into one partition a rank; stage 3 cuts every
parameter into ``ceil(numel / W)`` elements a rank, padded, in flat groups. Source:
``_zero2_merge_trainable_params`` and ``_zero3_merge_trainable_params`` of
``deepspeed/utils/zero_to_fp32.py``, 0.19.8.

``param_slice_mappings`` records which elements of which parameter a rank's partition holds. Stages
1 and 2 and ``BF16_Optimizer`` write it since DeepSpeed 0.8
(``deepspeed/runtime/bf16_optimizer.py``, ``deepspeed/utils/tensor_fragment.py``, 0.19.8). It shows
that a rank's file is its own. With ``round_robin_gradients`` the elements lie as parameters were
dealt out to the ranks, which is the order of ``param_shapes``, but ``_link_all_hp_params``
(``deepspeed/runtime/zero/stage_1_and_2.py``) uses the order before that, and so do the slices.

Experts of a mixture have a file each, and masters that are cut over fewer ranks than other
parameters'. Every rank numbers its own experts from 0; files and the merged model number them over
all ranks. Which experts a rank has follows from ``_create_expert_and_data_parallel``
(``deepspeed/utils/groups.py``) and ``use_data_before_expert_parallelism``; the sizes of the ranks'
partitions confirm it. Sources: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of
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
    """Return ``runs`` end to end as a copy of grid ``(elements,)``, without the empty ones.

    Raise Corrupt for strided ones.
    """
    parts, end = list[Part](), 0
    for run in runs:
        if run.strides:
            raise Corrupt(
                f"{run.extent.file}: a flat tensor whose elements do not follow each other"
            )
        if count := run.extent.size // ITEMSIZE[dtype]:
            parts.append(Part((end,), (count,), run.extent, None, run.checksum))
            end += count
    return Copy(dtype, (end,), tuple(parts))


def cut_flat(flat: Copy, start: int, count: int, target: int = 0) -> Iterator[Part]:
    """Yield ``count`` elements of ``flat`` from ``start``, as flat boxes at ``target`` and behind.

    Each of its parts gives one box. The caller checks the bounds: IndexError behind the end.
    """
    item, end = ITEMSIZE[flat.dtype], start + count
    index = max(0, bisect_right(flat.parts, start, key=lambda part: part.offsets[0]) - 1)
    while start < end:
        run = flat.parts[index]
        skip = start - run.offsets[0]
        size = min(end - start, run.sizes[0] - skip)
        extent = Extent(run.extent.file, run.extent.start + skip * item, size * item)
        yield Part((target,), (size,), extent, None, run.checksum)
        start, target, index = start + size, target + size, index + 1


def stage3_masters(optim: Sequence[StateFile], groups: Groups) -> dict[str, Copy]:
    """Return the fp32 master of every trained parameter at stage 3, each with grid ``(numel,)``.

    ``optim``: the files of all ranks in order. A parameter has ``ceil(numel / W)`` elements at the
    same place of every rank; groups follow each other. Raise Corrupt unless the parameters take
    exactly the elements of every rank, and all have one dtype.
    """
    ranks = [_flat(file, "fp32_flat_groups", slice(None)) for file in optim]
    end, dtype = 0, _dtype(ranks)
    masters: dict[str, Copy] = {}
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        numel = prod(shape)
        masters[name] = Copy(dtype, (numel,), tuple(_across(ranks, end, numel)))
        end += -(-numel // len(ranks))
    if any(flat.grid != (end,) for flat in ranks):
        raise Corrupt(
            f"the parameters take {end} elements of every rank, the ranks have {_counts(ranks)}"
        )
    return masters


def group_masters(
    optim: Sequence[StateFile], index: int, shapes: dict[str, Shape]
) -> dict[str, Copy]:
    """Return the masters of one parameter group at stages 1 and 2, each with grid ``(numel,)``.

    ``optim``: the files of the ranks over which it is cut, in order. Their partitions are the
    flattened group; parameters follow each other, with the gaps that the first file records. Raise
    Corrupt if elements are missing, if those left are neither the recorded padding nor within the
    next multiple of two a rank, or as `_check_slices`.
    """
    ranks = [_flat(file, MASTERS, slice(index, index + 1)) for file in optim]
    whole = concatenate(_dtype(ranks), [run for flat in ranks for run in flat.parts])
    (count,) = whole.grid
    masters: dict[str, Copy] = {}
    end = 0
    for (name, shape), gap in zip(
        shapes.items(), _alignments(optim[0], index, len(shapes)), strict=True
    ):
        numel = prod(shape)
        if end + numel > count:
            raise Corrupt(
                f"{name}: ends at element {end + numel}, the partitions of its group have {count}"
            )
        masters[name] = Copy(whole.dtype, (numel,), tuple(cut_flat(whole, end, numel)))
        end += numel + gap
    # the padding that the ranks recorded; `BF16_Optimizer` leaves it in the partition
    recorded = (_of_group(file, "group_paddings", index) for file in optim)
    paddings = sum(n for n in recorded if type(n) is int)
    align = 2 * len(ranks)
    if -(-end // align) != -(-count // align) and count - end != paddings:
        raise Corrupt(f"a parameter group has {end} elements, its partitions {count}")
    _check_slices(optim, index, masters)
    return masters


def from_fragments(name: str, shape: Shape, dtype: str, parts: Sequence[Part]) -> Copy:
    """Return a frozen parameter at stage 3, of which each rank has ``ceil(numel / W)`` elements.

    Raise Corrupt if a fragment has another size.
    """
    flats = [concatenate(dtype, [part]) for part in parts]
    numel = prod(shape)
    per_rank = -(-numel // len(flats))
    if any(flat.grid != (per_rank,) for flat in flats):
        raise Corrupt(f"{name}: fragments of {_counts(flats)} elements, {per_rank} expected")
    return Copy(dtype, (numel,), tuple(_across(flats, 0, numel)))


def _counts(flats: Iterable[Copy]) -> list[int]:
    """Return the different numbers of elements of flat tensors."""
    return sorted({prod(flat.grid) for flat in flats})


def _flat(file: StateFile, key: str, groups: slice) -> Copy:
    """Return one rank's tensors under ``key``, those of ``groups``, end to end.

    Raise Corrupt if ``groups`` selects none, or if those of all groups are not flat tensors of one
    dtype.
    """
    stored = optimizer_state(file).get(key)
    if not isinstance(stored, (list, tuple)) or not all(
        isinstance(t, StoredTensor) and len(t.shape) == 1 for t in stored
    ):
        raise Corrupt(f"{file.name}: no {key} of flat tensors")
    dtypes = {t.dtype for t in stored}
    if len(dtypes) != 1 or not stored[groups]:
        raise Corrupt(
            f"{file.name}: {key} has {len(stored)} tensors of {len(dtypes)} element types"
        )
    return concatenate(dtypes.pop(), [file.part(tensor) for tensor in stored[groups]])


def _dtype(ranks: Sequence[Copy]) -> str:
    """Return the dtype of all ranks' partitions; raise Corrupt if they differ."""
    dtypes = {flat.dtype for flat in ranks}
    if len(dtypes) != 1:
        raise Corrupt(
            f"the ranks' partitions have different element types: {', '.join(sorted(dtypes))}"
        )
    return dtypes.pop()


def _of_group(file: StateFile, key: str, group: int) -> Any:
    """Return entry ``group`` of the list ``key`` of the optimizer's state.

    None if it is no list or too short. Raise Corrupt without a state.
    """
    entries = optimizer_state(file).get(key)
    return entries[group] if isinstance(entries, (list, tuple)) and group < len(entries) else None


def _alignments(file: StateFile, group: int, count: int) -> Sequence[int]:
    """Return the elements of padding after each of ``count`` parameters; 0s before DeepSpeed 0.19.

    Raise Corrupt unless they are ``count`` natural numbers.
    """
    gaps = _of_group(file, "param_alignment_paddings", group)
    if gaps is None:
        return [0] * count
    if not isinstance(gaps, (list, tuple)) or len(gaps) != count or not are_naturals(gaps):
        raise Corrupt(f"{file.name}: param_alignment_paddings do not fit {count} parameters")
    return gaps


def _across(ranks: Sequence[Copy], start: int, numel: int) -> Iterator[Part]:
    """Yield the flat boxes of ``numel`` elements, of which rank after rank has ``ceil(numel / W)``.

    They begin at element ``start`` of each rank; the last ranks may have fewer, or none. Raise
    Corrupt if a rank is too short.
    """
    per_rank = -(-numel // len(ranks))
    for rank, flat in enumerate(ranks):
        count = min(per_rank, numel - rank * per_rank)
        if count > 0:
            if start + count > flat.grid[0]:
                raise Corrupt(
                    f"rank {rank} has {flat.grid[0]} elements, expected at least {start + count}"
                )
            yield from cut_flat(flat, start, count, rank * per_rank)


def _slices(file: StateFile, group: int) -> Slices | None:
    """Return what a file's ``param_slice_mappings`` record of a group, without empty slices.

    None if the file has none. Raise Corrupt if they have no dictionary of slices for this group, or
    a slice in it has not a name and two natural numbers.
    """
    if optimizer_state(file).get("param_slice_mappings") is None:
        return None
    recorded = _of_group(file, "param_slice_mappings", group)
    if not isinstance(recorded, dict):
        raise Corrupt(f"{file.name}: param_slice_mappings do not fit parameter group {group}")
    slices: Slices = {}
    for name, value in recorded.items():
        fields = value.state if isinstance(value, PickledObject) else None
        fields = fields if isinstance(fields, dict) else {}
        bounds: Any = [fields.get(key) for key in ("start", "numel")]
        if not isinstance(name, str) or not are_naturals(bounds):
            raise Corrupt(f"{file.name}: param_slice_mappings give {brief(name)} no elements")
        start, numel = bounds
        if numel:
            slices[name] = start, numel
    return slices


def _check_slices(optim: Sequence[StateFile], group: int, copies: Mapping[str, Copy]) -> None:
    """Raise Corrupt unless every rank's partition holds the slices that its file records.

    ``copies``: the group's masters. Files that record none pass; so do all files if the slices are
    those before ``round_robin_gradients`` dealt the parameters out.
    """
    actual: dict[str, Slices] = {file.name: {} for file in optim}
    starts = {
        file.name: file.part(optimizer_state(file)[MASTERS][group]).extent.start for file in optim
    }
    for name, copy in copies.items():
        for part in copy.parts:
            item, file_name = ITEMSIZE[copy.dtype], part.extent.file
            actual[file_name][name] = (
                (part.extent.start - starts[file_name]) // item,
                part.sizes[0],
            )
    slices = {file.name: _slices(file, group) for file in optim}
    recorded = {
        file: file_slices for file, file_slices in slices.items() if file_slices is not None
    }
    wrong_file = next(
        (file for file, own_slices in recorded.items() if own_slices != actual[file]), None
    )
    if wrong_file is not None and not _are_before_dealing(
        recorded, [file.name for file in optim], copies
    ):
        name = min(dict(recorded[wrong_file].items() ^ actual[wrong_file].items()))
        raise Corrupt(
            f"{wrong_file}: its slice of {name} is {recorded[wrong_file].get(name)},"
            f" {actual[wrong_file].get(name)} expected",
            hint="the file is of another rank, or of another save",
        )


def _are_before_dealing(
    recorded: Mapping[str, Slices], ranks: Sequence[str], copies: Mapping[str, Copy]
) -> bool:
    """Return whether all recorded slices are those before ``_round_robin_reorder``.

    ``ranks``: the files' names in the order of the ranks. ``copies``: in the dealt order.
    """
    # dealing takes the first rank's parameters, then the next rank's
    dealt_numbers = (n for rank in range(len(ranks)) for n in range(rank, len(copies), len(ranks)))
    order = sorted(zip(dealt_numbers, copies, strict=True))
    size = 2 * -(-sum(prod(copy.grid) for copy in copies.values()) // (2 * len(ranks)))
    original_slices: dict[str, Slices] = {file: {} for file in ranks}
    start = 0
    for _, name in order:
        end = start + prod(copies[name].grid)
        for rank in range(start // size, -(-end // size)) if size else ():
            begin, behind = max(start, rank * size), min(end, (rank + 1) * size)
            original_slices[ranks[rank]][name] = (begin - rank * size, behind - begin)
        start = end
    return all(own_slices == original_slices[file] for file, own_slices in recorded.items())


# Experts

_LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]+)(\..*)")


def expert_weights(files: ZeroFiles, counts: Sequence[int]) -> ModelTensors:
    """Load every expert's file and return the weights; names number experts over all ranks.

    ``counts``: how many experts each layer has. Raise Incomplete if an expert or its file is
    missing; Corrupt if a file holds something else than its expert's weights, if the number of
    layers is another, or if experts of a layer have weights of different names.
    """
    root = files.root or "."
    weights_by_name: dict[str, tuple[StateFile, StoredTensor]] = {}
    layers: dict[str, dict[int, set[str]]] = {}
    for name, expert in files.expert_files(counts).items():
        file = files.load(name)
        for key, value in file.content.items():
            match = _LOCAL.fullmatch(key) if isinstance(key, str) else None
            if match is None or not isinstance(value, StoredTensor) or int(match[2]) != expert:
                raise Corrupt(f"{file.name}: {brief(key)} is no weight of expert {expert}")
            layers.setdefault(match[1], {}).setdefault(expert, set()).add(match[3])
            weights_by_name[key] = (file, value)
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
    return weights_by_name


def are_experts(names: Iterable[str]) -> bool:
    """Return whether all ``names`` are experts' weights; False for none, Corrupt for a mixture."""
    kinds = {_LOCAL.fullmatch(name) is not None for name in names}
    if len(kinds) > 1:
        raise Corrupt(
            "a parameter group has both experts and other parameters",
            hint="their masters are not cut alike",
        )
    return kinds == {True}


def all_experts(shapes: Mapping[str, Shape], own: ModelTensors) -> dict[str, Shape]:
    """Return the shapes of those experts' weights in ``own`` that the optimizer trains.

    ``shapes``: those of one rank's experts, which stand for the same weight of other experts of
    their layer.
    """
    kinds = {(m[1], m[3]): shapes[m[0]] for m in map(_LOCAL.fullmatch, shapes) if m}
    return {
        m[0]: kinds[m[1], m[3]] for m in map(_LOCAL.fullmatch, own) if m and (m[1], m[3]) in kinds
    }


def _expert_sets(model: StateFile, optim: Sequence[StateFile], group: int) -> list[list[StateFile]]:
    """Return the files of each set of ranks that have the same experts.

    A set has ``partition_count`` ranks of ``optim``: every ``ep``-th, or neighbours with
    ``use_data_before_expert_parallelism``. Raise Corrupt if that does not divide all ranks.
    """
    world = len(optim)
    set_size = _of_group(optim[0], "partition_count", group)
    if type(set_size) is not int or not 0 < set_size <= world or world % set_size:
        raise Corrupt(
            f"{optim[0].name}: partition_count of group {group} is {brief(set_size)}, a divisor of"
            f" {world} expected"
        )
    ep = world // set_size
    if configuration(model).get("use_data_before_expert_parallelism") is True:
        return [list(optim[number * set_size : (number + 1) * set_size]) for number in range(ep)]
    return [list(optim[number::ep]) for number in range(ep)]


def expert_masters(
    model: StateFile, optim: Sequence[StateFile], groups: Groups, own: ModelTensors
) -> dict[str, Copy]:
    """Return the masters of all experts, numbered over all ranks; {} if no group is of experts.

    Raise Corrupt if one has no file (is not in ``own``), if an expert in ``own`` has none but
    others of its layer do, or as `group_masters` and `_expert_sets`.
    """
    per_rank: dict[str, int] = {}  # layer → how many of its experts one rank has
    for match in filter(None, (_LOCAL.fullmatch(name) for shapes in groups for name in shapes)):
        per_rank[match[1]] = max(per_rank.get(match[1], 0), int(match[2]) + 1)
    masters: dict[str, Copy] = {}
    trained: set[tuple[str, str]] = set()
    for index, shapes in enumerate(groups):
        for number, files in enumerate(
            _expert_sets(model, optim, index) if are_experts(shapes) else ()
        ):
            for name, copy in group_masters(files, index, shapes).items():
                prefix, local, suffix = _LOCAL.fullmatch(name).groups()  # type: ignore[union-attr]
                masters[f"{prefix}{number * per_rank[prefix] + int(local)}{suffix}"] = copy
                trained.add((prefix, suffix))
    # of each layer that is trained every expert has masters, and each is one that has a file
    without_file = next((name for name in masters if name not in own), None)
    if without_file is not None:
        raise Corrupt(
            f"{model.name}: the optimizer has {without_file}, of which there is no file",
            hint="the files are of different saves",
        )
    for expert in filter(None, map(_LOCAL.fullmatch, own)):
        if (expert[1], expert[3]) in trained and expert[0] not in masters:
            raise Corrupt(f"{model.name}: {expert[0]} has no master, other experts of its layer do")
    return masters
