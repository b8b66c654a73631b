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
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import PickledObject, brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts.zero_files import MASTERS, StateFile, optimizer_state
from ckptsync.tensors import Copy, Extent, Part, Shape

Groups = Sequence[dict[str, Shape]]
Slices = dict[str, tuple[int, int]]  # parameter → (first element in the partition, elements)


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flattened tensor of one dtype, in one or several extents.

    Run ``i`` holds the elements from ``starts[i]``, of ``numel`` in all.
    """

    dtype: str
    runs: tuple[Part, ...]
    starts: tuple[int, ...]
    numel: int

    def cut(self, start: int, count: int, into: int = 0) -> list[Part]:
        """Return ``count`` elements from ``start`` as boxes of a flattened tensor.

        They begin at ``into`` there.
        """
        item = ITEMSIZE[self.dtype]
        at, end = start, start + count
        index = bisect_right(self.starts, at) - 1
        found: list[Part] = []
        while at < end:
            run = self.runs[index]
            skip = at - self.starts[index]
            size = min(end - at, run.extent.size // item - skip)
            if size > 0:
                extent = Extent(run.extent.file, run.extent.start + skip * item, size * item)
                found.append(Part((into + at - start,), (size,), extent, None, run.checksum))
                at += size
            index += 1
        return found


def concatenate(dtype: str, runs: Iterable[Part]) -> FlatTensor:
    """Return the runs end to end; empty ones are dropped.

    Raises Corrupt for a run whose elements do not follow each other.
    """
    kept = tuple(run for run in runs if run.extent.size)
    if any(run.strides for run in kept):
        raise Corrupt(
            f"{kept[0].extent.file}: a flat tensor whose elements do not follow each other"
        )
    ends = tuple(accumulate(run.extent.size // ITEMSIZE[dtype] for run in kept))
    return FlatTensor(dtype, kept, (0, *ends[:-1]) if ends else (), ends[-1] if ends else 0)


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
    if any(flat.numel != at for flat in ranks):
        raise Corrupt(
            f"the parameters take {at} elements of every rank, the ranks have"
            f" {sorted({flat.numel for flat in ranks})}"
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
    whole = concatenate(_dtype(ranks), [run for flat in ranks for run in flat.runs])
    found: dict[str, Copy] = {}
    at = 0
    for (name, shape), gap in zip(
        shapes.items(), _alignments(optim[0], index, len(shapes)), strict=True
    ):
        numel = prod(shape)
        if at + numel > whole.numel:
            raise Corrupt(
                f"{name}: ends at element {at + numel}, the partitions of its group have"
                f" {whole.numel}"
            )
        found[name] = Copy(whole.dtype, (numel,), tuple(whole.cut(at, numel)))
        at += numel + gap
    align = 2 * len(ranks)
    if -(-at // align) != -(-whole.numel // align) and whole.numel - at != _paddings(optim, index):
        raise Corrupt(f"a parameter group has {at} elements, its partitions {whole.numel}")
    _check_slices(optim, index, found)
    return found


def from_fragments(name: str, shape: Shape, dtype: str, parts: Sequence[Part]) -> Copy:
    """Return a frozen parameter at stage 3: rank r holds elements from ``r * ceil(numel / W)``.

    The last ones are padding.
    """
    flats = [concatenate(dtype, [part]) for part in parts]
    numel = prod(shape)
    each = -(-numel // len(flats))
    if any(flat.numel != each for flat in flats):
        raise Corrupt(
            f"{name}: fragments of {sorted({flat.numel for flat in flats})} elements, {each}"
            " expected"
        )
    return Copy(dtype, (numel,), tuple(_across(flats, 0, numel)))


def _flat(file: StateFile, key: str, which: slice) -> FlatTensor:
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


def _dtype(ranks: Sequence[FlatTensor]) -> str:
    """Return the element type of all ranks' partitions; raises Corrupt where they differ."""
    dtypes = {flat.dtype for flat in ranks}
    if len(dtypes) != 1:
        raise Corrupt(
            f"the ranks' partitions have different element types: {', '.join(sorted(dtypes))}"
        )
    return dtypes.pop()


def _alignments(file: StateFile, group: int, count: int) -> Sequence[int]:
    """Return the elements of padding behind each parameter (DeepSpeed 0.19; none before)."""
    per_group = optimizer_state(file).get("param_alignment_paddings")
    gaps: Any = (
        per_group[group]
        if isinstance(per_group, (list, tuple)) and group < len(per_group)
        else [0] * count
    )
    if (
        not isinstance(gaps, (list, tuple))
        or len(gaps) != count
        or any(type(n) is not int or n < 0 for n in gaps)
    ):
        raise Corrupt(f"{file.name}: param_alignment_paddings do not fit {count} parameters")
    return gaps


def _paddings(optim: Sequence[StateFile], group: int) -> int:
    """Return the padding that the ranks recorded; ``BF16_Optimizer`` leaves it in the partition."""
    found = [optimizer_state(file).get("group_paddings") for file in optim]
    return sum(
        p[group]
        for p in found
        if isinstance(p, (list, tuple)) and group < len(p) and type(p[group]) is int
    )


def _across(ranks: Sequence[FlatTensor], at: int, numel: int) -> Iterator[Part]:
    each = -(-numel // len(ranks))
    for rank, flat in enumerate(ranks):
        count = min(each, numel - rank * each)
        if count > 0:
            if at + count > flat.numel:
                raise Corrupt(
                    f"rank {rank} has {flat.numel} elements, expected at least {at + count}"
                )
            yield from flat.cut(at, count, rank * each)


def _slices(file: StateFile, group: int) -> Slices | None:
    """Return what one rank's file says of one parameter group; None if it says nothing."""
    groups = optimizer_state(file).get("param_slice_mappings")
    if groups is None:
        return None
    if (
        not isinstance(groups, (list, tuple))
        or group >= len(groups)
        or not isinstance(groups[group], dict)
    ):
        raise Corrupt(f"{file.name}: param_slice_mappings do not fit parameter group {group}")
    return {name: _slice(file, name, value) for name, value in groups[group].items()}


def _slice(file: StateFile, name: Any, value: Any) -> tuple[int, int]:
    """Return start and numel of a ``fragment_address(numel, start)``, a dataclass."""
    fields = (
        value.state if isinstance(value, PickledObject) and isinstance(value.state, dict) else {}
    )
    start, numel = fields.get("start"), fields.get("numel")
    if (
        not isinstance(name, str)
        or type(start) is not int
        or type(numel) is not int
        or start < 0
        or numel < 0
    ):
        raise Corrupt(f"{file.name}: param_slice_mappings give {brief(name)} no elements")
    return start, numel


def _check_slices(optim: Sequence[StateFile], group: int, copies: Mapping[str, Copy]) -> None:
    """Raise Corrupt unless every rank's partition holds what its own file says that it does.

    Or what the file said before parameters were dealt.
    """
    held: dict[str, Slices] = {file.name: {} for file in optim}
    starts = {
        file.name: file.part(optimizer_state(file)[MASTERS][group]).extent.start for file in optim
    }
    for name, copy in copies.items():
        for part in copy.parts:
            item, file_name = ITEMSIZE[copy.dtype], part.extent.file
            held[file_name][name] = ((part.extent.start - starts[file_name]) // item, part.sizes[0])
    recorded: dict[str, Slices] = {}
    for file in optim:
        own = _slices(file, group)
        if own is not None:
            recorded[file.name] = {name: found for name, found in own.items() if found[1]}
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
    """Return whether all ranks' slices are those before ``_round_robin_reorder``.

    Then parameters were flattened without gaps.
    """
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
