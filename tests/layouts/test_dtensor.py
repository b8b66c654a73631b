"""DTensors: where a rank's part belongs, and everything that says something else.

Held indexes against torch's own splitting.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as torchs

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Name
from ckptsync.formats.torch_pickle import Wrapped
from ckptsync.layouts.sharded_tensors import (
    Placement,
    RankShards,
    Shard,
    boxes,
    dtensor_share,
    is_even,
    local_runs,
    local_shape,
    read_mesh,
)
from tests.support.pickle_writer import (
    OLD,
    dtensor,
    made,
    mesh,
    older_mesh,
    replicate,
    shard,
    stored,
    strided,
)

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def by_torch(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placements: list[Placement]
) -> torch.Tensor:
    """The indexes that torch gives to the rank at ``at``."""
    tensor = torch.arange(prod(shape)).reshape(shape)
    for parts, place, placement in zip(mesh, at, placements, strict=True):
        if placement:
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
    for offsets, sizes, local in boxes(runs):
        there = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        found[tuple(slice(o, o + n) for o, n in zip(local, sizes, strict=True))] = whole[there]
    return found


@given(SHAPES, MESHES, st.data())
def test_every_rank_holds_what_torch_gives_it(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    kinds = st.one_of(
        st.none(), st.builds(Shard, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3]))
    )
    placements = [data.draw(kinds) for _ in mesh]
    at = tuple(data.draw(st.integers(0, n - 1)) for n in mesh)
    wanted = by_torch(shape, mesh, at, placements)
    runs = local_runs(shape, mesh, at, placements)
    assert prod(local_shape(runs)) == wanted.numel()
    if wanted.numel():
        assert np.array_equal(by_boxes(shape, runs), wanted.numpy())


@given(SHAPES, MESHES, st.data())
def test_even_cuts_give_every_rank_as_much(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    placements = [data.draw(st.builds(Shard, st.integers(0, len(shape) - 1))) for _ in mesh]
    sizes = {local_shape(local_runs(shape, mesh, at, placements)) for at in np.ndindex(*mesh)}
    assert len(sizes) == 1 or not is_even(shape, mesh, placements)


def test_a_cut_that_a_tensor_cannot_have_is_refused() -> None:
    with pytest.raises(Corrupt, match="axis 2 of a tensor of 2"):
        local_runs((4, 4), (2,), (0,), [Shard(2)])
    with pytest.raises(Corrupt):
        local_runs((4, 4), (2,), (0,), [Shard(-1)])
    for factor, at in [(0, 0), (1 << 40, 0), (1, 2)]:
        with pytest.raises(Unsupported):
            local_runs((4, 4), (2,), (at,), [Shard(0, factor)])


def test_pieces_without_end_are_refused() -> None:
    runs = local_runs((4096, 4096), (2, 2), (0, 0), [Shard(0, 1024), Shard(1, 1024)])
    with pytest.raises(Unsupported, match="separate pieces"):
        next(boxes(runs))


LAYOUT = "torch.distributed._mesh_layout"


def flat(*axes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    return made(
        LAYOUT,
        "_MeshLayout",
        {"axes": tuple(made(LAYOUT, "_FlatLayout", {"shape": n, "stride": s}) for n, s in axes)},
    )


def test_the_same_mesh_is_read_from_every_version() -> None:
    found = read_mesh(mesh((2, 2), 1))
    assert (found.shape, found.ranks, found.coordinate, found.world, found.rank) == (
        (2, 2),
        (0, 1, 2, 3),
        (0, 1),
        4,
        1,
    )
    assert read_mesh(older_mesh((2, 2), [0, 1], (0, 1, 2, 3))) == found
    nested = made(LAYOUT, "_MeshLayout", {"shape": (2, 2), "stride": (2, 1)})  # 2.10 and 2.11
    assert read_mesh(mesh((2, 2), 1, _layout=nested)) == found
    single = made(LAYOUT, "_MeshLayout", {"shape": 4, "stride": 1})
    assert read_mesh(mesh((4,), 1, _layout=single)).shape == (4,)


def test_a_slice_of_a_mesh_has_the_ranks_of_its_own_row() -> None:
    column = read_mesh(mesh((2, 2), 3, _layout=flat(((2,), (2,))), _coordinate_on_dim=(1,)))
    assert (column.shape, column.ranks, column.world, column.rank) == ((2,), (1, 3), 4, 3)
    row = read_mesh(mesh((2, 2), 3, _layout=flat(((2,), (1,))), _coordinate_on_dim=(1,)))
    assert row.ranks == (2, 3)


def test_ranks_need_not_be_in_order_and_axes_may_be_flattened() -> None:
    assert read_mesh(mesh((2, 2), 3, ranks=(2, 3, 0, 1))).coordinate == (0, 1)
    assert read_mesh(mesh((4,), 3, _layout=flat(((2, 2), (2, 1))))).ranks == (0, 1, 2, 3)
    assert read_mesh(mesh((1,), 0, _layout=flat(((), ())))).shape == (1,)


@pytest.mark.parametrize(
    "changes",
    [
        {"_coordinate_on_dim": (1, 0)},
        {"_coordinate_on_dim": (0, 2)},
        {"_coordinate_on_dim": (0,)},
        {"_coordinate_on_dim": None},
        {"_coordinate_on_dim": (0, -1)},
        {"_rank": 2},
        {"_flatten_rank_map": (0, 1, 2, 2)},
        {"_flatten_rank_map": ()},
        {"_flatten_rank_map": (0, 1, 2, 1 << 40)},
        {"_flatten_rank_map": (0, 1)},
        {"_flatten_rank_map": "0123"},
        {"_layout": flat(((2,), (2,)), ((2,), (3,)))},
        {"_layout": flat(((2,), (2,)), ((2,), (2,)))},
        {"_layout": flat(((2,), (2,))), "_coordinate_on_dim": (1,)},
        {"_layout": flat(((1 << 40,), (1,)), ((1,), (1,)))},
        {"_layout": flat(((2,), (2,)), ((2, 2), (1,)))},
        {"_layout": flat(((0,), (1,)), ((2,), (1,)))},
        {"_layout": made(LAYOUT, "_MeshLayout", {"shape": (2, 2), "stride": (1,)})},
        {"_layout": made(LAYOUT, "_MeshLayout", {"shape": (2, 2), "stride": ((1, (1,)), 1)})},
        {
            "_layout": made(
                LAYOUT, "_MeshLayout", {"shape": ((1,) * 20, 2), "stride": ((1,) * 20, 1)}
            )
        },
    ],
)
def test_a_mesh_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((Corrupt, Unsupported)):
        read_mesh(mesh((2, 2), 1, **changes))


def test_an_older_mesh_that_contradicts_itself_is_refused() -> None:
    good = (0, 1, 2, 3)
    for ranks, at in [((0, 1, 2), [0, 1]), ((0, 1, 1, 2), [0, 1]), (good, [2, 0]), ((), [0, 0])]:
        with pytest.raises(Corrupt):
            read_mesh(older_mesh((2, 2), at, ranks))


def test_what_no_known_torch_writes_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="neither _layout nor mesh"):
        read_mesh(made("", "DeviceMesh", {"_coordinate_on_dim": (0,)}))
    with pytest.raises(Unsupported, match="without axes or shape"):
        read_mesh(mesh((2,), 0, _layout=made(LAYOUT, "_MeshLayout", {"sizes": (2,)})))
    with pytest.raises(Unsupported, match="does not say whose"):
        read_mesh(mesh((2, 2), 3, _layout=flat(((2,), (2,))), _coordinate_on_dim=(1,), _rank=None))
    with pytest.raises(Corrupt, match="no DeviceMesh"):
        read_mesh({"_layout": 1})


def read(tensor: Wrapped) -> RankShards:
    return dtensor_share(tensor, {})


NEW_SPEC: dict[str, Any] = {"use_strided_shard_as_shard_order": True, "shard_order": None}


def test_a_part_in_two_places_lies_behind_each_other_in_what_the_rank_holds() -> None:
    found = read(dtensor((8, 3), stored((4, 3)), mesh((2,), 1), (strided(0, 2),), **NEW_SPEC))
    assert [(at, local.shape, local.offset) for at, local in found.pieces] == [
        ((2, 0), (2, 3), 0),
        ((6, 0), (2, 3), 6),
    ]


GOOD: dict[str, Any] = {
    "shape": (4, 3),
    "local": stored((2, 3)),
    "on": mesh((2,), 0),
    "placements": (shard(0),),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"local": stored((3, 3))},
        {"local": stored((2, 2))},
        {"local": stored((0, 3))},
        {"local": stored((2, 3), "BF16")},
        {"local": None},
        {"shape": (6, 3)},
        {"meta": (5, 3)},
        {"placements": (shard(1),)},
        {"placements": (shard(2),)},
        {"placements": (replicate(),)},
        {"placements": ()},
        {"placements": (shard(0), shard(0))},
        {"placements": None},
        {"placements": (7,)},
        {"placements": (made("", "Shard", {"dim": "0"}),)},
        {"placements": (made("", "Shard", {"dim": 0, "split_factor": 2}),)},
        {"placements": (made("", "_StridedShard", {"dim": 0}),)},
        {"on": 3},
    ],
)
def test_what_does_not_fit_together_is_corrupt(changes: dict[str, Any]) -> None:
    assert read(dtensor(**GOOD))
    with pytest.raises(Corrupt):
        read(dtensor(**(GOOD | changes)))


@pytest.mark.parametrize("name", ["Partial", "_Partial", "MaskPartial"])
def test_terms_of_a_sum_are_not_parts(name: str) -> None:
    with pytest.raises(Unsupported, match="terms of a sum"):
        read(dtensor(**(GOOD | {"placements": (replicate(name),), "local": stored((4, 3))})))


def order(*axes: int) -> dict[str, Any]:
    return {
        "shard_order": (made("", "ShardOrderEntry", None, (0, axes)),),
        "use_strided_shard_as_shard_order": False,
    }


def test_a_cut_in_another_order_than_the_meshs_is_refused() -> None:
    tensor: dict[str, Any] = {
        "shape": (4,),
        "local": stored((1,)),
        "on": mesh((2, 2), 0),
        "placements": (shard(0), shard(0)),
    }
    assert read(dtensor(**tensor, **order(0, 1)))
    with pytest.raises(Unsupported, match="another order"):
        read(dtensor(**tensor, **order(1, 0)))
    with pytest.raises(Unsupported, match="read as a Shard"):
        read(dtensor(**(tensor | {"placements": (strided(0, 2), shard(0))}), **order(0, 1)))


def test_what_old_versions_do_not_record_is_refused() -> None:
    on = older_mesh((2, 2), [0, 0], (0, 1, 2, 3))
    even = dtensor((8,), stored((2,)), on, (strided(0, 2), shard(0)))
    assert read(even).pieces
    with pytest.raises(Unsupported, match="does not come out even"):
        read(dtensor((6,), stored((2,)), on, (strided(0, 2), shard(0))))
    twice = tuple(shard(0, OLD) for _ in range(2))
    with pytest.raises(Unsupported, match="before 2"):
        read(dtensor((8,), stored((2,)), on, twice))


def test_attributes_of_a_torch_to_come_are_refused() -> None:
    with pytest.raises(Unsupported, match="'unsharded'"):
        read(dtensor(**GOOD, unsharded=1))
    with pytest.raises(Unsupported, match="'skew'"):
        read(dtensor(**(GOOD | {"placements": (made("", "Shard", {"dim": 0, "skew": 1}),)})))


def test_a_local_tensor_of_yet_another_kind_is_refused() -> None:
    inner = Wrapped(Name("torchao.float8", "Float8Tensor"), "F32", (2, 3), None)
    with pytest.raises(Unsupported, match="Float8Tensor"):
        read(dtensor(**(GOOD | {"local": inner})))
