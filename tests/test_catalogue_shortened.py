from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.catalogue.shortened import cut, step, summary
from ckptsync.catalogue.summary import Proven, Summary
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.report import Finding
from ckptsync.stores.memory import MemoryStore
from tests.filled import DEMO, FIRST, SECOND, put, report_on, send, two_nodes
from tests.heads import consolidate_due

SHARD = "checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"


def short(store: MemoryStore) -> Summary:
    found = fresh(store)
    return summary(found.locations[0], found.mtimes)


def test_a_whole_location_in_short() -> None:
    store = MemoryStore()
    two_nodes(store)
    found = short(store)
    assert (found.run, found.location, found.step, found.status, found.nodes) == (
        "run",
        "checkpoint-4",
        4,
        "COMPLETE",
        ("node0", "node1"),
    )
    own = list(store.names("run/checkpoint-4/"))
    assert (found.files, found.size) == (len(own), sum(e.size for e in own))
    assert (found.model, found.resume, found.consolidated, found.lacks) == (True, True, False, ())
    assert found.ended == FIRST / SECOND


def test_times_are_the_stores() -> None:
    store = MemoryStore()  # its clock counts writes
    two_nodes(store)
    first, second = (e.mtime for e in store.names("run/.ckptsync/"))
    assert (short(store).first, short(store).arrived) == (first, second)


def test_a_location_that_is_not_whole_says_why_in_few_lines() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    assert short(store).status == "ARRIVING"
    assert any("no node has sent it" in line for line in short(store).evidence)


def test_damage_is_told_as_it_was_found_and_whether_the_file_came_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    found = fresh(store).locations[0]
    put(store, report_on(found, 1, "damaged", [Finding("digest", SHARD, "two blocks"), Finding("note", "x", "y")], "parse"))
    said = short(store)
    assert (said.status, said.evidence, said.proof.asked) == ("DAMAGED", (f"{SHARD}: digest: two blocks",), "parse")
    assert said.proof.changed < said.proof.said
    store.write(f"run/{SHARD}", [b"again"])
    assert short(store).proof.changed > short(store).proof.said


def test_what_was_proven_when() -> None:
    store = MemoryStore()
    two_nodes(store)
    seen = fresh(store).locations[0]
    assert short(store).proof == Proven()
    first = put(store, report_on(seen, 1, "ok", level="load"))
    second = put(store, report_on(seen, 2, "ok", level="digest"))
    mtimes = fresh(store).mtimes
    assert short(store).proof.passed == (("digest", mtimes[second]), ("load", mtimes[first]))
    assert (short(store).proof.report, short(store).proof.when) == (second, mtimes[second])


def test_every_record_changes_the_state() -> None:
    store = MemoryStore()
    two_nodes(store)
    before = short(store).state
    put(store, report_on(fresh(store).locations[0], 1, "ok"))
    assert short(store).state != before


@pytest.mark.parametrize(("name", "number"), [("checkpoint-500", 500), ("final", None), ("epoch_1_step_20", 20)])
def test_a_step_is_the_number_at_the_end(name: str, number: int | None) -> None:
    assert step(name) == number


def test_of_many_lines_the_others_are_counted() -> None:
    assert cut(["a"] * 8) == ("a",) * 8
    assert cut(["a"] * 11) == (*("a",) * 8, "and 3 more")


def test_what_has_come_since_it_was_consolidated_and_what_its_model_lacks_is_told() -> None:
    store = MemoryStore()
    two_nodes(store)
    assert (short(store).late, short(store).to_open) == (False, ()), "nothing is consolidated"
    consolidate_due(store, HeadOptions())
    assert (short(store).late, short(store).to_open) == (False, ("config.json", "tokenizer"))
    late = fresh(store).locations[0].manifests[1].manifest
    put(store, replace(late, n=1, files=(replace(late.files[0], path="README.md"),)))
    assert short(store).late
