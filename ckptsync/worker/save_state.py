"""The state of one save on this node as one value, and the functions that change it.  Pure.

    seen -> waiting -> queued -> uploading -> stored
              ^ |        |          |
              | +--------+----------+-----> refused, failed

Scans, plans and uploads happen in different threads, so each transition is a function from the old
state to the new one.  A scan sees a save (`update_scanned`).  A plan decides that it waits, is
refused or is stored (`record_outcome`), or that it is to be uploaded (`mark_queued`, `postpone`). A
queue's thread begins it (`begin_upload`), and ends it (`record_outcome`).  A save that is removed
meanwhile is lost (`mark_lost`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptsync.walk import Stat
from ckptsync.worker.local_save import Key, ReadFiles
from ckptsync.worker.results import Failure, UploadProgress
from ckptsync.worker.scanner import ScannedSave

State = Literal["seen", "waiting", "queued", "uploading", "stored", "refused", "failed"]

DONE = ("stored", "elsewhere", "retired")
"""Phases of what the store had before."""
OTHERS = "others are sent first"


@dataclass(frozen=True, slots=True)
class SaveState:
    """One save: how the last plan saw it, and what became of it.

    ``outcome``: what the last plan or try made of it.  ``failure``: of the last try that ended.
    ``is_due``: a plan has decided to upload it, and it is not stored yet.

    For later tries: ``read_files``, what an earlier try read of files with ``stats_read``;
    ``placed_by``, the manifests that were known when the save was last seen in its right location.
    """

    scanned: ScannedSave
    outcome: UploadProgress
    state: State = "seen"
    failure: Failure | None = None
    is_due: bool = False
    read_files: ReadFiles = field(default_factory=ReadFiles)
    stats_read: Sequence[Stat] | None = None
    placed_by: frozenset[str] | None = None

    @property
    def key(self) -> Key:
        """Return what names the save on this node."""
        return self.scanned.key

    @property
    def progress(self) -> UploadProgress:
        """Return the outcome of the last try, with phase ``failed`` if it has failed."""
        if self.failure is not None:
            return UploadProgress(*self.key, "failed", self.failure.text)
        return self.outcome

    def is_planned(self, scanned: ScannedSave) -> bool:
        """Return whether a plan has seen the save finished, and unchanged since ``scanned``."""
        return self.scanned.verdict.finished and self.scanned.since == scanned.since


def update_scanned(before: SaveState | None, scanned: ScannedSave) -> SaveState:
    """Return the state with a new scan; a new save begins with phase ``waiting``."""
    if before is None:
        return SaveState(scanned, UploadProgress(*scanned.key, "waiting", scanned.verdict.reason))
    return replace(before, scanned=scanned)


def mark_queued(save: SaveState) -> SaveState:
    """Return the state of a due save that waits in a queue."""
    return replace(postpone(save, OTHERS), state="queued")


def postpone(save: SaveState, reason: str) -> SaveState:
    """Return the state of a due save that waits for the next plan; its last failure stays."""
    outcome = UploadProgress(*save.key, "waiting", reason)
    return replace(save, state="waiting", outcome=outcome, is_due=True)


def begin_upload(save: SaveState) -> SaveState:
    """Return the state of a save whose upload begins."""
    outcome = UploadProgress(*save.key, "sending", "")
    return replace(save, state="uploading", outcome=outcome)


def record_outcome(save: SaveState, outcome: UploadProgress | Failure) -> SaveState:
    """Return the state after a try to upload a save, or a plan, has ended with ``outcome``.

    After an upload that did not end in the store the save stays due: the next plan decides again.
    A failure leaves the last outcome as it was; any other outcome ends the last failure.
    """
    state = _state_after(outcome)
    is_due = save.state == "uploading" and state != "stored"
    save = replace(save, state=state, is_due=is_due)
    if isinstance(outcome, Failure):
        return replace(save, failure=outcome)
    return replace(save, outcome=outcome, failure=None)


def mark_lost(save: SaveState, reason: str) -> SaveState:
    """Return the state of a save whose files were removed before all of them were stored.

    It is ``refused`` with the outcome ``lost``, and not due.
    """
    outcome = UploadProgress(*save.key, "lost", reason)
    return replace(save, state="refused", outcome=outcome, failure=None, is_due=False)


def _state_after(outcome: UploadProgress | Failure) -> State:
    """Return the state that an outcome leads to.

    ``refused`` for a lasting failure and for phases that are neither stored nor waiting.
    """
    if isinstance(outcome, Failure):
        return "refused" if outcome.is_lasting else "failed"
    if outcome.phase in ("sent", *DONE):
        return "stored"
    return "waiting" if outcome.phase in ("waiting", "not-final") else "refused"
