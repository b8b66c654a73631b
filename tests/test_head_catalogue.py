from __future__ import annotations

import pytest

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, StoreError, Unsupported
from ckptsync.head.catalogue import RecordCache, read_catalogue
from ckptsync.head.consolidate import HeadOptions, tick
from ckptsync.records.report import Report
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.memory import MemoryStore
from tests.filled import contents, flip, put, two_nodes


class Counting(MemoryStore):
    """Counts what is read."""

    reads = 0

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.reads += 1
        super().read_into(name, start, out)


def newer(store: MemoryStore, kind: str, place: str = "checkpoint-5") -> str:
    data = b'{"format":2}'
    name = f"run/.ckptsync/{place}/{kind}-0-{digest(data)[:16]}.json"
    store.write(name, [data])
    return name


def test_each_record_is_read_once_and_files_never() -> None:
    store, cache = Counting(), RecordCache()
    two_nodes(store)
    first = read_catalogue(store, cache=cache)
    assert (first.snapshots[0].word, store.reads) == ("COMPLETE", 2)
    assert read_catalogue(store, cache=cache) == first
    assert store.reads == 2


def test_a_record_that_has_gone_is_forgotten() -> None:
    store, cache = MemoryStore(), RecordCache()
    two_nodes(store)
    read_catalogue(store, cache=cache)
    store.delete(next(name for name in contents(store) if "manifest-node1" in name))
    assert read_catalogue(store, cache=cache).snapshots[0].word == "ARRIVING"
    assert len(cache.records) == 1


@pytest.mark.parametrize("kind", ["manifest-node2", "seal", "report", "tombstone"])
def test_a_record_of_a_newer_format_hides_its_own_place_only(kind: str) -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    name = newer(store, kind)
    found = read_catalogue(store)
    assert [s.place for s in found.snapshots] == ["checkpoint-4"]
    assert [(f.place, f.record, type(f.error)) for f in found.faults] == [("checkpoint-5", name, Unsupported)]
    assert [m.place for m in tick(store, HeadOptions(), 0.0).made] == ["checkpoint-4"]


def test_a_damaged_record_is_told_and_its_place_left_alone() -> None:
    store = MemoryStore()
    two_nodes(store)
    flip(store, put(store, Tombstone("run", "checkpoint-4", "checkpoint-4", 0, (), "old")))
    found = read_catalogue(store)
    assert (found.snapshots, [type(f.error) for f in found.faults]) == ((), [Corrupt])


def test_a_damaged_report_is_told_and_keeps_nobody_from_the_place() -> None:
    store = MemoryStore()
    two_nodes(store)
    flip(store, put(store, Report("run", "checkpoint-4", "checkpoint-4", 0, "stat", "ok", (), "", 0, ())))
    found = read_catalogue(store)
    assert ([s.word for s in found.snapshots], [type(f.error) for f in found.faults]) == (["COMPLETE"], [Corrupt])
    assert len(tick(store, HeadOptions(), 0.0).made) == 1


def test_one_run_can_be_read_alone() -> None:
    store = MemoryStore()
    two_nodes(store)
    assert read_catalogue(store, "run").snapshots == read_catalogue(store).snapshots
    assert read_catalogue(store, "other").snapshots == ()


def test_a_store_that_does_not_answer_is_an_error_and_not_an_empty_catalogue() -> None:
    class Silent(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError("no route to host")

    store = Silent()
    two_nodes(store)
    with pytest.raises(StoreError):
        read_catalogue(store)


def test_an_empty_store_holds_nothing() -> None:
    assert read_catalogue(MemoryStore()).snapshots == ()
