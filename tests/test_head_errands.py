"""What is due, out of a real store's summaries."""

from __future__ import annotations

from ckptsync.catalogue.reading import read
from ckptsync.head.consolidate import HeadOptions, one
from ckptsync.head.errands import Errand, errands
from ckptsync.records.report import Finding
from ckptsync.stores.memory import MemoryStore
from tests.filled import DEMO, put, report_on, send, two_nodes
from tests.test_head_consolidate import BASE, MODEL
from tests.test_head_sealing import look


def due(store: MemoryStore, configured: str = "") -> list[Errand]:
    return list(errands(read(store).summaries, lambda _: configured))


def test_what_is_complete_is_an_errand_until_it_is_consolidated_and_what_arrives_is_none() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    assert due(store) == []
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1")
    [errand] = due(store)
    assert (errand.run, errand.location, errand.lasts) == ("run", "checkpoint-4", False)
    assert errand.size > 10_000
    one(store, "run", "checkpoint-4", BASE)
    assert due(store) == []


def test_damage_is_looked_at_once_in_one_state_and_a_lost_file_again_and_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    one(store, "run", "checkpoint-4", BASE)
    put(store, report_on(look(store), 0, "damaged", [Finding("digest", MODEL.removeprefix("run/"), "differs")]))
    [damaged] = due(store)
    store.delete(MODEL)
    [lost] = due(store)
    assert (damaged.lasts, lost.lasts, damaged.key != lost.key) == (True, False, True)


def test_the_newest_comes_first_and_before_what_is_damaged() -> None:
    store = MemoryStore()
    for location in ("checkpoint-4", "checkpoint-5", "checkpoint-6"):
        two_nodes(store, location=location)
    one(store, "run", "checkpoint-4", BASE)
    store.delete(MODEL)
    assert [e.location for e in due(store)] == ["checkpoint-6", "checkpoint-5", "checkpoint-4"]


def test_what_a_model_lacks_is_looked_for_once_in_a_run_and_where_there_is_something() -> None:
    store = MemoryStore()
    for location in ("checkpoint-4", "checkpoint-5"):
        two_nodes(store, location=location)
        one(store, "run", location, HeadOptions())
    assert due(store) == []
    [given] = due(store, "config_from")
    assert (given.run, given.location, given.lasts) == ("run", "", True)
    send(store, DEMO / "base", "node0", "final")
    [final] = [e for e in due(store) if not e.location]
    assert final.key != given.key
    assert len(one(store, "run", "", HeadOptions())) == 2
    assert [e for e in due(store) if not e.location] == []
