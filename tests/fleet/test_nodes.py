"""Nodes, by their last heartbeat."""

import pytest

from ckptsync.errors import Corrupt
from ckptsync.fleet.heartbeat import PERIOD
from ckptsync.fleet.nodes import Known, Told, nodes
from ckptsync.stores.contract import Entry
from tests.scenes import NOW, fact, heart


def told(*known: Known) -> Told:
    return Told({k.entry.name: k for k in known})


@pytest.mark.parametrize(("ago", "state"), [(0, "alive"), (4 * PERIOD, "alive"), (4 * PERIOD + 1, "silent")])
def test_a_node_is_silent_after_four_periods(ago: float, state: str) -> None:
    [node] = nodes(told(heart(ago=ago)), NOW)
    assert (node.state, node.age, node.beat) == (state, ago, NOW - ago)


def test_a_node_that_said_so_has_stopped_however_long_ago() -> None:
    [node] = nodes(told(heart(ago=10**6, stopped=True)), NOW)
    assert node.state == "stopped"


def test_a_heartbeat_that_cannot_be_read_is_named_by_its_file() -> None:
    [node] = nodes(told(Known(Entry(".ckptsync/nodes/odd.json", 1, NOW), Corrupt("odd: not a heartbeat"))), NOW)
    assert (node.name, node.state, node.errors) == ("odd", "unreadable", ("odd: not a heartbeat",))


def test_facts_stand_beside_the_heartbeat_of_their_own_process() -> None:
    worker, head = nodes(told(heart(), fact(offset=-2.5, run="runs"), heart(roles=("head",))), NOW)
    assert (worker.name, worker.host, worker.clock_offset, worker.trains["run"].state) == ("n0", "n0.example", -2.5, "runs")
    assert (head.name, head.node, head.clock_offset, head.trains) == ("n0~head", "n0", None, {})
