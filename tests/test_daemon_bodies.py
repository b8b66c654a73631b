import os
from pathlib import Path
from typing import NoReturn

import pytest

from ckptsync.catalogue import kept
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.daemon import bodies
from ckptsync.daemon.bodies import carry_out, shared
from ckptsync.daemon.child import Ended
from ckptsync.daemon.orders import Done, Order
from ckptsync.errors import StoreError
from ckptsync.head.gc import Asked, tick
from ckptsync.head.rules import Rules
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.cli_store import flip
from tests.retained import FIRST, fill
from tests.test_daemon_heading import arrive, word


def configured(path: Path, more: str = "") -> Config:
    return read(f"roles: [head]\nstore: {{url: {path}}}\n{more}", "c", {})


def test_a_location_is_consolidated_with_what_it_says_on_the_way_and_then_there_is_nothing_to_do(tmp_path: Path) -> None:
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
    assert [shared(configured(tmp_path, more)).memory >> 20 for more in ("", "limits: {memory: 8MiB}\n")] == [19, 8]


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of which two may go; what is read of it is kept in a file."""
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = create_store(str(tmp_path / "store"))
    for n in range(1, 5):
        fill(store, f"checkpoint-{n}", FIRST + n * 3600)
    return store


RULES = "retention: {keep_last: 2}\n"


def retain(path: Path) -> Done:
    return carry_out(Order("retain"), configured(path / "store", RULES), lambda *_: None)


def remembered(store: Store) -> int:
    found = kept.load(store.url)
    found.unpack()
    return len(found.units)


def test_retention_reads_what_an_earlier_one_has_read_from_its_file(four: Store, tmp_path: Path) -> None:
    assert len(retain(tmp_path).lines) == 2
    assert remembered(four) == 4
    (manifest,) = (tmp_path / "store/run/.ckptsync/checkpoint-4").glob("manifest-*")
    told = manifest.stat()
    flip(manifest)
    os.utime(manifest, ns=(told.st_atime_ns, told.st_mtime_ns))  # as a disk would do it
    assert not retain(tmp_path).changed, "read again it would hide the newest, and another would be kept in its stead"


def test_retention_keeps_what_it_has_read_when_it_is_ended(four: Store, tmp_path: Path) -> None:
    def ended(_done: int, _total: int) -> NoReturn:
        raise Ended

    tick(four, Asked(lambda _: Rules(keep_last=2)))  # marks them
    with pytest.raises(Ended):
        carry_out(Order("retain"), configured(tmp_path / "store", "retention: {keep_last: 2, grace: 1ms}\n"), ended)
    assert remembered(four) == 4


@pytest.mark.usefixtures("four")
def test_retention_that_has_taken_its_time_leaves_the_rest_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BUDGET", -1.0)
    for _ in range(2):
        found = retain(tmp_path)
        assert found.changed
        assert len(found.lines) == 1
    assert not retain(tmp_path).changed
