"""DTensors: where a rank's part belongs, and everything that says something else."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Name
from ckptsync.layouts.dtensor import Meshes, share
from ckptsync.layouts.wrapped import Share, Wrapped
from tests.made_pickles import OLD, dtensor, made, mesh, older_mesh, replicate, shard, stored, strided

NEW_SPEC: dict[str, Any] = {"use_strided_shard_as_shard_order": True, "shard_order": None}


def read(tensor: Wrapped) -> Share:
    return share(tensor, Meshes())


def test_rows_are_cut_as_torch_chunk_cuts_them() -> None:
    found = [
        read(dtensor((5, 3), stored(local), mesh((3,), rank), (shard(0),))) for rank, local in enumerate([(2, 3), (2, 3), (1, 3)])
    ]
    assert [[(p.offsets, p.sizes) for p in f.pieces] for f in found] == [[((0, 0), (2, 3))], [((2, 0), (2, 3))], [((4, 0), (1, 3))]]
    assert [(f.rank, f.world, f.group) for f in found] == [(rank, 3, 3) for rank in range(3)]
    assert len({str(f.told) for f in found}) == 1


@pytest.mark.parametrize("empty", [(0, 3), (0,)])
def test_a_rank_behind_the_end_holds_nothing(empty: tuple[int, ...]) -> None:
    assert read(dtensor((2, 3), stored(empty), mesh((4,), 3), (shard(0),))).pieces == ()


def test_replicas_hold_the_same_box() -> None:
    found = [read(dtensor((4,), stored((2,)), mesh((2, 2), rank), (replicate(), shard(0)))).pieces for rank in range(4)]
    assert [[p.offsets for p in pieces] for pieces in found] == [[(0,)], [(2,)], [(0,)], [(2,)]]


def test_fsdp_over_tensor_parallelism_is_not_in_the_order_of_the_ranks() -> None:
    boxes = []
    for rank in range(4):
        tensor = dtensor((8,), stored((2,)), mesh((2, 2), rank), (strided(0, 2), shard(0)), **NEW_SPEC)
        boxes += [piece.offsets[0] for piece in read(tensor).pieces]
    assert boxes == [0, 4, 2, 6]


def test_a_part_in_two_places_lies_behind_each_other_in_what_the_rank_holds() -> None:
    found = read(dtensor((8, 3), stored((4, 3)), mesh((2,), 1), (strided(0, 2),), **NEW_SPEC))
    assert [(p.offsets, p.sizes, p.stored.offset) for p in found.pieces] == [((2, 0), (2, 3), 0), ((6, 0), (2, 3), 6)]


GOOD: dict[str, Any] = {"shape": (4, 3), "local": stored((2, 3)), "on": mesh((2,), 0), "placements": (shard(0),)}


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
    return {"shard_order": (made("", "ShardOrderEntry", None, (0, axes)),), "use_strided_shard_as_shard_order": False}


def test_a_cut_in_another_order_than_the_meshs_is_refused() -> None:
    tensor: dict[str, Any] = {"shape": (4,), "local": stored((1,)), "on": mesh((2, 2), 0), "placements": (shard(0), shard(0))}
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
