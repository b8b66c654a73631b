"""Every transition of a save's state, and that nothing else changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ckptsync.checkpoint_dirs import CheckpointDir
from ckptsync.errors import Corrupt, StoreError
from ckptsync.walk import Stat
from ckptsync.worker.finished import Judgement
from ckptsync.worker.local_save import LocalFile, LocalFiles, LocalSave
from ckptsync.worker.results import Phase, UploadProgress, describe_failure
from ckptsync.worker.save_state import (
    SaveState,
    State,
    begin_upload,
    mark_lost,
    mark_queued,
    postpone,
    record_outcome,
    update_scanned,
)
from ckptsync.worker.scanner import ScannedSave

KEY = ("run", "checkpoint-4", 0)
AWAY = describe_failure("run", "checkpoint-4", StoreError("away"))
BAD = describe_failure("run", "checkpoint-4", Corrupt("a name that no store can keep"))


def scanned(*, finished: bool = True, since: float = 5.0) -> ScannedSave:
    files = {"x": LocalFile(Stat("x", 100, 1, 1, 1), Path("/out"), is_pinned=False)}
    checkpoint_dir = CheckpointDir("checkpoint-4", "trainer", Path("/out/checkpoint-4"))
    local = LocalFiles("checkpoint-4", "trainer", files)
    verdict = Judgement(finished=finished, reason="it grows", remaining=None)
    return ScannedSave(LocalSave("run", checkpoint_dir, local, None), 3.0, since, (), verdict)


def ended(phase: Phase, detail: str = "") -> UploadProgress:
    return UploadProgress(*KEY, phase, detail)


SEEN = update_scanned(None, scanned())
QUEUED = mark_queued(SEEN)
UPLOADING = begin_upload(QUEUED)


def test_a_save_goes_from_seen_over_queued_and_uploading_to_stored() -> None:
    assert (SEEN.state, SEEN.progress) == ("seen", ended("waiting", "it grows"))
    assert (QUEUED.state, QUEUED.progress.detail) == ("queued", "others are sent first")
    assert QUEUED.is_due
    assert (UPLOADING.state, UPLOADING.progress.phase) == ("uploading", "sending")
    stored = record_outcome(UPLOADING, ended("sent"))
    assert (stored.state, stored.is_due) == ("stored", False)
    assert stored.progress == ended("sent")


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("waiting", "waiting"),
        ("not-final", "waiting"),
        ("sent", "stored"),
        ("stored", "stored"),
        ("elsewhere", "stored"),
        ("retired", "stored"),
        ("missed", "refused"),
        ("superseded", "refused"),
    ],
)
@pytest.mark.parametrize("before", [SEEN, QUEUED, UPLOADING, record_outcome(SEEN, AWAY)])
def test_the_end_of_a_plan_or_a_try_is_the_state(
    phase: Phase, state: State, before: SaveState
) -> None:
    save = record_outcome(before, ended(phase, "why"))
    assert (save.state, save.progress, save.failure) == (state, ended(phase, "why"), None)
    is_tried_in_vain = before.state == "uploading" and state != "stored"
    assert save.is_due == is_tried_in_vain


def test_a_failure_is_shown_until_another_try_has_ended_or_a_plan_decides_anew() -> None:
    failed = record_outcome(UPLOADING, AWAY)
    assert (failed.state, failed.is_due) == ("failed", True)
    again: list[Callable[[SaveState], SaveState]] = [
        mark_queued,
        partial(postpone, reason="the store is away"),
        begin_upload,
    ]
    for transition in again:
        failed = transition(failed)
        assert (failed.progress.phase, failed.progress.detail) == ("failed", "away")
        assert failed.failure == AWAY
    assert failed.state == "uploading"
    assert record_outcome(failed, ended("sent")).failure is None
    assert record_outcome(failed, ended("waiting", "it grows")).progress.phase == "waiting"


def test_what_no_later_try_mends_is_refused() -> None:
    assert record_outcome(UPLOADING, BAD).state == "refused"
    assert record_outcome(SEEN, BAD).is_due is False


def test_what_is_removed_before_it_is_stored_is_lost_whatever_failed_before() -> None:
    save = mark_lost(record_outcome(UPLOADING, AWAY), "its files were removed")
    assert (save.state, save.is_due, save.failure) == ("refused", False, None)
    assert save.progress == ended("lost", "its files were removed")


def test_a_new_scan_changes_nothing_but_what_was_scanned() -> None:
    memory = replace(UPLOADING, stats_read=(), placed_by=frozenset({"m"}))
    later = scanned(since=7.0)
    assert update_scanned(memory, later) == replace(memory, scanned=later)


def test_a_plan_has_seen_it_finished_unless_it_changed_since() -> None:
    assert SEEN.is_planned(scanned())
    assert not SEEN.is_planned(scanned(since=6.0))
    assert not update_scanned(None, scanned(finished=False)).is_planned(scanned())
