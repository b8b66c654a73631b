"""A tiling is found to be one, and anything else is found not to be, whatever the boxes look like."""

from __future__ import annotations

from itertools import chain, combinations_with_replacement
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.merge.tile import check, tiles
from ckptsync.model import Copy, Extent, Part, Shape, Tensor
from tests.boxes import FULL, Box, tilings

SOME_WHERE = Extent("file", 0, 0)
TILINGS = tilings()


def checked(shape: Shape, boxes: tuple[Box, ...], grid: Shape | None = None, dtype: str = "F32") -> None:
    copy = Copy(dtype, shape if grid is None else grid, tuple(Part(o, n, SOME_WHERE) for o, n in boxes))
    check(Tensor("weight", "F32", shape, (copy,)), copy)


def counts(shape: Shape, boxes: tuple[Box, ...]) -> np.ndarray:
    """The slow obvious way: how often each element is held."""
    found = np.zeros(shape, int)
    for offsets, sizes in boxes:
        found[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return found


@given(TILINGS)
def test_what_tiles_is_accepted(tiling: tuple[Shape, tuple[Box, ...]]) -> None:
    checked(*tiling)


@given(tilings(FULL), st.data())
def test_one_box_gone_is_a_gap(tiling: tuple[Shape, tuple[Box, ...]], data: st.DataObject) -> None:
    shape, boxes = tiling
    number = data.draw(st.integers(0, len(boxes) - 1))
    assume(prod(boxes[number][1]))
    with pytest.raises(Corrupt, match="are missing"):
        checked(shape, (*boxes[:number], *boxes[number + 1 :]))


@given(tilings(FULL), st.data())
def test_one_box_twice_is_an_overlap(tiling: tuple[Shape, tuple[Box, ...]], data: st.DataObject) -> None:
    shape, boxes = tiling
    number = data.draw(st.integers(0, len(boxes) - 1))
    assume(prod(boxes[number][1]))
    with pytest.raises(Corrupt, match="given twice"):
        checked(shape, (*boxes, boxes[number]))


@given(tilings(FULL), st.data())
def test_boxes_moved_or_resized_are_accepted_only_if_they_still_tile(
    tiling: tuple[Shape, tuple[Box, ...]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    number, axis = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    offsets, sizes = (list(x) for x in boxes[number])
    offsets[axis] = data.draw(st.integers(0, shape[axis]))
    sizes[axis] = data.draw(st.integers(0, shape[axis] - offsets[axis]))
    mutated = (*boxes[:number], (tuple(offsets), tuple(sizes)), *boxes[number + 1 :])
    if (counts(shape, mutated) == 1).all():
        checked(shape, mutated)
    else:
        with pytest.raises(Corrupt, match="some"):
            checked(shape, mutated)


def test_every_choice_of_boxes_of_the_right_volume_is_judged_as_by_counting() -> None:
    places = [((r, c), (h, w)) for r in range(2) for c in range(3) for h in range(1, 3 - r) for w in range(1, 4 - c)]
    seen = set()
    for boxes in chain.from_iterable(combinations_with_replacement(places, n) for n in range(1, 6)):
        if sum(prod(sizes) for _, sizes in boxes) == 6:
            seen.add(right := bool((counts((2, 3), boxes) == 1).all()))
            assert tiles(boxes, (2, 3)) == right
    assert seen == {True, False}


def test_a_pinwheel_tiles_and_its_mirror_over_it_does_not() -> None:
    wheel = (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
    checked((3, 3), wheel)
    with pytest.raises(Corrupt, match="overlap, or are missing"):
        checked((3, 3), (((0, 0), (2, 1)), *wheel[1:]))


@pytest.mark.parametrize("box", [((1, 0), (3, 2)), ((-1, 0), (3, 2)), ((0,), (6,)), ((0, 0), (3, -2)), ((0, 0, 0), (3, 2, 1))])
def test_a_box_that_is_not_inside_is_refused(box: Box) -> None:
    with pytest.raises(Corrupt, match="not inside"):
        checked((3, 2), (box,))


def test_the_grid_is_the_shape_or_its_flattening() -> None:
    checked((3, 2), (((0,), (6,)),), grid=(6,))
    checked((), (((0,), (1,)),), grid=(1,))
    for grid in [(2, 3), (7,), (3, 2, 1)]:
        with pytest.raises(Corrupt, match="expected"):
            checked((3, 2), ((tuple(0 for _ in grid), grid),), grid=grid)


def test_an_element_type_that_nobody_knows_is_refused() -> None:
    with pytest.raises(Corrupt, match="element type"):
        checked((3,), (((0,), (3,)),), dtype="F4")


def test_a_number_alone_is_held_once() -> None:
    checked((), (((), ()),))
    for boxes in [(), (((), ()), ((), ()))]:
        with pytest.raises(Corrupt):
            checked((), boxes)


def test_ten_thousand_ranks_are_checked_at_once() -> None:
    ranks = tuple(((n,), (1,)) for n in range(10_000))
    assert tiles(ranks, (10_000,))
    assert tiles(tuple(((0, n), (4096, 1)) for n in range(10_000)), (4096, 10_000))
