from __future__ import annotations

import pytest

from ckptsync.catalogue.uncached import read_location, read_state
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.io import LIMITS, read_records
from ckptsync.records.location_status import record_names
from ckptsync.records.report import Report
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import flip, newer, put, two_nodes
from tests.support.head_in_process import consolidate_due


class _Counted(MemoryStore):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.read.append(name)
        super().read_into(name, start, out)


def test_one_location_is_read_without_the_records_of_others() -> None:
    store = _Counted()
    for step in (4, 5, 50):
        two_nodes(store, "zero3", f"checkpoint-{step}")
    everything = read_state(store)
    store.read.clear()
    found = read_location(store, "run", "checkpoint-5")
    assert found.locations == (everything.of("run", "checkpoint-5"),)
    assert store.read
    assert all("/checkpoint-5/" in name for name in store.read)
    assert {n: t for n, t in everything.mtimes.items() if "/checkpoint-5/" in n} == found.mtimes


def test_locations_of_one_checkpoint_are_judged_together_when_one_is_asked_for() -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, location="checkpoint-4~0123456789ab")
    everything = read_state(store)
    for seen in everything.locations:
        assert read_location(store, "run", seen.location).locations == (seen,)


@pytest.mark.parametrize("kind", ["manifest-node2", "model", "report", "tombstone"])
def test_a_record_of_a_newer_format_hides_its_own_location_only(kind: str) -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    name = newer(store, kind)
    found = read_state(store)
    assert [s.location for s in found.readable] == ["checkpoint-4"]
    assert [s.location for s in found.locations] == ["checkpoint-4", "checkpoint-5"]
    assert [(f.location, f.name, type(f.error)) for f in found.faults] == [
        ("checkpoint-5", name, Unsupported)
    ]
    assert isinstance(found.newer("run", "checkpoint-5"), Unsupported)
    assert found.newer("run", "checkpoint-4") is None


def test_a_damaged_tombstone_hides_its_location_and_a_damaged_report_does_not() -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    flip(
        store,
        put(
            store,
            Report("run", "checkpoint-4", "checkpoint-4", 0, "digest", "damaged", (), "", 0, ()),
        ),
    )
    flip(store, put(store, Tombstone("run", "checkpoint-5", "checkpoint-5", 0, (), "old")))
    found = read_state(store)
    assert [m.location for m in consolidate_due(store, HeadOptions()).made] == ["checkpoint-4"]
    assert [s.location for s in found.readable] == ["checkpoint-4"]
    assert [f.finding.kind for f in found.faults] == ["note", "digest"]


def test_a_record_that_goes_while_it_is_listed_was_never_there() -> None:
    class Forgetful(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if "manifest-node1" in name:
                self.delete(name)
            super().read_into(name, start, out)

    store = Forgetful()
    two_nodes(store)
    found = read_state(store)
    assert (found.faults, [s.status for s in found.locations]) == ((), ["INCOMPLETE"])


def test_a_record_is_one_request_and_one_that_nobody_could_have_written_is_not_read() -> None:
    class Asked(MemoryStore):
        def size(self, name: str) -> int:
            raise AssertionError(name)

    store = Asked()
    two_nodes(store)
    assert [s.status for s in read_state(store).locations] == ["COMPLETE"]
    name, parsed = next(iter(record_names(e.name for e in store.names("")).items()))
    assert [type(f.error) for f in read_records(store, [parsed], {name: 1 << 40})[1]] == [Corrupt]


def test_a_record_that_is_too_large_for_its_kind_is_not_fetched_and_hides_no_other_location() -> (
    None
):
    store = _Counted()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    large = {
        name: LIMITS[parsed.kind] + 1
        for name, parsed in record_names(
            n.name for n in store.names("run/.ckptsync/checkpoint-4/")
        ).items()
    }
    for name, size in large.items():
        store.write(name, [bytes(size)])
    store.read.clear()
    found = read_state(store)
    assert {fault.name for fault in found.faults} == {*large}
    assert all(
        isinstance(fault.error, Corrupt) and "expected of a" in str(fault.error)
        for fault in found.faults
    )
    assert [seen.location for seen in found.readable] == ["checkpoint-5"]
    assert not set(store.read) & {*large}
