from __future__ import annotations

import pytest

from ckptsync.catalogue.uncached import not_found, read_state
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.removal import keep, release
from ckptsync.head.retention_rules import Rules
from ckptsync.records.save_decisions import Stage
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import flip
from tests.support.retention_stores import FIRST, fill, manifest_name, mark

STAGES: tuple[Stage, ...] = ("begun", "withdrawn", "marked")
LAST = RetentionRequest(lambda _: Rules(keep_last=1), 99.0)
SHARDS = RetentionRequest(lambda _: Rules(shards=0), 0.0)


def filled() -> MemoryStore:
    store = MemoryStore()
    for n in (1, 2):
        fill(store, f"checkpoint-{n}", FIRST + n * 3600)
    return store


def word(store: MemoryStore) -> str:
    seen = read_state(store).of("run", "checkpoint-1")
    assert seen is not None
    return seen.status


def test_what_is_kept_is_not_marked_and_what_is_released_is() -> None:
    store = filled()
    assert keep(store, "run", "checkpoint-1", "for the paper")
    assert not keep(store, "run", "checkpoint-1")
    assert apply_retention(store, LAST).done == ()
    assert release(store, "run", "checkpoint-1")
    assert not release(store, "run", "checkpoint-1")
    assert [d.result for d in apply_retention(store, LAST).done] == ["marked"]


def test_what_has_lost_a_file_and_was_only_marked_is_kept() -> None:
    store = filled()
    apply_retention(store, LAST)
    store.delete("run/consolidated/checkpoint-1/model.safetensors")
    assert keep(store, "run", "checkpoint-1")
    assert word(store) == "COMPLETE"
    assert not keep(store, "run", "checkpoint-1")


def test_what_a_removal_has_taken_a_file_of_is_not_promised() -> None:
    store = filled()
    apply_retention(store, LAST)
    for stage in STAGES:
        mark(store, "checkpoint-1", stage)
    store.delete("run/checkpoint-1/a.bin")
    with pytest.raises(Incomplete, match="it may still be deleted"):
        keep(store, "run", "checkpoint-1")


def test_a_model_whose_shards_have_gone_may_still_be_kept() -> None:
    store = filled()
    for _ in range(2):
        apply_retention(store, SHARDS)
    mark(store, "checkpoint-1")
    store.delete("run/consolidated/checkpoint-1/model.safetensors")
    assert keep(store, "run", "checkpoint-1"), "no removal of the location has deleted it"
    assert word(store) == "COMPLETE"


def test_shards_that_were_only_marked_are_kept() -> None:
    store = filled()
    mark(store, "checkpoint-1", scope="shards")
    assert keep(store, "run", "checkpoint-1")
    kept = read_state(store).of("run", "checkpoint-1")
    assert kept
    assert kept.conditions.shards == ""


def test_there_is_nothing_to_keep_where_nothing_is() -> None:
    with pytest.raises(ConfigError, match="checkpoint 'checkpoint-9' not found in run 'run'"):
        keep(filled(), "run", "checkpoint-9")


def test_what_was_deleted_is_not_proposed_instead_of_itself() -> None:
    store = filled()
    for _ in range(2):
        apply_retention(store, RetentionRequest(lambda _: Rules(keep_last=1), 0.0))
    with pytest.raises(ConfigError, match="'checkpoint-1' of run 'run' was deleted from") as caught:
        keep(store, "run", "checkpoint-1")
    assert "'checkpoint-1'" not in caught.value.hint
    with pytest.raises(ConfigError, match="not found in run 'run'") as caught:
        keep(store, "run", "checkpoint-11")
    assert "'checkpoint-1'" not in caught.value.hint
    error = not_found(store, "run")
    assert ("any more" in str(error), "'run'" in error.hint) == (True, False)


@pytest.mark.parametrize("kind", ["report", "model"])
def test_what_is_made_anew_keeps_nobody_from_keeping(kind: str) -> None:
    store = filled()
    flip(
        store,
        next(e.name for e in store.names("run/.ckptsync/checkpoint-1/") if f"/{kind}-" in e.name),
    )
    assert keep(store, "run", "checkpoint-1")
    assert release(store, "run", "checkpoint-1")
    flip(store, manifest_name(store, "checkpoint-1"))
    with pytest.raises(Corrupt, match="manifest-n0"):
        keep(store, "run", "checkpoint-1")
