"""Decide which ranges of the source to read for each piece of an output file.

A source's tensors lie in many small ranges, and each read of a disk or a store costs time: so reads
should be few, large and in order.  An output file is cut into units of `WINDOW` bytes as they are
stored: a stretch of the header, a range of one large tensor, or many small tensors.  Where units
begin depends on the plan alone.

A part that is no range of its tensor (a column shard) is read by boxes: a box is a range along one
axis with every later axis whole and every earlier one fixed.  What a part that is stored row by row
gives to a box is always one range of its file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod
from operator import itemgetter, mul
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merger.cast import RAW, Array
from ckptsync.merger.plan import FilePlan
from ckptsync.tensors import (
    Copy,
    Extent,
    Files,
    Part,
    Shape,
    expect,
    is_row_major,
    row_major,
)

WINDOW = (
    4 << 20
    # bytes of a unit as it is stored: with less, what is done once for each costs more than the
    # caches save
)
WORTH = 64 << 10  # bytes of a read below which it is small
NEAR = 4 << 10  # bytes between two ranges that are read over: a disk reads whole pages anyway
MOST_READS = 8192  # of a unit, whatever they bring
SPAN = 1 << 20  # bytes that are read at once for several small ranges
# in a box, reading over a gap of this many bytes costs less than another read
MERGE_READS = 256 << 10


class Box(NamedTuple):
    """``sizes`` elements from ``offsets``."""

    offsets: Shape
    sizes: Shape


class Scatter(NamedTuple):
    """Where the elements of a read go if they are no range of the unit.

    They fill the part ``into`` of a box of ``sizes`` elements, each of ``item`` bytes; they lie
    ``strides`` elements apart.
    """

    sizes: Shape
    item: int
    into: Box
    strides: Shape


class Read(NamedTuple):
    """A read of ``size`` bytes of ``file`` from ``start``.

    They are the unit's bytes from ``at``, or those of a box of it that starts there.
    """

    file: str
    start: int
    size: int
    at: int
    scatter: Scatter | None = None


class Share(NamedTuple):
    """What a unit holds of one tensor: ``size`` stored bytes from the tensor's byte ``at``.

    ``number`` counts the file's tensors.
    """

    number: int
    at: int
    size: int


@dataclass(slots=True)
class Unit:
    """A piece of an output file: ``text`` of its header, or ``stored`` bytes of tensors.

    The reads fill the bytes; the shares say which tensors they belong to.
    """

    text: memoryview = field(default_factory=lambda: memoryview(b""))
    stored: int = 0
    shares: list[Share] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


def cut_units(plan: FilePlan) -> Iterator[Unit]:
    """Yield the units of a file, front to back: the header's first, then tensors'; no ending."""
    header = memoryview(plan.header)
    for start in range(0, len(header), WINDOW):
        yield Unit(text=header[start : start + WINDOW])
    cutter = _Cutter()
    for number, tensor in enumerate(plan.tensors):
        if tensor.size:
            yield from cutter.add(number, tensor.copy)
    yield from cutter.flush()


def stored_bytes(files: Files, copy: Copy) -> Iterator[memoryview]:
    """Yield the bytes of one stored copy of a tensor, in order; raise what ``files`` raise."""
    cutter = _Cutter()
    for units in (cutter.add(0, copy), cutter.flush()):
        for unit in units:
            out = np.empty(unit.stored, "u1").data
            gather(files, unit, out)
            yield out


class _Cutter:
    """Cuts tensors into units: holds the unit that is being filled."""

    def __init__(self) -> None:
        self._unit = Unit()

    def add(self, number: int, copy: Copy) -> Iterator[Unit]:
        """Add a stored copy of a tensor as the caller iterates; yield the units that are full."""
        item, flat = ITEMSIZE[copy.dtype], find_runs(copy)
        if flat is None:
            yield from self._add_boxes(number, copy, item)
            return
        size = sum(run.size for run in flat)
        if size <= self._room(item):
            unit_start = self._unit.stored
            for file, start, length, tensor_start, _ in flat:
                self._add_read(Read(file, start, length, unit_start + tensor_start))
            self._add_share(number, size)
            return
        for run in flat:
            start, remaining = run.start, run.size
            while remaining:
                if (room := self._room(item)) <= 0:
                    yield from self.flush()
                    continue
                size = min(remaining, room)
                self._add_read(Read(run.file, start, size, self._unit.stored))
                self._add_share(number, size)
                start, remaining = start + size, remaining - size

    def flush(self) -> Iterator[Unit]:
        """Yield the unit that is being filled, if it has bytes, and begin another."""
        if self._unit.stored:
            yield self._unit
            self._unit = Unit()

    def _room(self, item: int) -> int:
        """Return how many bytes fit: whole elements, one at least if empty; 0 at `MOST_READS`."""
        free = WINDOW - self._unit.stored
        if len(self._unit.reads) >= MOST_READS:
            return 0
        return free // item * item if self._unit.stored or free >= item else item

    def _add_boxes(self, number: int, copy: Copy, item: int) -> Iterator[Unit]:
        """Add a copy some of whose parts are no ranges of it; yield the units that are full."""
        grid = copy.grid
        parts = sorted((p for p in copy.parts if prod(p.sizes)), key=lambda p: p.offsets[0])
        starts = [p.offsets[0] for p in parts]
        ends = list(accumulate((p.offsets[0] + p.sizes[0] for p in parts), max))
        for box in cut_boxes(grid, max(1, WINDOW // item)):
            size = prod(box.sizes) * item
            if self._unit.stored + size > WINDOW or len(self._unit.reads) >= MOST_READS:
                yield from self.flush()
            low, high = box.offsets[0], box.offsets[0] + box.sizes[0]
            for part in parts[bisect_right(ends, low) : bisect_left(starts, high)]:
                for box_read in box_reads(box, part, item, self._unit.stored):
                    self._add_read(box_read)
            self._add_share(number, size)

    def _add_share(self, number: int, size: int) -> None:
        """Add ``size`` bytes of tensor ``number`` to the unit's shares and to its stored bytes."""
        shares = self._unit.shares
        if shares and shares[-1].number == number:
            shares[-1] = shares[-1]._replace(size=shares[-1].size + size)
        else:
            shares.append(Share(number, self._unit.stored, size))
        self._unit.stored += size

    def _add_read(self, new: Read) -> None:
        """Add a read, or lengthen the last one if this one follows it in file and unit."""
        reads = self._unit.reads
        if reads and new.scatter is None and reads[-1].scatter is None:
            last = reads[-1]
            if (last.file, last.start + last.size, last.at + last.size) == (
                new.file,
                new.start,
                new.at,
            ):
                reads[-1] = last._replace(size=last.size + new.size)
                return
        reads.append(new)


def find_runs(copy: Copy) -> list[Read] | None:
    """Return where a tensor's bytes lie, in its order; None if a part is no range of the tensor.

    ``at`` counts the tensor's bytes.  Empty parts are left out.
    """
    item, ranges = ITEMSIZE[copy.dtype], []
    if len(copy.parts) == 1 and copy.parts[0].sizes == copy.grid and copy.parts[0].strides is None:
        extent = copy.parts[0].extent
        if extent.size and extent.size == prod(copy.grid) * item:
            return [Read(extent.file, extent.start, extent.size, 0)]
    steps = [step * item for step in row_major(copy.grid)]
    for part in copy.parts:
        size = prod(part.sizes) * item
        if not size:
            continue
        if part.extent.size != size or not _is_range(part, copy.grid):
            return None
        ranges.append(
            Read(part.extent.file, part.extent.start, size, sum(map(mul, part.offsets, steps)))
        )
    ranges.sort(key=itemgetter(3))
    return ranges


def _is_range(part: Part, grid: Shape) -> bool:
    """Return whether a part is a range of the flattened tensor, stored in its order."""
    if part.strides is not None and not is_row_major(part.sizes, part.strides):
        return False
    if part.sizes[1:] == grid[1:]:
        return True
    axis = next((d for d, n in enumerate(part.sizes) if n > 1), len(grid))
    return part.sizes[axis + 1 :] == grid[axis + 1 :]


def cut_boxes(grid: Shape, most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` elements, 1 or more, that make up ``grid``, row-major."""
    if not prod(grid):
        return
    axis = next((d for d in range(len(grid)) if prod(grid[d + 1 :]) <= most), len(grid))
    if axis == len(grid):
        yield Box((0,) * len(grid), grid)
        return
    tail = grid[axis + 1 :]
    rows = max(1, most // prod(tail))
    for outer in product(*map(range, grid[:axis])):
        for start in range(0, grid[axis], rows):
            size = min(rows, grid[axis] - start)
            yield Box((*outer, start, *(0,) * len(tail)), (*(1,) * axis, size, *tail))


def box_reads(box: Box, part: Part, item: int, at: int) -> Iterator[Read]:
    """Yield the reads that bring a part's share of ``box``, which lies at byte ``at`` of a unit.

    ``item``: bytes of an element.  A read that would bring mostly what is not needed is halved
    along the axis whose elements lie furthest apart.
    """
    low = tuple(map(max, box.offsets, part.offsets))
    ends = zip(box.offsets, box.sizes, part.offsets, part.sizes, strict=True)
    shared = tuple(min(a + n, b + m) - first for (a, n, b, m), first in zip(ends, low, strict=True))
    if any(n <= 0 for n in shared):
        return
    strides = part.strides or row_major(part.sizes)
    boxes = [Box(low, shared)]
    while boxes:
        offsets, sizes = boxes.pop()
        reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if reach <= 2 * prod(sizes) or reach * item <= MERGE_READS:
            start = sum((o - p) * s for o, p, s in zip(offsets, part.offsets, strides, strict=True))
            into = Box(tuple(o - b for o, b in zip(offsets, box.offsets, strict=True)), sizes)
            scatter = Scatter(box.sizes, item, into, strides)
            yield Read(
                part.extent.file, part.extent.start + start * item, reach * item, at, scatter
            )
            continue
        axis = max((d for d in range(len(strides)) if sizes[d] > 1), key=lambda d: strides[d])
        first_half = sizes[axis] // 2
        behind = (*offsets[:axis], offsets[axis] + first_half, *offsets[axis + 1 :])
        boxes.append(Box(behind, (*sizes[:axis], sizes[axis] - first_half, *sizes[axis + 1 :])))
        boxes.append(Box(offsets, (*sizes[:axis], first_half, *sizes[axis + 1 :])))


def gather(files: Files, unit: Unit, out: memoryview) -> None:
    """Fill ``out`` with the stored bytes of a unit; raise what ``files`` raise.

    Ranges below `WORTH` bytes, at most `NEAR` bytes apart, are read at once, up to `SPAN` bytes
    together; several reads are announced.
    """
    groups: list[list[Read]] = []
    for range_ in sorted(unit.reads, key=itemgetter(0, 1)):
        last = groups[-1][-1] if groups else None
        is_joined = (
            last is not None
            and last.file == range_.file
            and 0 <= range_.start - last.start - last.size <= NEAR
            and max(range_.size, last.size) < WORTH
            and range_.start + range_.size - groups[-1][0].start <= SPAN
        )
        if is_joined:
            groups[-1].append(range_)
        else:
            groups.append([range_])
    if len(groups) > 1:
        expect(
            files,
            (Extent(g[0].file, g[0].start, g[-1].start + g[-1].size - g[0].start) for g in groups),
        )
    for group in groups:
        first = group[0]
        if len(group) == 1 and (direct := _direct_target(first, out)) is not None:
            files.read_into(first.file, first.start, direct)
            continue
        buffer = np.empty(group[-1].start + group[-1].size - first.start, "u1").data
        files.read_into(first.file, first.start, buffer)
        for range_ in group:
            stored_range = buffer[
                range_.start - first.start : range_.start - first.start + range_.size
            ]
            if (scatter := range_.scatter) is None:
                out[range_.at : range_.at + range_.size] = stored_range
                continue
            values: Array = np.frombuffer(stored_range, RAW[scatter.item])
            strides = [s * scatter.item for s in scatter.strides]
            _scatter_target(range_, scatter, out)[...] = as_strided(
                values, scatter.into.sizes, strides, writeable=False
            )


def _direct_target(range_: Read, out: memoryview) -> memoryview | None:
    """Return the bytes of ``out`` that a read can fill as they come; None if it is scattered."""
    if (scatter := range_.scatter) is None:
        return out[range_.at : range_.at + range_.size]
    target = _scatter_target(range_, scatter, out)
    is_same = target.flags.c_contiguous and range_.size == target.nbytes
    return (
        target.reshape(-1).view("u1").data
        if is_same and is_row_major(scatter.into.sizes, scatter.strides)
        else None
    )


def _scatter_target(range_: Read, scatter: Scatter, out: memoryview) -> Array:
    """Return the elements of ``out`` that a scattered read fills, as a view."""
    values: Array = np.frombuffer(out, RAW[scatter.item], prod(scatter.sizes), range_.at)
    box = [slice(o, o + n) for o, n in zip(scatter.into.offsets, scatter.into.sizes, strict=True)]
    index: tuple[Any, ...] = (*box, ...)  # with the dots a 0-d array is a view too, not a number
    target: Array = values.reshape(scatter.sizes)[index]
    return target
