"""Boxes of shards against torch's own slices."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.layouts.boxes import cut, place
from ckptsync.model import Copy, Extent, Part

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_run_of_elements_is_cut_into_boxes_that_follow_each_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = torch.arange(prod(shape)).reshape(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in cut(shape, start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape)


def read(copy: Copy, whole: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Do what the merge engine does with parts, in the slowest way."""
    out = whole.clone()
    for part in copy.parts:
        strides = part.strides or torch.empty(part.sizes).stride()
        block = torch.as_strided(stored, part.sizes, strides, part.extent.start // 8)
        out[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))] = block
    return out


@given(SHAPES, st.data())
def test_any_box_of_a_shard_in_any_pieces_lands_where_it_belongs(shape: tuple[int, ...], data: st.DataObject) -> None:
    shard = torch.arange(prod(shape)).reshape(shape) + 1
    held = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(a for a, _ in held), tuple(b - a for a, b in held)
    into = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    ends = sorted({0, prod(shape), *data.draw(st.lists(st.integers(0, prod(shape)), max_size=3))})
    parts = tuple(Part((a,), (b - a,), Extent("f", 8 * a, 8 * (b - a))) for a, b in pairwise(ends))
    of = Copy("I64", (prod(shape),), parts)
    whole = torch.zeros([i + n for i, n in zip(into, box[1], strict=True)], dtype=torch.int64)
    wanted = whole.clone()
    wanted[tuple(slice(i, None) for i in into)] = shard[tuple(slice(a, b) for a, b in held)]
    placed = Copy("I64", tuple(whole.shape), tuple(place(of, shape, box, into)))
    assert torch.equal(read(placed, whole, shard.reshape(-1)), wanted)


def test_a_shard_that_is_stored_by_columns_keeps_its_strides() -> None:
    stored = torch.arange(6)  # a (2, 3) tensor, transposed
    of = Copy("I64", (2, 3), (Part((0, 0), (2, 3), Extent("f", 0, 48), (1, 2)),))
    placed = Copy("I64", (2, 2), tuple(place(of, (2, 3), ((0, 1), (2, 2)), (0, 0))))
    assert torch.equal(read(placed, torch.zeros(2, 2, dtype=torch.int64), stored), stored.reshape(3, 2).T[:, 1:])
