"""What is due, out of a real store's summaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import summarize
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.head.due_jobs import Job, head_jobs, todo_for
from ckptsync.records.location_status import Condition, LocationState
from ckptsync.records.report import FindingKind, VerifyFinding
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from tests.head.test_consolidate import BASE, MODEL, look, put_files
from tests.support.filled_stores import DEMO, put, report_on, send, two_nodes
from tests.support.head_in_process import consolidate_due


def due(store: MemoryStore, configured: str = "") -> list[Job]:
    return list(head_jobs(read_catalogue(store).summaries, lambda _: configured))


def test_what_is_complete_is_a_job_until_it_is_consolidated_and_what_arrives_is_none() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    assert due(store) == []
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1")
    [job] = due(store)
    assert (job.run, job.location, job.once_per_key) == ("run", "checkpoint-4", False)
    assert job.size > 10_000
    assert job.key, "what failed is tried again when a record more is there"
    consolidate_location(store, "run", "checkpoint-4", BASE)
    assert due(store) == []


def test_damage_is_looked_at_once_in_one_state_and_a_lost_file_again_and_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_location(store, "run", "checkpoint-4", BASE)
    put(
        store,
        report_on(
            look(store),
            0,
            "damaged",
            [VerifyFinding("digest", MODEL.removeprefix("run/"), "differs")],
        ),
    )
    [damaged] = due(store)
    store.delete(MODEL)
    [lost] = due(store)
    assert (damaged.once_per_key, lost.once_per_key, damaged.key != lost.key) == (True, False, True)


def test_the_newest_comes_first_and_before_what_is_damaged() -> None:
    store = MemoryStore()
    for location in ("checkpoint-4", "checkpoint-5", "checkpoint-6"):
        two_nodes(store, location=location)
    consolidate_location(store, "run", "checkpoint-4", BASE)
    store.delete(MODEL)
    assert [e.location for e in due(store)] == ["checkpoint-6", "checkpoint-5", "checkpoint-4"]


def test_what_a_model_lacks_is_looked_for_once_in_a_run_and_where_there_is_something() -> None:
    store = MemoryStore()
    for location in ("checkpoint-4", "checkpoint-5"):
        two_nodes(store, location=location)
        consolidate_location(store, "run", location, HeadOptions())
    assert due(store) == []
    [given] = due(store, "config_from")
    assert (given.run, given.location, given.once_per_key) == ("run", "", True)
    send(store, DEMO / "base", "node0", "final")
    [final] = [e for e in due(store) if not e.location]
    assert final.key != given.key
    two_nodes(store, location="checkpoint-6")  # which is to be merged by a job of its own
    assert len(consolidate_location(store, "run", "", HeadOptions())) == 2
    assert [e for e in due(store) if not e.location] == []
    consolidate_location(store, "run", "checkpoint-6", BASE)
    put_files(store, DEMO / "base", "checkpoint-5")
    (late,) = due(store)
    assert (late.run, late.location) == ("run", "")


def test_one_model_lends_another_what_that_lacks() -> None:
    store = MemoryStore()
    for location, options in (("checkpoint-4", BASE), ("checkpoint-5", HeadOptions())):
        two_nodes(store, location=location)
        consolidate_location(store, "run", location, options)
    (lent,) = due(store)
    two_nodes(store, location="checkpoint-6")
    consolidate_location(store, "run", "checkpoint-6", HeadOptions())
    (again,) = due(store)
    assert lent.key != again.key, "another one lacks it, so it is done again"


def consolidated(*findings: VerifyFinding) -> LocationState:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, HeadOptions())
    seen = consolidate_due(store, HeadOptions()).catalogue.readable[0]
    if findings:
        put(store, report_on(seen, 0, "damaged", findings))
    return consolidate_due(store, HeadOptions()).catalogue.readable[0]


def todo(seen: LocationState) -> str | None:
    return todo_for(summarize(seen, {}))


def test_what_a_location_is_decides_what_is_done_about_its_model() -> None:
    made = consolidated()
    new = replace(made, model_record=None, model_record_name="")
    cases: list[tuple[dict[str, Any], str | None, str | None]] = [
        ({}, "configure", "merge"),
        ({"shards": "old"}, "configure", "merge"),
        ({"model": Condition(holds=False)}, "configure", None),
        ({"conflict": "two saves"}, None, None),
        ({"retired": "old"}, None, None),
    ]
    for change, of_made, of_new in cases:
        conditions = replace(made.conditions, **change)
        assert todo(replace(made, conditions=conditions)) == of_made
        assert todo(replace(new, conditions=conditions)) == of_new


def test_a_model_record_that_is_lost_after_its_shards_were_deleted_is_not_merged_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_location(store, "run", "checkpoint-4", BASE)
    seen = look(store)
    named = tuple(known.name for known in seen.manifests)
    put(
        store,
        Tombstone("run", "checkpoint-4", "checkpoint-4", 0, named, "old", "shards", "done"),
    )
    shards = {name: read_all(store, name) for name in seen.named_files("shards")}
    for name in shards:
        store.delete(name)
    store.delete(seen.model_record_name)
    assert look(store).status == "COMPLETE", "its model is expected, and nothing else"
    assert due(store) == []
    assert consolidate_location(store, "run", "checkpoint-4", BASE) == ()
    for name, content in shards.items():
        store.write(name, [content])
    assert len(due(store)) == 1, "somebody has brought them back"


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("digest", "consolidated/checkpoint-4/model.safetensors", "repair"),
        ("missing", "consolidated/checkpoint-4/model.safetensors", "repair"),
        ("nonfinite", "consolidated/checkpoint-4/model.safetensors", "configure"),
        ("note", "consolidated/checkpoint-4/model.safetensors", "configure"),
        ("digest", "consolidated/checkpoint-4/stranger", "configure"),
        ("digest", "checkpoint-4/model.safetensors", "configure"),
        ("digest", "consolidated/checkpoint-44/model.safetensors", "configure"),
    ],
)
def test_only_damage_to_what_the_model_record_binds_is_repaired(
    kind: FindingKind, name: str, what: str
) -> None:
    assert todo(consolidated(VerifyFinding(kind, name, ""))) == what
