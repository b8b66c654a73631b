"""The files of all nodes, and each node by its last heartbeat."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckptsync.errors import Corrupt
from ckptsync.service.process_control import heartbeat
from ckptsync.service.process_status import survey
from ckptsync.status.heartbeat import PERIOD, Heartbeat, beat, write, write_facts
from ckptsync.status.nodes import NodeFile, NodeFiles, list_nodes, read_nodes
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from tests.support.remote_stores import Counting
from tests.support.status_examples import NOW, fact, heart


def test_hearts_and_facts_go_by_one_name_and_what_cannot_be_read_is_its_error() -> None:
    store = MemoryStore()
    beat(store, heartbeat("n0", ("worker",)))
    beat(store, heartbeat("n0", ("head",)))
    write_facts(store, survey("n0", {}), ("worker",))
    store.write(".ckptsync/nodes/odd.json", [b"{"])
    found = read_nodes(store)
    kinds = [("n0", Heartbeat), ("n0~head", Heartbeat), ("odd", Corrupt)]
    assert [(k.name, type(k.content)) for k in found.hearts] == kinds
    assert list(found.facts) == ["n0"]
    assert read_nodes(store, with_facts=False).facts == {}


def test_only_what_has_changed_is_read_again() -> None:
    store = Counting(MemoryStore())
    mine = beat(store, heartbeat("n0", ("worker",)))
    beat(store, heartbeat("n1", ("worker",)))
    store.reads.clear()
    first = read_nodes(store)
    assert store.reads.total() == 2
    assert read_nodes(store, first) == first
    assert store.reads.total() == 2
    write(store, replace(mine, beat=2))
    again = read_nodes(store, first)
    assert store.reads.total() == 3
    assert [k.content.beat for k in again.hearts if isinstance(k.content, Heartbeat)] == [2, 1]


def test_a_node_that_goes_while_it_is_read_is_no_node() -> None:
    class Going(MemoryStore):
        def names(self, prefix: str) -> Iterator[Entry]:
            for entry in super().names(prefix):
                self.delete(entry.name)
                yield entry

    store = Going()
    beat(store, heartbeat("n0", ("worker",)))
    assert read_nodes(store).hearts == ()


def test_the_stores_time_is_told_by_this_machines_heartbeat_and_never_before_the_newest() -> None:
    mine = Heartbeat("n0", "aa", "boot", 1, "100", 1000.0, ("worker",), "0", written=13_600.0)
    other = replace(mine, machine="elsewhere", written=99_999.0)
    hour_behind = NodeFile(Entry(".ckptsync/nodes/n0.json", 1, 10_000.0), mine)
    late = NodeFile(Entry(".ckptsync/nodes/n2.json", 1, 9_900.0), mine)
    elsewhere = NodeFile(Entry(".ckptsync/nodes/n1.json", 1, 10_000.0), other)
    for known, machine, clock, expected in (
        ((hour_behind, late, elsewhere), "boot", 13_605.0, 10_005.0),
        ((elsewhere,), "boot", 13_605.0, 13_605.0),
        ((hour_behind,), "", 10_001.0, 10_001.0),
        ((hour_behind,), "", 0.5, 10_000.0),
        ((), "boot", 0.5, 0.5),
    ):
        assert files(*known).now(machine, clock) == expected


def test_a_callers_threads_read_what_its_own_would() -> None:
    store = MemoryStore()
    for n in range(30):
        beat(store, heartbeat(f"n{n}", ("worker",)))
    with ThreadPoolExecutor(8) as pool:
        assert read_nodes(store, None, pool.map) == read_nodes(store)


def files(*known: NodeFile) -> NodeFiles:
    return NodeFiles({k.entry.name: k for k in known})


@pytest.mark.parametrize(
    ("ago", "state"), [(0, "alive"), (4 * PERIOD, "alive"), (4 * PERIOD + 1, "silent")]
)
def test_a_node_is_silent_after_four_periods(ago: float, state: str) -> None:
    [node] = list_nodes(files(heart(ago=ago)), NOW)
    assert (node.state, node.age, node.beat) == (state, ago, NOW - ago)


def test_a_node_that_said_so_has_stopped_and_one_that_cannot_be_read_is_named_by_its_file() -> None:
    odd = NodeFile(Entry(".ckptsync/nodes/odd.json", 1, NOW), Corrupt("odd: not a heartbeat"))
    stopped, node = list_nodes(files(heart(ago=10**6, stopped=True), odd), NOW)
    assert stopped.state == "stopped"
    assert (node.name, node.state, node.errors) == ("odd", "unreadable", ("odd: not a heartbeat",))


def test_facts_stand_beside_the_heartbeat_of_their_own_process() -> None:
    known = files(heart(), fact(offset=-2.5, run="runs"), heart(roles=("head",)))
    worker, head = list_nodes(known, NOW)
    assert (worker.name, worker.host, worker.clock_offset) == ("n0", "n0.example", -2.5)
    assert worker.trains["run"].state == "runs"
    assert (head.name, head.node, head.clock_offset, head.trains) == ("n0~head", "n0", None, {})
    odd = NodeFile(fact().entry, Corrupt("odd facts"))
    [node] = list_nodes(files(heart(notes=("a",)), odd), NOW)
    assert node.notes == ("a", "odd facts")
