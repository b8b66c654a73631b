from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.errors import CkptsyncError, Corrupt, StoreError
from ckptsync.head.consolidate import HeadOptions, tick
from ckptsync.head.deciding import RETRY, RETRY_PERMANENT, failed, is_due, task
from ckptsync.records.report import Finding, Kind
from ckptsync.records.state import Facet, Snapshot
from ckptsync.stores.memory import MemoryStore
from tests.filled import put, report_on, two_nodes

HERE = ("run", "checkpoint-4")


def sealed(*findings: Finding) -> Snapshot:
    store = MemoryStore()
    two_nodes(store)
    tick(store, HeadOptions(), 0.0)
    snapshot = tick(store, HeadOptions(), 0.0).catalogue.readable[0]
    if findings:
        put(store, report_on(snapshot, 0, "damaged", findings))
    return tick(store, HeadOptions(), 0.0).catalogue.readable[0]


def test_what_is_sealed_may_still_lack_configuration() -> None:
    assert task(sealed()).deed == "complete"


def test_what_cannot_be_told_apart_or_is_given_up_is_left_alone() -> None:
    snapshot = sealed()
    for facets in (replace(snapshot.facets, ambiguous="two saves"), replace(snapshot.facets, retired="old")):
        assert task(replace(snapshot, facets=facets)).deed == "nothing"
        assert task(replace(snapshot, facets=facets, seal=None)).deed == "nothing"


def test_a_model_whose_shards_were_let_go_is_looked_after_and_gets_nothing_added() -> None:
    snapshot = sealed()
    assert task(replace(snapshot, facets=replace(snapshot.facets, shards="old"))).deed == "nothing"


def test_without_a_seal_completeness_decides() -> None:
    snapshot = replace(sealed(), seal=None)
    assert task(snapshot).deed == "consolidate"
    assert task(replace(snapshot, facets=replace(snapshot.facets, model=Facet(holds=False)))).deed == "nothing"


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
def test_only_damage_to_what_the_seal_binds_is_mended(kind: Kind, name: str, deed: str) -> None:
    assert task(sealed(Finding(kind, name, ""))).deed == deed


@pytest.mark.parametrize(("error", "wait"), [(StoreError("x"), RETRY), (Corrupt("x"), RETRY_PERMANENT)])
def test_an_error_waits_as_long_as_it_is_likely_to_last(error: CkptsyncError, wait: float) -> None:
    snapshot = sealed()
    failures = {HERE: failed(error, snapshot, 100.0)}
    assert not is_due(snapshot, failures, 99.0 + wait)
    assert is_due(snapshot, failures, 100.0 + wait)


def test_a_change_makes_a_failed_place_due() -> None:
    snapshot = sealed()
    failures = {HERE: failed(Corrupt("x"), snapshot, 0.0)}
    assert is_due(replace(snapshot, manifests=snapshot.manifests[:1]), failures, 0.0)
    assert is_due(replace(snapshot, place="checkpoint-5"), failures, 0.0)
