"""What nodes say of themselves, read again where it has changed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckptsync.errors import Corrupt
from ckptsync.fleet import facts
from ckptsync.fleet.heartbeat import Heartbeat, beat, write
from ckptsync.fleet.nodes import told
from ckptsync.service.heartbeat import survey
from ckptsync.service.process import heartbeat
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore


class Counted(MemoryStore):
    """Counts what is read."""

    reads = 0

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.reads += 1
        super().read_into(name, start, out)


def test_hearts_and_facts_go_by_one_name_and_what_cannot_be_read_is_its_error() -> None:
    store = MemoryStore()
    beat(store, heartbeat("n0", ("worker",)))
    beat(store, heartbeat("n0", ("head",)))
    facts.write(store, survey("n0", {}), ("worker",))
    store.write(".ckptsync/nodes/odd.json", [b"{"])
    found = told(store)
    assert [(k.name, type(k.said)) for k in found.hearts] == [("n0", Heartbeat), ("n0~head", Heartbeat), ("odd", Corrupt)]
    assert list(found.facts) == ["n0"]


def test_only_what_has_changed_is_read_again() -> None:
    store = Counted("memory:")
    mine = beat(store, heartbeat("n0", ("worker",)))
    beat(store, heartbeat("n1", ("worker",)))
    store.reads = 0
    first = told(store)
    assert store.reads == 2
    assert told(store, first) == first
    assert store.reads == 2
    write(store, replace(mine, beat=2))
    again = told(store, first)
    assert store.reads == 3
    assert [k.said.beat for k in again.hearts if isinstance(k.said, Heartbeat)] == [2, 1]


def test_a_node_that_goes_while_it_is_read_is_no_node() -> None:
    class Going(MemoryStore):
        def names(self, prefix: str) -> Iterator[Entry]:
            for entry in super().names(prefix):
                self.delete(entry.name)
                yield entry

    store = Going()
    beat(store, heartbeat("n0", ("worker",)))
    assert told(store).hearts == ()


def test_the_stores_time_is_never_before_its_newest_heartbeat() -> None:
    store = MemoryStore()
    beat(store, heartbeat("n0", ("worker",)))
    [known] = told(store).hearts
    assert told(store).now("another machine", 0.5) == known.entry.mtime
    assert told(store).now("another machine", known.entry.mtime + 60) == known.entry.mtime + 60


def test_a_callers_threads_read_what_its_own_would() -> None:
    store = MemoryStore()
    for n in range(30):
        beat(store, heartbeat(f"n{n}", ("worker",)))
    with ThreadPoolExecutor(8) as pool:
        assert told(store, None, pool.map) == told(store)
