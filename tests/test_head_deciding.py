from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.deciding import task
from ckptsync.records.report import Finding, Kind
from ckptsync.records.state import Condition, Snapshot
from ckptsync.stores.memory import MemoryStore
from tests.filled import put, report_on, two_nodes
from tests.heads import consolidate_due


def consolidated(*findings: Finding) -> Snapshot:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, HeadOptions())
    snapshot = consolidate_due(store, HeadOptions()).catalogue.readable[0]
    if findings:
        put(store, report_on(snapshot, 0, "damaged", findings))
    return consolidate_due(store, HeadOptions()).catalogue.readable[0]


def test_what_is_consolidated_may_still_lack_configuration() -> None:
    assert task(consolidated()).deed == "complete"


def test_what_cannot_be_told_apart_or_is_given_up_is_left_alone() -> None:
    snapshot = consolidated()
    for conditions in (replace(snapshot.conditions, ambiguous="two saves"), replace(snapshot.conditions, retired="old")):
        assert task(replace(snapshot, conditions=conditions)).deed == "nothing"
        assert task(replace(snapshot, conditions=conditions, model_record=None)).deed == "nothing"


def test_a_model_whose_shards_were_let_go_still_gets_what_opens_it() -> None:
    snapshot = consolidated()
    assert task(replace(snapshot, conditions=replace(snapshot.conditions, shards="old"))).deed == "complete"


def test_without_a_model_record_completeness_decides() -> None:
    snapshot = replace(consolidated(), model_record=None)
    assert task(snapshot).deed == "consolidate"
    assert task(replace(snapshot, conditions=replace(snapshot.conditions, model=Condition(holds=False)))).deed == "nothing"


@pytest.mark.parametrize(
    ("kind", "name", "deed"),
    [
        ("digest", "consolidated/checkpoint-4/model.safetensors", "mend"),
        ("missing", "consolidated/checkpoint-4/model.safetensors", "mend"),
        ("nonfinite", "consolidated/checkpoint-4/model.safetensors", "complete"),
        ("note", "consolidated/checkpoint-4/model.safetensors", "complete"),
        ("digest", "consolidated/checkpoint-4/stranger", "complete"),
        ("digest", "checkpoint-4/model.safetensors", "complete"),
        ("digest", "consolidated/checkpoint-44/model.safetensors", "complete"),
    ],
)
def test_only_damage_to_what_the_model_record_binds_is_mended(kind: Kind, name: str, deed: str) -> None:
    assert task(consolidated(Finding(kind, name, ""))).deed == deed
