"""Boxes of tensors that are stored in pieces: which bytes of a shard belong where in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.torch_pickle import row_major, span
from ckptsync.model import Copy, Extent, Part, Shape

Box = tuple[Shape, Shape]  # offsets, sizes


def place(copy: Copy, shape: Shape, held: Box, into: Shape) -> Iterator[Part]:
    """The parts of the box ``held`` of a stored tensor of ``shape``, as boxes of a larger tensor in which it begins at ``into``.

    ``copy`` has the grid of the tensor, in one part, or a flat one in any number of parts.
    """
    strides = row_major(shape)
    for part in copy.parts:
        whole = part.strides is not None and ((0,) * len(shape), shape)
        flat = part.offsets[0] if copy.grid != shape or len(shape) == 1 else 0
        for offsets, sizes in [whole] if whole else cut(shape, flat, flat + prod(part.sizes)):
            low = tuple(map(max, offsets, held[0]))
            high = (min(o + n, h + m) for o, n, h, m in zip(offsets, sizes, *held, strict=True))
            box = tuple(b - a for a, b in zip(low, high, strict=True))
            if all(n > 0 for n in box):
                at = tuple(i + a - h for i, a, h in zip(into, low, held[0], strict=True))
                skip = sum(a * s for a, s in zip(low, part.strides or strides, strict=True)) - flat
                moved = replace(part, offsets=at, sizes=box, strides=part.strides or strides)
                yield _skipped(moved, skip * ITEMSIZE[copy.dtype], ITEMSIZE[copy.dtype])


def _skipped(part: Part, skip: int, item: int) -> Part:
    """The part with the extent that its strides reach over, ``skip`` bytes behind the old start."""
    sizes, strides = part.sizes, part.strides or ()
    is_plain = all(n <= 1 or s == p for n, s, p in zip(sizes, strides, row_major(sizes), strict=True))
    extent = Extent(part.extent.file, part.extent.start + skip, span(sizes, strides) * item)
    return replace(part, extent=extent, strides=None if is_plain else strides)


def cut(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold the elements ``start`` to ``stop`` of a row-major tensor, in their order."""
    if not shape or (start <= 0 and stop >= prod(shape)):
        if start < stop:
            yield (0,) * len(shape), shape
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _row(shape, last, 0, stop - last * row)


def _row(shape: Shape, index: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in cut(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)
