from __future__ import annotations

from ckptsync.head.metrics import read_manifests
from ckptsync.head.tombs import Grave, keep, store_now, write
from ckptsync.records.coding import decode
from ckptsync.records.keep import Keep
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from tests.retained import FIRST, fill


def grave(store: Store) -> Grave:
    name = fill(store, "checkpoint-1")
    return Grave({name: read_manifests(store, [name])[0]}, "location", "old", {"loss": 1.0})


def test_tombstones_are_numbered_and_know_when_each_nodes_save_ended() -> None:
    store = MemoryStore()
    names = [write(store, grave(store), stage) for stage in ("said", "begun")]
    stones = [decode(name, read_all(store, name), Tombstone) for name in names]
    assert [(s.n, s.stage, s.format, s.ended, s.metrics) for s in stones] == [
        (0, "said", 1, {"n0": FIRST * 10**9}, {}),
        (1, "begun", 1, {"n0": FIRST * 10**9}, {}),
    ]


def test_two_heads_that_begin_with_the_same_number_write_two_records() -> None:
    store, other = MemoryStore(), MemoryStore()
    assert write(store, grave(store), "said") == write(other, grave(other), "said")
    assert write(store, grave(store), "begun") != write(other, grave(other), "begun")


def test_words_to_keep_are_numbered() -> None:
    store = MemoryStore()
    names = [keep(store, Keep("run", "checkpoint-1", "checkpoint-1", 0, keeps=keeps)) for keeps in (True, False)]
    assert [decode(name, read_all(store, name), Keep).n for name in names] == [0, 1]


def test_the_time_is_the_stores_own() -> None:
    store = MemoryStore()
    first = store_now(store)
    store.write("x", [b""])
    assert store_now(store) == first + 2
