"""Device meshes, as several versions of torch keep them."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.layouts.mesh import mesh as read
from tests.made_pickles import made, older_mesh
from tests.made_pickles import mesh as newer

LAYOUT = "torch.distributed._mesh_layout"


def flat(*axes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    return made(LAYOUT, "_MeshLayout", {"axes": tuple(made(LAYOUT, "_FlatLayout", {"shape": n, "stride": s}) for n, s in axes)})


def test_the_same_mesh_is_read_from_every_version() -> None:
    found = read(newer((2, 2), 1))
    assert (found.shape, found.ranks, found.coordinate, found.world, found.rank) == ((2, 2), (0, 1, 2, 3), (0, 1), 4, 1)
    assert read(older_mesh((2, 2), [0, 1], (0, 1, 2, 3))) == found
    nested = made(LAYOUT, "_MeshLayout", {"shape": (2, 2), "stride": (2, 1)})  # 2.10 and 2.11
    assert read(newer((2, 2), 1, _layout=nested)) == found
    single = made(LAYOUT, "_MeshLayout", {"shape": 4, "stride": 1})
    assert read(newer((4,), 1, _layout=single)).shape == (4,)


def test_a_slice_of_a_mesh_has_the_ranks_of_its_own_row() -> None:
    column = read(newer((2, 2), 3, _layout=flat(((2,), (2,))), _coordinate_on_dim=(1,)))
    assert (column.shape, column.ranks, column.world, column.rank) == ((2,), (1, 3), 4, 3)
    row = read(newer((2, 2), 3, _layout=flat(((2,), (1,))), _coordinate_on_dim=(1,)))
    assert row.ranks == (2, 3)


def test_ranks_need_not_be_in_order_and_axes_may_be_flattened() -> None:
    assert read(newer((2, 2), 3, ranks=(2, 3, 0, 1))).coordinate == (0, 1)
    assert read(newer((4,), 3, _layout=flat(((2, 2), (2, 1))))).ranks == (0, 1, 2, 3)
    assert read(newer((1,), 0, _layout=flat(((), ())))).shape == (1,)


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
        {"_layout": flat(((1 << 40,), (1,)), ((1,), (1,)))},
        {"_layout": flat(((2,), (2,)), ((2, 2), (1,)))},
        {"_layout": flat(((0,), (1,)), ((2,), (1,)))},
        {"_layout": made(LAYOUT, "_MeshLayout", {"shape": (2, 2), "stride": (1,)})},
        {"_layout": made(LAYOUT, "_MeshLayout", {"shape": (2, 2), "stride": ((1, (1,)), 1)})},
        {"_layout": made(LAYOUT, "_MeshLayout", {"shape": ((1,) * 20, 2), "stride": ((1,) * 20, 1)})},
    ],
)
def test_a_mesh_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((Corrupt, Unsupported)):
        read(newer((2, 2), 1, **changes))


def test_an_older_mesh_that_contradicts_itself_is_refused() -> None:
    for ranks, coordinate in [((0, 1, 2), [0, 1]), ((0, 1, 1, 2), [0, 1]), ((0, 1, 2, 3), [2, 0]), ((), [0, 0])]:
        with pytest.raises(Corrupt):
            read(older_mesh((2, 2), coordinate, ranks))


def test_what_no_known_torch_writes_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="neither _layout nor mesh"):
        read(made("", "DeviceMesh", {"_coordinate_on_dim": (0,)}))
    with pytest.raises(Unsupported, match="without axes or shape"):
        read(newer((2,), 0, _layout=made(LAYOUT, "_MeshLayout", {"sizes": (2,)})))
    with pytest.raises(Unsupported, match="does not say whose"):
        read(newer((2, 2), 3, _layout=flat(((2,), (2,))), _coordinate_on_dim=(1,), _rank=None))
    with pytest.raises(Corrupt, match="no DeviceMesh"):
        read({"_layout": 1})
