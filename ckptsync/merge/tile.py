"""Whether boxes tile a tensor: each element once.  Pure; checked before anything is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.model import Copy, Part, Shape, Tensor

Box = tuple[Shape, Shape]


def check(tensor: Tensor, copy: Copy) -> None:
    """Raise Corrupt unless the copy's parts tile its grid, and its grid is the tensor's shape or its flattening."""
    if copy.grid not in (tensor.shape, (prod(tensor.shape),)):
        raise Corrupt(f"{tensor.name}: a copy of shape {copy.grid}, {tensor.shape} expected")
    if copy.dtype not in ITEMSIZE or tensor.dtype not in ITEMSIZE:
        raise Corrupt(f"{tensor.name}: unknown element type {copy.dtype} or {tensor.dtype}")
    if _follow(copy.parts, copy.grid):
        return
    for part in copy.parts:
        _check_part(tensor.name, part, copy.grid)
    held = sum(prod(part.sizes) for part in copy.parts)
    if held != prod(copy.grid) or not tiles([(p.offsets, p.sizes) for p in copy.parts if prod(p.sizes)], copy.grid):
        fault = (
            "overlap, or are missing" if held == prod(copy.grid) else "are missing" if held < prod(copy.grid) else "are given twice"
        )
        raise Corrupt(f"{tensor.name}: {held} elements found, {prod(copy.grid)} expected: some {fault}")


def _follow(parts: Sequence[Part], grid: Shape) -> bool:
    """Whether the parts are whole rows that follow each other, which is the usual case: then there is nothing else to find out."""
    if not grid:
        return False
    starts, row = (0,) * (len(grid) - 1), grid[1:]
    at = 0
    for part in sorted(parts, key=_offsets) if len(parts) > 1 else parts:
        offsets, sizes = part.offsets, part.sizes
        if not sizes or sizes[0] <= 0 or sizes[1:] != row or not offsets or offsets[0] != at or offsets[1:] != starts:
            return False
        at += sizes[0]
    return at == grid[0]


def _offsets(part: Part) -> Shape:
    return part.offsets


def _check_part(name: str, part: Part, grid: Shape) -> None:
    fits = len(part.offsets) == len(part.sizes) == len(grid) and all(
        o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(part.offsets, part.sizes, grid, strict=True)
    )
    if not fits:
        raise Corrupt(f"{name}: a part at {part.offsets} of size {part.sizes} is not inside {grid}")


def tiles(boxes: Sequence[Box], grid: Shape) -> bool:
    """Whether boxes inside ``grid`` that together have its volume cover it, and so do not overlap.

    Boxes are grouped by their interval on the first axis; if these follow each other without gap, each group must tile the
    rest.  Otherwise the axis is cut at every border.  The usual cases (rows, columns, a mesh of both) never need the latter.
    """
    if not prod(grid):
        return not boxes
    if not grid:
        return len(boxes) == 1
    groups: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
    for offsets, sizes in boxes:
        groups[offsets[0], sizes[0]].append((offsets[1:], sizes[1:]))
    ends = [0]
    for start, size in sorted(groups):
        if start != ends[-1]:
            return _tiles_by_slabs(boxes, grid)
        ends.append(start + size)
    return ends[-1] == grid[0] and all(tiles(group, grid[1:]) for group in groups.values())


def _tiles_by_slabs(boxes: Sequence[Box], grid: Shape) -> bool:
    borders = sorted({0, grid[0], *(o[0] for o, _ in boxes), *(o[0] + n[0] for o, n in boxes)})
    return all(
        tiles([(o[1:], n[1:]) for o, n in boxes if o[0] <= low and high <= o[0] + n[0]], grid[1:])
        for low, high in pairwise(borders)
    )
