"""Grids of boxes that tile a tensor, drawn by hypothesis: rows, columns, meshes of both, and cuts
without any order.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ckptsync.tensors import Copy, Extent, Part, Shape
from tests.support.files_in_memory import MemoryFiles

Box = tuple[Shape, Shape]
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
FULL = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def tilings(
    draw: st.DrawFn, shapes: st.SearchStrategy[Shape] = SHAPES
) -> tuple[Shape, tuple[Box, ...]]:
    """Draw a shape and boxes that tile it, in any order: one box, cut in two again and again."""
    shape = draw(shapes)
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        near = draw(st.integers(0, sizes[axis]))  # 0 or all: an empty chunk, as FSDP writes them
        boxes.append((offsets, (*sizes[:axis], near, *sizes[axis + 1 :])))
        beyond = (*offsets[:axis], offsets[axis] + near, *offsets[axis + 1 :])
        boxes.append((beyond, (*sizes[:axis], sizes[axis] - near, *sizes[axis + 1 :])))
    return shape, tuple(draw(st.permutations(boxes)))


@st.composite
def stored(
    draw: st.DrawFn, shapes: st.SearchStrategy[Shape] = SHAPES
) -> tuple[npt.NDArray[Any], Copy, MemoryFiles]:
    """Draw a tensor of known values, in parts: each is row-major or permuted, behind an offset."""
    shape, boxes = draw(tilings(shapes))
    values = np.arange(prod(shape), dtype="<u2").reshape(shape)
    content, parts = {}, []
    for number, (offsets, sizes) in enumerate(boxes):
        order = draw(st.permutations(range(len(sizes))))
        block = values[
            tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        ].transpose(order)
        skip = draw(st.integers(0, 3))
        content[str(number)] = b"\xee" * 2 * skip + block.tobytes() + b"\xee" * 5
        row_strides = [prod(block.shape[d + 1 :]) for d in range(len(order))]
        strides = tuple(row_strides[order.index(d)] for d in range(len(order)))
        plain = list(order) == sorted(order)
        parts.append(
            Part(
                offsets,
                sizes,
                Extent(str(number), 2 * skip, 2 * prod(sizes)),
                None if plain else strides,
            )
        )
    return values, Copy("BF16", shape, tuple(parts)), MemoryFiles(content)
