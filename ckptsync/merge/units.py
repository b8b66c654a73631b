"""Units: an output file cut into ranges that are made on their own, and what is read for each.  Pure.

A unit is a stretch of the header, a range of one large tensor, or many small ones.  It holds `WINDOW` bytes as they are stored, and up to
`MOST` where its reads would be small: ranks that each hold a little of every tensor are then read a few times, not once for each.
Where units begin depends on the plan alone, never on how many threads there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import itemgetter, mul
from typing import NamedTuple

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merge.cut import Fill, blocks, fills
from ckptsync.merge.plan import FilePlan
from ckptsync.model import Copy, Part, Shape

WINDOW = 4 << 20  # bytes of a unit as it is stored: with less, what is done once for each costs more than the caches save
MOST = 8 << 20  # of one whose reads would be small
WORTH = 64 << 10  # bytes of a read below which it is small
NEAR = 4 << 10  # bytes between two wanted ranges that are read over: a disk reads whole pages anyway
MOST_READS = 8192  # of one, whatever they bring


class Place(NamedTuple):
    """Where the elements of a read go that are no range of the tensor: a box of a block of ``sizes`` elements of ``item`` bytes."""

    sizes: Shape
    item: int
    fill: Fill


class Read(NamedTuple):
    """``size`` bytes of ``file`` from ``start`` are those of the unit from ``at``; or go to a place in the block that starts there."""

    file: str
    start: int
    size: int
    at: int
    place: Place | None = None


class Share(NamedTuple):
    """What a unit has of the file's tensor of this number: ``size`` stored bytes from its own byte ``at``."""

    number: int
    at: int
    size: int


@dataclass(slots=True)
class Unit:
    """``text`` is header; else the unit is made of shares of tensors, ``stored`` bytes, which the reads fill."""

    text: memoryview = field(default_factory=lambda: memoryview(b""))
    stored: int = 0
    shares: list[Share] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


def units(plan: FilePlan) -> Iterator[Unit]:
    """All of a file, front to back."""
    header = memoryview(plan.header)
    for at in range(0, len(header), WINDOW):
        yield Unit(text=header[at : at + WINDOW])
    filling = _Filling()
    for number, tensor in enumerate(plan.tensors):
        if tensor.size:
            yield from filling.copy(number, tensor.copy)
    yield from filling.rest()


def of_copy(copy: Copy) -> Iterator[Unit]:
    """One stored copy alone."""
    filling = _Filling()
    yield from filling.copy(0, copy)
    yield from filling.rest()


class _Filling:
    """The unit that is being filled."""

    def __init__(self) -> None:
        self._unit = Unit()
        self._small = 0  # reads, once those that are near each other are one
        self._ends: dict[str, int] = {}  # where the last read of a file ends

    def copy(self, number: int, copy: Copy) -> Iterator[Unit]:
        """Add it; gives the units that are full."""
        flat = runs(copy)
        return self._scattered(number, copy) if flat is None else self._flat(number, flat, ITEMSIZE[copy.dtype])

    def rest(self) -> Iterator[Unit]:
        """The last one."""
        if self._unit.stored:
            yield self._unit
            self._unit, self._small, self._ends = Unit(), 0, {}

    def _flat(self, number: int, flat: Sequence[Read], item: int) -> Iterator[Unit]:
        size = sum(read.size for read in flat)
        if size > self._room(item):
            yield from self._pieces(number, flat, item)
            return
        at = self._unit.stored
        for file, start, length, own, _ in flat:
            self._read(Read(file, start, length, at + own))
        self._share(number, size)

    def _pieces(self, number: int, flat: Sequence[Read], item: int) -> Iterator[Unit]:
        for whole in flat:
            start, left = whole.start, whole.size
            while left:
                if (room := self._room(item)) <= 0:
                    yield from self.rest()
                    continue
                size = min(left, room)
                self._read(Read(whole.file, start, size, self._unit.stored))
                self._share(number, size)
                start, left = start + size, left - size

    def _room(self, item: int) -> int:
        """Bytes that may be added at once: whole elements, at least one where there is nothing yet."""
        held = self._unit.stored
        is_worth = held >= WINDOW and self._small * WORTH <= held
        if is_worth or len(self._unit.reads) >= MOST_READS:
            return 0
        step = min(MOST, held // WINDOW * WINDOW + WINDOW) - held
        return step // item * item if held or step >= item else item

    def _scattered(self, number: int, copy: Copy) -> Iterator[Unit]:
        item = ITEMSIZE[copy.dtype]
        index = _Index(copy.parts)
        for block in blocks(copy.grid, max(1, index.block_size(copy.grid, item) // item)):
            size = prod(block.sizes) * item
            if self._unit.stored + size > WINDOW or len(self._unit.reads) >= MOST_READS:
                yield from self.rest()
            for part in index.between(block.offsets[0], block.offsets[0] + block.sizes[0]):
                for fill in fills(block, part, item):
                    self._read(
                        Read(
                            fill.extent.file, fill.extent.start, fill.extent.size, self._unit.stored, Place(block.sizes, item, fill)
                        )
                    )
            self._share(number, size)

    def _share(self, number: int, size: int) -> None:
        shares = self._unit.shares
        if shares and shares[-1].number == number:
            shares[-1] = shares[-1]._replace(size=shares[-1].size + size)
        else:
            shares.append(Share(number, self._unit.stored, size))
        self._unit.stored += size

    def _read(self, read: Read) -> None:
        before = self._ends.get(read.file)
        self._small += before is None or not 0 <= read.start - before <= NEAR
        self._ends[read.file] = read.start + read.size
        reads = self._unit.reads
        if before == read.start and reads and read.place is None and _goes_on(reads[-1], read):
            reads[-1] = reads[-1]._replace(size=reads[-1].size + read.size)
        else:
            reads.append(read)


def _goes_on(last: Read, read: Read) -> bool:
    return last.place is None and (last.file, last.start + last.size, last.at + last.size) == (read.file, read.start, read.at)


def runs(copy: Copy) -> list[Read] | None:
    """Where a tensor's bytes lie, in their order, if every part is a range of the flattened tensor; else None."""
    item, found = ITEMSIZE[copy.dtype], []
    if len(copy.parts) == 1 and copy.parts[0].sizes == copy.grid and copy.parts[0].strides is None:
        extent = copy.parts[0].extent
        if extent.size and extent.size == prod(copy.grid) * item:
            return [Read(extent.file, extent.start, extent.size, 0)]
    steps = [step * item for step in _row_major(copy.grid)]
    for part in copy.parts:
        size = prod(part.sizes) * item
        if not size:
            continue
        if part.extent.size != size or not _is_range(part, copy.grid):
            return None
        extent = part.extent
        found.append(Read(extent.file, extent.start, size, sum(map(mul, part.offsets, steps))))
    if len(found) > 1:
        found.sort(key=itemgetter(3))
    return found


def _is_range(part: Part, grid: Shape) -> bool:
    if part.strides is not None and any(
        n > 1 and s != own for n, s, own in zip(part.sizes, part.strides, _row_major(part.sizes), strict=True)
    ):
        return False
    if part.sizes[1:] == grid[1:]:
        return True
    axis = next((d for d, n in enumerate(part.sizes) if n > 1), len(grid))
    return part.sizes[axis + 1 :] == grid[axis + 1 :]


def _row_major(sizes: Shape) -> Shape:
    return tuple(prod(sizes[d + 1 :]) for d in range(len(sizes)))


class _Index:
    """Parts by their interval on the first axis."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = sorted((p for p in parts if prod(p.sizes)), key=lambda p: p.offsets[0])
        self._starts = [p.offsets[0] for p in self._parts]
        self._ends = list(accumulate((p.offsets[0] + p.sizes[0] for p in self._parts), max))

    def between(self, low: int, high: int) -> Sequence[Part]:
        """All that may overlap these rows."""
        return self._parts[bisect_right(self._ends, low) : bisect_left(self._starts, high)]

    def block_size(self, grid: Shape, item: int) -> int:
        """Bytes: so many that each of the parts beside each other gives more than a little of it."""
        rows = max(1, WINDOW // (prod(grid[1:]) * item))
        beside = len(self.between(0, min(rows, grid[0])))
        return min(MOST, max(WINDOW, beside * WORTH))
