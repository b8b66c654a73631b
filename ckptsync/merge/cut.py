"""Cutting: a tensor into blocks of bounded size, and each block into reads.  Pure arithmetic on boxes.

A block is a range along one axis with every later axis whole and every earlier one fixed.  So what a part that is stored row by row
gives to a block is always one contiguous range, also of a column shard: never a read per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ckptsync.model import Extent, Part, Shape

MERGE_READS = 256 << 10  # reading over a gap of this many bytes costs less than another read


@dataclass(frozen=True, slots=True)
class Box:
    """``sizes`` elements from ``offsets``."""

    offsets: Shape
    sizes: Shape


@dataclass(frozen=True, slots=True)
class Fill:
    """Part of a block: ``into`` (relative to the block) is filled from ``extent``, a view of ``strides`` elements."""

    into: Box
    extent: Extent
    strides: Shape


def blocks(grid: Shape, most: int) -> Iterator[Box]:
    """Boxes of at most ``most`` elements that follow each other in row-major order and make up ``grid``."""
    if not prod(grid):
        return
    axis = 0
    while axis < len(grid) and prod(grid[axis + 1 :]) > most:
        axis += 1
    if axis == len(grid):
        yield Box((0,) * len(grid), grid)
        return
    rows = max(1, most // prod(grid[axis + 1 :]))
    tail = grid[axis + 1 :]
    for outer in product(*map(range, grid[:axis])):
        for start in range(0, grid[axis], rows):
            size = min(rows, grid[axis] - start)
            yield Box((*outer, start, *(0,) * len(tail)), (*(1,) * axis, size, *tail))


def overlap(block: Box, part: Part) -> Box | None:
    """What they share, in the coordinates of the tensor."""
    low = tuple(map(max, block.offsets, part.offsets))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(block.offsets, block.sizes, part.offsets, part.sizes, strict=True))
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    return Box(low, sizes) if all(n > 0 for n in sizes) else None


def fills(block: Box, part: Part, item: int) -> Iterator[Fill]:
    """The reads that bring a part's share of ``block``; ``item`` is the size of an element in bytes."""
    shared = overlap(block, part)
    if shared is not None:
        strides = part.strides or tuple(prod(part.sizes[d + 1 :]) for d in range(len(part.sizes)))
        yield from _reads(shared, block, part, strides, item)


def _reads(box: Box, block: Box, part: Part, strides: Shape, item: int) -> Iterator[Fill]:
    """One read if it brings little that is not wanted; else two halves along the axis whose elements lie furthest apart."""
    reach = 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    if reach <= 2 * prod(box.sizes) or reach * item <= MERGE_READS:
        start = sum((o - p) * s for o, p, s in zip(box.offsets, part.offsets, strides, strict=True))
        into = Box(tuple(o - b for o, b in zip(box.offsets, block.offsets, strict=True)), box.sizes)
        yield Fill(into, Extent(part.extent.file, part.extent.start + start * item, reach * item), strides)
        return
    for half in _halves(box, strides):
        yield from _reads(half, block, part, strides, item)


def _halves(box: Box, strides: Sequence[int]) -> tuple[Box, Box]:
    axis = max((d for d in range(len(strides)) if box.sizes[d] > 1), key=lambda d: strides[d])
    near = box.sizes[axis] // 2
    first = (*box.sizes[:axis], near, *box.sizes[axis + 1 :])
    second = (*box.sizes[:axis], box.sizes[axis] - near, *box.sizes[axis + 1 :])
    offset = (*box.offsets[:axis], box.offsets[axis] + near, *box.offsets[axis + 1 :])
    return Box(box.offsets, first), Box(offset, second)
