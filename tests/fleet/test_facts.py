"""What a node is made of."""

import pytest

from ckptsync.errors import Corrupt
from ckptsync.fleet.facts import Facts, Train, facts_name, listed, write
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore

FACTS = Facts(
    "n0",
    "host",
    "boot",
    "train",
    "0022",
    "0.1",
    "3.11",
    "6.1",
    {"nofile": 1024},
    {"/out": "ext4"},
    (),
    {"run": Train("hf", 4, 2, 1.5, {"torch": "2.13"})},
)


def test_facts_come_back_as_they_were_written_and_the_last_ones_stay() -> None:
    store = MemoryStore()
    write(store, Facts("n0", "", "", "", "", "", "", ""), ("worker",))
    write(store, FACTS, ("worker",))
    assert list(listed(store)) == [FACTS]


def test_a_head_without_a_worker_has_facts_of_its_own() -> None:
    assert facts_name("n0", ("worker", "head")) == ".ckptsync/nodes/n0~facts.json"
    assert facts_name("n0", ("head",)) == ".ckptsync/nodes/n0~head~facts.json"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"node": 1}'])
def test_what_cannot_be_read_is_told_and_holds_up_no_other(data: bytes) -> None:
    store = MemoryStore()
    write(store, FACTS, ("worker",))
    store.write(".ckptsync/nodes/a~facts.json", [data])
    broken, good = listed(store)
    assert isinstance(broken, Corrupt)
    assert good == FACTS


def test_what_a_later_version_adds_is_ignored() -> None:
    store = MemoryStore()
    write(store, FACTS, ("worker",))
    name = facts_name("n0", ("worker",))
    store.write(name, [read_all(store, name, 9999).replace(b'"node"', b'"later":[1],"node"')])
    assert list(listed(store)) == [FACTS]
