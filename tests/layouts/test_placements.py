"""What a rank holds, against torch's own splitting of a tensor that holds its own indexes."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as torchs

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.layouts.placements import Placement, Replicate, Shard, boxes, held, is_even, local_shape

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def by_torch(shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placements: list[Placement]) -> torch.Tensor:
    """The indexes that torch gives to the rank at ``at``."""
    tensor = torch.arange(prod(shape)).reshape(shape)
    for parts, place, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, Shard):
            kind = (
                torchs.Shard(placement.dim)
                if placement.factor == 1
                else torchs._StridedShard(placement.dim, split_factor=placement.factor)
            )
            tensor = kind._split_tensor(tensor, parts, with_padding=False)[0][place]
    return tensor


def by_boxes(shape: tuple[int, ...], runs: tuple[tuple[tuple[int, int], ...], ...]) -> np.ndarray:
    """The indexes in the boxes, each put where the rank holds it."""
    whole = np.arange(prod(shape)).reshape(shape)
    found = np.full(local_shape(runs), -1)
    for box in boxes(runs):
        there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        found[tuple(slice(o, o + n) for o, n in zip(box.local, box.sizes, strict=True))] = whole[there]
    return found


@given(SHAPES, MESHES, st.data())
def test_every_rank_holds_what_torch_gives_it(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    kinds = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3])))
    placements = [data.draw(kinds) for _ in mesh]
    at = tuple(data.draw(st.integers(0, n - 1)) for n in mesh)
    wanted = by_torch(shape, mesh, at, placements)
    runs = held(shape, mesh, at, placements)
    assert prod(local_shape(runs)) == wanted.numel()
    if wanted.numel():
        assert np.array_equal(by_boxes(shape, runs), wanted.numpy())


@given(SHAPES, MESHES, st.data())
def test_even_cuts_give_every_rank_as_much(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    placements = [data.draw(st.builds(Shard, st.integers(0, len(shape) - 1))) for _ in mesh]
    sizes = {local_shape(held(shape, mesh, at, placements)) for at in np.ndindex(*mesh)}
    assert len(sizes) == 1 or not is_even(shape, mesh, placements)


def test_a_cut_that_a_tensor_cannot_have_is_refused() -> None:
    with pytest.raises(Corrupt, match="axis 2 of a tensor of 2"):
        held((4, 4), (2,), (0,), [Shard(2)])
    with pytest.raises(Corrupt):
        held((4, 4), (2,), (0,), [Shard(-1)])
    for factor, at in [(0, 0), (1 << 40, 0), (1, 2)]:
        with pytest.raises(Unsupported):
            held((4, 4), (2,), (at,), [Shard(0, factor)])


def test_pieces_without_end_are_refused() -> None:
    runs = held((4096, 4096), (2, 2), (0, 0), [Shard(0, 1024), Shard(1, 1024)])
    with pytest.raises(Unsupported, match="separate pieces"):
        next(boxes(runs))
