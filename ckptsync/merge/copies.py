"""Prove that a parameter which a checkpoint stores several times has the same values everywhere: else its files are of different saves.

DeepSpeed keeps the model's 16-bit weights beside the fp32 masters, the Trainer a whole model beside the shards.  Each copy is the most
precise one, rounded to nearest: so a rank's file of another run shows, also where names, sizes, steps and times are the same.  Of
every file all values are compared if they are few, else `WINDOWS` ranges, evenly spaced.

Replicas, which several ranks store of one part of a tensor, are compared so, too; and in full while a merge reads them (`Compared`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats import zstd_items
from ckptsync.formats.dtypes import ITEMSIZE, PRECISION
from ckptsync.merge.cast import FLOATS, RAW, Array, cast
from ckptsync.merge.cut import Box, fills
from ckptsync.merge.gather import gather
from ckptsync.merge.plan import FilePlan, PlannedTensor
from ckptsync.merge.summed import SummedFiles
from ckptsync.merge.units import Place, Read, Unit, runs
from ckptsync.model import Copy, Extent, Files, Part, Shape, Tensor, expect

WINDOWS = 16  # of a file
ELEMENTS = 4 << 10  # of a window; a file of no more than all windows' elements is compared whole
_TENSORS = 64  # that a window goes over at most: many small ones tell as much as one large one
_BATCH = 512 << 10  # elements that are compared at once


class _Pair(NamedTuple):
    """Two copies of a tensor that must agree: ``narrow`` is ``wide``, rounded to its element type."""

    tensor: Tensor
    wide: Copy
    narrow: Copy


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """A box of a tensor that is a range of the flattened one: its first element, and how many it has."""

    pair: _Pair
    box: Box
    start: int
    count: int


@dataclass(slots=True)
class _Verdicts:
    """Which pairs of files agree; of those that do not, two copies that show it."""

    equal: set[tuple[str, str]] = field(default_factory=set)
    differ: dict[tuple[str, str], _Pair] = field(default_factory=dict)

    def odd(self) -> tuple[str, str, _Pair]:
        """The file that agrees with the fewest others, one that it does not agree with, and two copies that show it."""
        agrees = Counter(name for pair in self.equal for name in pair)
        differs = Counter(name for pair in self.differ for name in pair)
        pair = min(self.differ, key=lambda pair: min((agrees[name], -differs[name]) for name in pair))
        odd, other = sorted(pair, key=lambda name: (agrees[name], -differs[name]))
        return odd, other, self.differ[pair]


def check(files: Files, tensors: Iterable[Tensor]) -> None:
    """Raise Corrupt, naming the file, if two stored copies of a tensor differ in what is compared of them.

    Raises Unsupported for replicas that differ where nothing else says that they are replicas.
    """
    pairs = [pair for tensor in tensors if not tensor.tied for pair in (*_pairs(tensor), *_replicas(tensor))]
    verdicts = _Verdicts()
    for batch in _batches({(id(r.pair.narrow), r.start, r.count): r for r in _ranges(pairs)}.values()):
        _compare(files, batch, verdicts)
    if verdicts.differ:
        odd, other, pair = verdicts.odd()
        parts = [part for part in (*pair.wide.parts, *pair.narrow.parts) if part.extent.file in (odd, other)]
        is_replica = any(part.replicas for part in pair.wide.parts)  # else a part is a piece of a record of any length
        raise _unequal(files, pair.tensor.name, pair.wide.doubt, parts if is_replica else (), (odd, other))


def _pairs(tensor: Tensor) -> Iterator[_Pair]:
    here = [
        copy for copy in tensor.copies if copy.parts and not any(zstd_items.parse_name(part.extent.file) for part in copy.parts)
    ]
    if tensor.unlike or len(here) < 2:
        return
    wide = max(here, key=lambda copy: PRECISION.get(copy.dtype, 0))
    for narrow in here:
        if narrow is not wide and (narrow.dtype == wide.dtype or {narrow.dtype, wide.dtype} <= PRECISION.keys()):
            yield _Pair(tensor, wide, narrow)


def _replicas(tensor: Tensor) -> Iterator[_Pair]:
    for copy in tensor.copies:
        for nth in range(min((len(part.replicas) for part in copy.parts), default=0)):
            yield _Pair(tensor, copy, replace(copy, parts=tuple(part.replicas[nth] for part in copy.parts)))


def _unequal(files: Files, name: str, doubt: str, parts: Iterable[Part], names: tuple[str, str]) -> CkptsyncError:
    """Return what to say of a tensor that is not the same in two files.  Raises Corrupt if one of its parts is damaged."""
    odd, other = names
    SummedFiles(files, {part.checksum for part in parts if part.checksum}).finish()
    if doubt:
        return Unsupported(
            f"{name} {doubt}, its values in {odd} are not those in {other}, and nothing says how they go together",
            hint="are the files of one save? if so, save it on a mesh of all ranks, or with torch.distributed.checkpoint",
        )
    return Corrupt(
        f"{odd}: its values of {name} are not those in {other}",
        hint="the files are of different saves: give those that one save wrote",
    )


def _ranges(pairs: Sequence[_Pair]) -> Iterator[_Range]:
    """What is compared: of each file that holds some of them."""
    held: dict[str, list[tuple[_Pair, Copy, Part]]] = {}
    for pair in pairs:
        for copy in (pair.wide, pair.narrow):
            for part in copy.parts:
                if prod(part.sizes):
                    held.setdefault(part.extent.file, []).append((pair, copy, part))
    for parts in held.values():
        ends = list(accumulate(prod(part.sizes) for _, _, part in parts))
        is_small = ends[-1] <= WINDOWS * ELEMENTS
        starts = [0] if is_small else [n * (ends[-1] - ELEMENTS) // (WINDOWS - 1) for n in range(WINDOWS)]
        size, most = (ends[-1], len(parts)) if is_small else (ELEMENTS, _TENSORS)
        for start in starts:
            first = bisect_right(ends, start)
            for (pair, copy, part), end in zip(parts[first : first + most], ends[first : first + most], strict=True):
                begin = end - prod(part.sizes)
                if begin >= start + size:
                    break
                yield from _of_part(pair, copy.grid, part, max(start - begin, 0), min(start + size, end) - begin)


def _of_part(pair: _Pair, grid: Shape, part: Part, low: int, high: int) -> Iterator[_Range]:
    """The elements ``low`` to ``high`` of a part, as ranges of the tensor; of a part that is none, what follows its element ``low``."""
    shape, at = pair.tensor.shape, _flattened(grid, part, low)
    end = at + high - low if _is_range(part, grid) else at + 1
    while at < end:
        found = _around(pair, shape, at, end - at)
        yield found
        at = found.start + found.count


def _flattened(grid: Shape, part: Part, element: int) -> int:
    """Which element of the flattened tensor the one of this number in a part is."""
    at, step = 0, 1
    for offset, size, whole in zip(reversed(part.offsets), reversed(part.sizes), reversed(grid), strict=True):
        element, place = divmod(element, size)
        at += (offset + place) * step
        step *= whole
    return at


def _is_range(part: Part, grid: Shape) -> bool:
    return part.sizes[1:] == grid[1:]


def _around(pair: _Pair, shape: Shape, at: int, most: int) -> _Range:
    """The box that begins in the row of element ``at``, of about ``most`` elements: as many whole rows as that are, or a piece of one."""
    most = max(1, min(most, ELEMENTS))
    axis, tail = 0, prod(shape[1:])
    while axis < len(shape) - 1 and tail > most:
        axis += 1
        tail = prod(shape[axis + 1 :])
    if not shape:
        return _Range(pair, Box((), ()), 0, 1)
    whole, row = divmod(at // tail, shape[axis])
    rows = min(max(1, most // tail), shape[axis] - row)
    outer: list[int] = []
    for size in reversed(shape[:axis]):
        whole, place = divmod(whole, size)
        outer.insert(0, place)
    behind = shape[axis + 1 :]
    box = Box((*outer, row, *(0,) * len(behind)), (*(1,) * axis, rows, *behind))
    return _Range(pair, box, at // tail * tail, rows * tail)


def _batches(found: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Ranges that are read together: their copies have the same two element types."""
    batch: list[_Range] = []
    held = 0
    for one in found:
        if batch and (held + one.count > _BATCH or _types(one) != _types(batch[0])):
            yield batch
            batch, held = [], 0
        batch.append(one)
        held += one.count
    if batch:
        yield batch


def _types(one: _Range) -> tuple[str, str]:
    return one.pair.wide.dtype, one.pair.narrow.dtype


def _compare(files: Files, batch: Sequence[_Range], verdicts: _Verdicts) -> None:
    wide, narrow = (_read(files, [(one, copy) for one, copy in zip(batch, copies, strict=True)]) for copies in _copies(batch))
    rounded, _ = cast(wide, *_types(batch[0]))
    differs = (rounded != narrow) & ~(_is_nan(rounded, batch[0].pair.narrow.dtype) & _is_nan(narrow, batch[0].pair.narrow.dtype))
    at = 0
    for one in batch:
        odd = np.flatnonzero(differs[at : at + one.count])
        for pair in _holders(one):
            verdicts.equal.add(pair)
        for element in {int(odd[0]), int(odd[-1])} if len(odd) else ():
            holders = tuple(_holder(copy, one, element) for copy in (one.pair.wide, one.pair.narrow))
            verdicts.differ.setdefault((holders[0], holders[1]), one.pair)
        at += one.count
    verdicts.equal -= verdicts.differ.keys()


def _copies(batch: Sequence[_Range]) -> tuple[list[Copy], list[Copy]]:
    return [one.pair.wide for one in batch], [one.pair.narrow for one in batch]


def _holders(one: _Range) -> set[tuple[str, str]]:
    """The files of the first and the last element."""
    return {(_holder(one.pair.wide, one, element), _holder(one.pair.narrow, one, element)) for element in (0, one.count - 1)}


def _holder(copy: Copy, one: _Range, element: int) -> str:
    """The file that has this element of a range."""
    place: list[int] = []
    left = one.start + element
    for size in reversed(copy.grid):
        left, index = divmod(left, size)
        place.insert(0, index)
    for part in copy.parts:
        if all(o <= n < o + size for n, o, size in zip(place, part.offsets, part.sizes, strict=True)):
            return part.extent.file
    return copy.parts[0].extent.file


def _is_nan(values: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return (values & 0x7FFF) > 0x7F80
    return np.isnan(values.view(FLOATS[dtype])) if dtype in FLOATS else np.zeros(len(values), bool)


def _read(files: Files, wanted: Sequence[tuple[_Range, Copy]]) -> Array:
    """The elements of all ranges, one after the other."""
    item = ITEMSIZE[wanted[0][1].dtype]
    unit = Unit()
    for one, copy in wanted:
        unit.reads += _reads(one, copy, item, unit.stored)
        unit.stored += one.count * item
    out = np.empty(unit.stored, "u1")
    gather(files, unit, out.data)
    return out.view(RAW[item])


def _reads(one: _Range, copy: Copy, item: int, at: int) -> Iterator[Read]:
    flat = runs(copy)
    if flat is None:
        box = one.box if copy.grid == one.pair.tensor.shape else Box((one.start,), (one.count,))
        for part in copy.parts:
            for fill in fills(box, part, item):
                yield Read(fill.extent.file, fill.extent.start, fill.extent.size, at, Place(box.sizes, item, fill))
        return
    low, high = one.start * item, (one.start + one.count) * item
    for run in flat:
        begin, end = max(low, run.at), min(high, run.at + run.size)
        if begin < end:
            yield Read(run.file, run.start + begin - run.at, end - begin, at + begin - low)


class _Twin(NamedTuple):
    """A replica of a part of a tensor; what is read of it belongs at byte ``at`` of what is read of the part."""

    at: int
    tensor: PlannedTensor
    part: Part
    replica: Part


class Compared:
    """`Files` that read with every range of a plan's parts the same range of their replicas, and compare the bytes."""

    def __init__(self, files: Files, plan: FilePlan) -> None:
        self._files = files
        self._held: defaultdict[str, list[tuple[int, int, PlannedTensor, Part]]] = defaultdict(list)
        for tensor in plan.tensors:
            for part in tensor.copy.parts:
                if part.replicas:
                    extent = part.extent
                    self._held[extent.file].append((extent.start, extent.start + extent.size, tensor, part))
        for held in self._held.values():
            held.sort(key=itemgetter(0, 1))
        self._ends = {name: list(accumulate((end for _, end, *_ in held), max)) for name, held in self._held.items()}

    def sizes(self) -> Mapping[str, int]:
        """As the files have them."""
        return self._files.sizes()

    def expect(self, extents: Iterable[Extent]) -> None:
        """As `Expecting` says."""
        expect(self._files, extents)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says.  Raises Corrupt or Unsupported, as `check`, if a replica has other bytes."""
        self._files.read_into(name, start, out)
        for unit, twins in self.replicas(name, start, start + out.nbytes):
            found = np.empty(unit.stored, "u1")
            gather(self._files, unit, found.data)
            for read, (at, tensor, part, replica) in zip(unit.reads, twins, strict=True):
                if not np.array_equal(np.frombuffer(out, "u1", read.size, at), found[read.at : read.at + read.size]):
                    names = replica.extent.file, part.extent.file
                    raise _unequal(self._files, tensor.name, tensor.copy.doubt, (part, replica), names)

    def replicas(self, name: str, start: int, end: int) -> Iterator[tuple[Unit, list[_Twin]]]:
        """Yield what a range of a file has replicas of: of each part its first, then of each its second, and so on."""
        if name not in self._held:
            return
        held = self._held[name]
        near = held[bisect_right(self._ends[name], start) : bisect_left(held, end, key=itemgetter(0))]
        for nth in range(max((len(part.replicas) for *_, part in near), default=0)):
            unit, twins = Unit(), []
            for first, last, tensor, part in near:
                low, high = max(start, first), min(end, last)
                if low < high and nth < len(part.replicas):
                    extent = part.replicas[nth].extent
                    unit.reads.append(Read(extent.file, extent.start + low - first, high - low, unit.stored))
                    unit.stored += high - low
                    twins.append(_Twin(low - start, tensor, part, part.replicas[nth]))
            yield unit, twins
