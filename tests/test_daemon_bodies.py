from pathlib import Path

import pytest

from ckptsync.config.loading import read
from ckptsync.config.values import Config
from ckptsync.daemon.bodies import carry_out, shared
from ckptsync.daemon.orders import Order
from ckptsync.errors import StoreError
from ckptsync.stores.opening import create_store
from tests.test_daemon_heading import arrive, word


def configured(path: Path, more: str = "") -> Config:
    return read(f"roles: [head]\nstore: {{url: {path}}}\n{more}", "c", {})


def test_a_place_is_consolidated_with_what_it_says_on_the_way_and_then_there_is_nothing_to_do(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    arrive(store, "fsdp2")
    told: list[tuple[int, int]] = []
    order = Order("consolidate", "fsdp2", "checkpoint-4")
    assert carry_out(order, configured(tmp_path), lambda *at: told.append(at)).changed
    assert 0 < told[-1][0] <= told[-1][1]
    assert not carry_out(order, configured(tmp_path), lambda *_: None).changed
    assert word(store) == ["CONSOLIDATED"]
    assert carry_out(Order("verify", "fsdp2", "checkpoint-4"), configured(tmp_path), lambda *_: None).changed
    assert word(store) == ["VERIFIED"]


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        carry_out(Order("consolidate", "a", "b"), configured(tmp_path / "gone"), lambda *_: None)
    assert not (tmp_path / "gone").exists()


def test_children_share_the_bandwidth_and_the_memory_of_transfers(tmp_path: Path) -> None:
    told = shared(configured(tmp_path, 'limits: {bandwidth: "08:00,50M 19:00,off"}\nhead: {jobs: 5}\n'))
    assert told.bandwidth
    assert told.bandwidth.rates == (10 * 2**20, None) * 7
    assert shared(configured(tmp_path)).bandwidth is None
    assert [shared(configured(tmp_path, more)).memory >> 20 for more in ("", "limits: {memory: 8MiB}\n")] == [32, 8]
