"""Blocks and reads against numpy slicing."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.merge import cut
from ckptsync.merge.cut import Box, Fill, blocks, fills
from ckptsync.model import Copy, Extent, Part, Shape
from tests.boxes import FULL, SHAPES, stored
from tests.plain_files import MemoryFiles

Stored = tuple[npt.NDArray[Any], Copy, MemoryFiles]
MOST = st.integers(1, 60)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def taken(fill: Fill, files: MemoryFiles) -> npt.NDArray[Any]:
    """What a read brings, element by element."""
    data = files.content[fill.extent.file][fill.extent.start :][: fill.extent.size]
    assert len(data) == fill.extent.size
    held = np.frombuffer(data, "<u2")
    found = np.empty(fill.into.sizes, "<u2")
    for index in np.ndindex(*fill.into.sizes):
        found[index] = held[sum(i * s for i, s in zip(index, fill.strides, strict=True))]
    return found


@given(SHAPES, MOST)
def test_blocks_follow_each_other_and_make_up_the_tensor(shape: Shape, most: int) -> None:
    order = np.arange(prod(shape)).reshape(shape)
    found = [order[region(block)].ravel() for block in blocks(shape, most)]
    assert all(0 < len(piece) <= most for piece in found)
    assert np.array_equal(np.concatenate([*found, np.array([], int)]), order.ravel())


@given(FULL, MOST)
def test_blocks_are_not_small_without_need(shape: Shape, most: int) -> None:
    whole = sum(prod(block.sizes) * 2 > most for block in blocks(shape, most))
    cuts = sum(prod(block.sizes) * 2 <= most for block in blocks(shape, most))
    assert cuts <= whole + prod(shape[:-1]) or cuts == 1


@pytest.mark.parametrize("over", [0, 12, 256 << 10])
@given(stored(), MOST)
def test_reads_bring_what_numpy_would_slice(over: int, held: Stored, most: int) -> None:
    values, copy, files = held
    cut_over, cut.MERGE_READS = cut.MERGE_READS, over
    try:
        for block in blocks(copy.grid, most):
            out = np.full(block.sizes, 0xEEEE, "<u2")
            for fill in (f for part in copy.parts for f in fills(block, part, 2)):
                out[region(fill.into)] = taken(fill, files)
            assert np.array_equal(out, values[region(block)])
    finally:
        cut.MERGE_READS = cut_over


@given(stored(), MOST)
def test_a_part_stored_row_by_row_gives_a_block_one_read_of_nothing_but_what_is_wanted(held: Stored, most: int) -> None:
    _, copy, _ = held
    for part in (p for p in copy.parts if p.strides is None):
        reads = [list(fills(block, part, 2)) for block in blocks(copy.grid, most)]
        assert all(len(found) <= 1 for found in reads)
        assert sum(fill.extent.size for found in reads for fill in found) == 2 * prod(part.sizes)


@given(stored(), MOST)
def test_reads_stay_inside_the_part(held: Stored, most: int) -> None:
    _, copy, _ = held
    for part in copy.parts:
        for fill in (f for block in blocks(copy.grid, most) for f in fills(block, part, 2)):
            assert part.extent.start <= fill.extent.start
            assert fill.extent.start + fill.extent.size <= part.extent.start + part.extent.size


def test_a_large_transposed_part_is_read_in_pieces_of_little_waste() -> None:
    shape = (4096, 4096)
    part = Part((0, 0), shape, Extent("file", 0, 4 * prod(shape)), (1, 4096))
    for block in list(blocks(shape, 1 << 20))[:3]:
        reads = list(fills(block, part, 4))
        assert sum(prod(f.into.sizes) for f in reads) == prod(block.sizes)
        assert len(reads) <= 256  # halved along the axis whose elements lie furthest apart
        assert all(f.extent.size <= max(2 * 4 * prod(f.into.sizes), cut.MERGE_READS) for f in reads)


def test_an_expanded_part_is_one_small_read() -> None:
    part = Part((0, 0), (1000, 3), Extent("file", 8, 12), (0, 1))
    (fill,) = fills(Box((0, 0), (1000, 3)), part, 4)
    assert (fill.extent, fill.strides) == (Extent("file", 8, 12), (0, 1))


def test_parts_elsewhere_give_nothing() -> None:
    part = Part((4, 0), (2, 3), Extent("file", 0, 24))
    assert not list(fills(Box((0, 0), (4, 3)), part, 4))
    assert not list(fills(Box((0, 0), (6, 3)), Part((4, 0), (0, 3), Extent("", 0, 0)), 4))
