"""The worker of one output directory: `scan` pins and judges saves, `plan` decides what is sent.

Scans must go on while the store does not answer, and uploads take hours.  So three kinds of threads
share one table of saves: one scans, one plans (it queues uploads and repairs and cleans up), and
the queues' threads call `Worker._carry_out` for one save each.  `result` returns what became of
each save.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.records import manifest_groups
from ckptsync.records.manifest import Manifest
from ckptsync.records.progress import Progress, State
from ckptsync.records.upload_decision import is_early, list_doubtful_names
from ckptsync.spool.pins import clean_own, drop, mark_stored, replace_links
from ckptsync.stores.contract import Store
from ckptsync.walk import walk
from ckptsync.worker.cleanup import UploadedFiles, clean_up
from ckptsync.worker.finished import Rule
from ckptsync.worker.local_save import (
    AGAIN,
    Changed,
    Key,
    LocalFile,
    LocalFiles,
    LocalSave,
    ReadFiles,
    notes_at_sending,
)
from ckptsync.worker.model_configs import (
    configs_to_send,
    drop_young,
    outgoing_save,
    send_missing_config,
)
from ckptsync.worker.node_identity import Clock
from ckptsync.worker.options import WorkerOptions, checked_options
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.queue import (
    PendingSave,
    QueueCapacity,
    UploadJob,
    UploadQueues,
    order_saves,
    split_threads,
)
from ckptsync.worker.repair import FileRepairs
from ckptsync.worker.results import (
    Failure,
    Phase,
    UploadProgress,
    WorkerResult,
    describe_failure,
)
from ckptsync.worker.save_state import (
    DONE,
    SaveState,
    begin_upload,
    mark_lost,
    mark_queued,
    postpone,
    record_outcome,
    update_scanned,
)
from ckptsync.worker.scanner import STORED, Scan, ScannedSave, Scanner, write_save_notes
from ckptsync.worker.spool_room import SpoolRule, held_bytes
from ckptsync.worker.store_view import Done, StoreView
from ckptsync.worker.upload import UploadContext, correct_location, send_save, sent_progress
from ckptsync.worker.upload_sources import Transfer

T = TypeVar("T")
DOUBTFUL = 10  # times `unmarked`
NOTES = 10  # of saves that were missed; the log has them all
UNREAD = "the store's records cannot be read now"


class SaveTable:
    """The state of each save on this node.  Thread-safe."""

    def __init__(self) -> None:
        """Begin with an empty table."""
        self._lock = threading.Lock()
        self._states: dict[Key, SaveState] = {}

    def states(self) -> tuple[SaveState, ...]:
        """Return the states of the last plan's saves in its order, then those of removed saves."""
        with self._lock:
            return tuple(self._states.values())

    def get(self, key: Key) -> SaveState | None:
        """Return a save's state, or None if no plan has seen it."""
        with self._lock:
            return self._states.get(key)

    def update(self, scanned_saves: Sequence[ScannedSave]) -> list[SaveState]:
        """Replace the table by the saves of a plan; return the due ones that have disappeared.

        Those stay in the table, so that their loss can be reported; all others that are gone are
        forgotten.
        """
        with self._lock:
            before = self._states
            self._states = {
                scanned.key: update_scanned(before.get(scanned.key), scanned)
                for scanned in scanned_saves
            }
            removed = [s for key, s in before.items() if s.is_due and key not in self._states]
            self._states |= {s.key: s for s in removed}
            return removed

    def change(self, key: Key, transition: Callable[[SaveState], SaveState]) -> None:
        """Replace a save's state by ``transition`` of it; do nothing if it has none."""
        with self._lock:
            if key in self._states:
                self._states[key] = transition(self._states[key])

    def forget(self, key: Key) -> None:
        """Remove a save from the table, if it is there."""
        with self._lock:
            self._states.pop(key, None)


class Worker:
    """Scans an output directory, and plans the uploads and repairs that `queues` carry out.

    It may be killed at any moment: what it remembers only saves time.  Any thread may call `scan`,
    which never reads the store, also during a call of the rest, which is for one thread.
    ``saves``: the state of each save.  ``notes``: losses that an operator should still see.  Raises
    ConfigError if the run and the store lie in each other.
    """

    def __init__(
        self, options: WorkerOptions, store: Store, queues: UploadQueues | None = None
    ) -> None:
        """Finish or remove what a killed worker of this node left in the spool.

        ``queues``: made of ``options.threads`` if None.  Raises as `checked_options`, and
        ConfigError or StoreError where the disk refuses.
        """
        self._options, node = checked_options(options, store.url), options.node
        self._run = options.run
        self.queues = queues or UploadQueues(options.threads)
        self._clock = Clock(store, node)
        self._view = StoreView(
            store, node, options.run.name, options.selection, lambda: self._clock.last
        )
        self.saves = SaveTable()
        self.notes: tuple[str, ...] = ()
        self._sent: deque[UploadProgress] = deque()  # uploads that nobody has taken yet
        self._transfers: dict[Key, Transfer] = {}  # of the saves that are being sent
        # of the last plan
        self._cleaned: Sequence[UploadProgress] = ()
        self._failures: Sequence[Failure] = ()
        self._failed_since: dict[tuple[str, str, str], float] = {}
        pinner = Pinner(
            node, self._view.is_proven, SpoolRule(options.spool_budget, options.spool_full)
        )
        rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
        self._scanner = Scanner(
            options.run,
            pinner,
            rule,
            self._view.is_done,
            self._view.has_other_part,
            is_planned=self._is_planned,
            store=store.url,
        )
        self._repairs = FileRepairs(options.run, self._view, self.queues)
        self._uploaded = UploadedFiles(self.queues.give_way)
        clean_own(options.run.path, node)

    @property
    def queue_keys(self) -> tuple[object, ...]:
        """Return the two keys under which its jobs wait in the queues: uploads, and repairs."""
        return self, self._repairs

    @property
    def is_done(self) -> bool:
        """Return whether no save is due: none waits for its upload, or for the next try.

        A due save that was removed counts until the next plan finds it stored or lost.
        """
        return not any(save.is_due for save in self.saves.states())

    def scan(self, now: float) -> Scan:
        """Pin the files that have appeared, judge each save, and return the scan with ``notes``.

        ``now``: seconds on any clock that only grows.  If the wall clock was set since the last
        scan, its offset is measured again before the next upload.
        """
        self._clock.notice(now)
        scan = self._scanner.scan(now)
        return replace(scan, notes=(*scan.notes, *self.notes))

    def pinned_bytes(self) -> int:
        """Return the bytes of the files that, at the last scan, had no names but those of pins."""
        return held_bytes(
            [
                scanned.local_save.pin
                for scanned in self._scanner.saves()
                if scanned.local_save.pin is not None
            ]
        )

    def plan(self, now: float) -> None:
        """Queue the uploads of finished saves and the repairs; remove what is not needed any more.

        It goes by the last scan, and makes one if there was none.  It reads the store's records,
        writes this node's damaged manifests again, and measures the clock where that is due.
        Without the records nothing is queued and nothing removed.  Errors are in the `result`,
        and one checkpoint's error holds up no other.
        """
        last_scan = self._scanner.last or self.scan(now)
        failures, is_ready = list(last_scan.failures), False
        cleaned: Sequence[UploadProgress] = ()
        scanned_saves = self._scanner.saves()
        try:
            self._view.refresh()
            failures += self._repairs.repair_manifests()
            is_ready = True
        except CkptsyncError as e:
            failures.append(describe_failure(self._run.name, "", e))
        self._plan_uploads(scanned_saves, is_ready=is_ready)
        self._forget_digests(scanned_saves)
        self._repairs.plan([scanned.local_save for scanned in scanned_saves] if is_ready else None)
        if is_ready:
            # a scan during the refresh may have failed
            checkpoints = {f.checkpoint for f in last_scan.failures}
            checkpoints |= {scanned.local_save.checkpoint for scanned in scanned_saves}
            cleaned, unremovable = clean_up(
                checkpoints, self._options, self._view, self._scanner, self._uploaded
            )
            failures += unremovable
        self._cleaned, self._failures = cleaned, failures
        progress = [*(save.progress for save in self.saves.states()), *cleaned]
        self._clock.measure_in_time(
            is_idle=bool(progress) and all(p.phase in DONE for p in progress)
        )

    def result(self) -> WorkerResult:
        """Return the progress, repairs and failures of all that the last plan saw, as of now."""
        saves = self.saves.states()
        failed = [save.failure for save in saves if save.failure is not None]
        repairs, unrepaired = self._repairs.result()
        return WorkerResult(
            self._options.node,
            (*(save.progress for save in saves), *self._cleaned),
            tuple(repairs),
            (*self._failures, *unrepaired, *failed),
            lacks=self._repairs.lacking(),
        )

    def running(self, offset: float) -> list[Progress]:
        """Return the progress of saves that the store does not have yet, and of repairs.

        Failures of a checkpoint are among them, with the time at which a call first saw each, which
        is remembered; failures of the whole run are not.  ``offset``: seconds from the scans' clock
        to the epoch's.  Any thread may call it.
        """
        scan = self._scanner.last
        failures = (*(scan.failures if scan else ()), *self._failures)
        now, before = time.time(), self._failed_since
        keys = [(f.run, f.checkpoint, f.error) for f in failures]
        self._failed_since = since = {key: before.get(key, now) for key in keys}
        wrong = [
            Progress(
                kind="upload",
                state="refused" if f.is_lasting else "failed",
                run=f.run,
                checkpoint=f.checkpoint,
                reason=f.text,
                hint=f.hint,
                since=since[f.run, f.checkpoint, f.error],
            )
            for f in failures
            if f.checkpoint
        ]
        saves = (self._running(scanned, offset) for scanned in self._scanner.saves())
        return [
            *(p for p in saves if p is not None),
            *wrong,
            *self._repairs.running(time.time() - time.monotonic()),
        ]

    def _running(self, scanned: ScannedSave, offset: float) -> Progress | None:
        """Return the progress of a scanned save.

        None if the store has it, if it is not to be stored (`refused` without a failure), if it has
        finished and no plan has seen it, or if its training may go on after this final model.
        """
        save, verdict = self.saves.get(scanned.key), scanned.verdict
        is_unplanned = save is None or (save.state in ("seen", "waiting") and not save.is_due)
        if verdict.reason == STORED:
            return None
        progress = Progress(
            kind="upload",
            state="waiting",
            run=scanned.local_save.run,
            checkpoint=scanned.local_save.checkpoint,
            since=max(0.0, scanned.first + offset),
            total=sum(stat.size for stat in scanned.local_save.files.stats),
        )
        if is_unplanned and not verdict.finished:
            if scanned.observation is not None and scanned.observation.unended is not None:
                return None  # perhaps the final model: nothing is due as long as the training runs
            remaining = verdict.remaining
            until = (
                None
                if remaining is None
                else max(0.0, self._scanner.judged_at + remaining + offset)
            )
            reason = verdict.reason.partition("; finished if")[0]
            return replace(progress, reason=reason, until=until)
        if save is None or save.state == "stored":
            return None
        if save.failure is not None:
            state: State = "refused" if save.failure.is_lasting else "failed"
            text, hint = save.failure.text, save.failure.hint
            return replace(progress, state=state, reason=text, hint=hint)
        if save.state == "refused":
            return None
        transfer = self._transfers.get(scanned.key)
        if save.state == "uploading" and transfer is not None:
            total = transfer.total or progress.total
            return replace(progress, state="uploading", done=transfer.done, total=total)
        state = "queued" if save.state == "queued" else "waiting"
        return replace(progress, state=state, reason=save.outcome.detail)

    def take_sent(self) -> list[UploadProgress]:
        """Remove and return the uploads that ended in the store since the last call.

        `result` has them only until the next plan, which finds them stored.
        """
        return [self._sent.popleft() for _ in range(len(self._sent))]

    def _is_planned(self, scanned: ScannedSave) -> bool:
        """Return whether a plan has seen this save finished, with the same files."""
        save = self.saves.get(scanned.key)
        return save is not None and save.is_planned(scanned)

    def _forget_digests(self, scanned_saves: Sequence[ScannedSave]) -> None:
        """Remove the digests of checkpoints that are not here any more."""
        digests = self._view.known_digests
        for name in set(digests) - {scanned.local_save.checkpoint for scanned in scanned_saves}:
            digests.pop(name, None)

    # What is decided in the plan's thread.

    def _plan_uploads(self, scanned_saves: Sequence[ScannedSave], *, is_ready: bool) -> None:
        """Replace the last plan's jobs: record what each save waits for, and queue the due ones.

        ``is_ready``: the store's records have just been read; otherwise nothing is queued, and due
        saves are postponed.  A save that a queue's thread is sending is left to that thread, and
        other saves of its name wait.  Superseded saves are dropped, and lost ones noted.
        """
        jobs = self.queues.withdraw(self)
        in_hand, names = {job.save for job in jobs}, {job.name for job in jobs}
        removed = self.saves.update(scanned_saves)
        due_saves: list[ScannedSave] = []
        for scanned in scanned_saves:
            if scanned.key in in_hand:
                due_saves.append(scanned)
                continue
            is_free = is_ready and scanned.key[:2] not in names
            outcome = _catch_errors(scanned, partial(self._finish_or_wait, is_free=is_free))
            if outcome is None:
                due_saves.append(scanned)
                continue
            self.saves.change(scanned.key, partial(record_outcome, outcome=outcome))
        self._find_lost(removed, scanned_saves, in_hand, is_ready=is_ready)
        if not is_ready:
            for scanned in due_saves:
                if scanned.key not in in_hand:
                    self.saves.change(scanned.key, partial(postpone, reason=UNREAD))
            self.queues.post(self, [])
            return
        pending_saves = [
            self._pending_save(scanned, is_in_hand=scanned.key in in_hand) for scanned in due_saves
        ]
        ordered, dropped = order_saves(pending_saves, self._options.order, self._options.superseded)
        for scanned in dropped:
            outcome = _catch_errors(scanned, self._drop_superseded)
            self.saves.change(scanned.key, partial(record_outcome, outcome=outcome))
        ordered = [scanned for scanned in ordered if scanned.key not in in_hand]
        for scanned in ordered:
            self.saves.change(scanned.key, mark_queued)
        self.queues.post(self, [self._upload_job(scanned) for scanned in ordered])

    def _pending_save(self, scanned: ScannedSave, *, is_in_hand: bool) -> PendingSave[ScannedSave]:
        """Return a save with what `queue.order_saves` goes by.

        It is begun if it is in hand, or if the store has a part of it (`StoreView.is_begun`).
        """
        local_save = scanned.local_save
        written = max((s.mtime for s in local_save.files.stats), default=0)
        age = (scanned.first, local_save.checkpoint_dir.step or 0, local_save.k)
        return PendingSave(
            scanned, local_save.run, age, written, is_in_hand or self._view.is_begun(local_save)
        )

    def _upload_job(self, scanned: ScannedSave) -> UploadJob:
        """Return the job that uploads a save."""
        size = sum(stat.size for stat in scanned.local_save.files.stats)
        return UploadJob(scanned.key, scanned.key[:2], size, partial(self._carry_out, scanned))

    def _finish_or_wait(self, scanned: ScannedSave, *, is_free: bool) -> UploadProgress | None:
        """Return why a save is not uploaded now, or None if it is to be queued.

        A save waits until it is finished and its pin has an owner.  A stored save's pin is marked,
        and its missing configuration sent; if it must move within the store, it is queued.  A lost
        save's pin is deleted, and the loss noted.  ``is_free``: the records were read, and no save
        of this name is being sent; otherwise nothing is changed.  Raises the error of a location
        whose records cannot be read, and errors of sending.
        """
        local_save, done_reason = scanned.local_save, self._view.why_done(scanned.local_save)
        if not is_free:
            return (
                _done_progress(local_save, done_reason)
                if done_reason
                else _waiting_progress(scanned)
            )
        broken = self._view.run_records.broken_location(local_save.checkpoint)
        if broken is not None:
            raise broken
        if local_save.pin is not None and not local_save.pin.node:
            return _make_progress(scanned, "waiting", "no node owns its pin yet")
        if done_reason is not None:
            done: UploadProgress | None = _done_progress(local_save, done_reason)
            if done_reason.phase == "stored" and done_reason.manifest is not None:
                done = self._complete_stored(scanned, done_reason.manifest)
            if done is not None:
                _mark_stored(local_save, done)
            return done
        if scanned.is_lost and local_save.pin is not None:
            drop(local_save.pin, self._scanner.lock)
            why = "deleted or abandoned by the trainer before the worker knew that it was complete"
            self._add_note(scanned, "missed", why)
            return _make_progress(scanned, "missed", why)
        return _waiting_progress(scanned)

    def _complete_stored(
        self, scanned: ScannedSave, own_manifest: Manifest
    ) -> UploadProgress | None:
        """Send a stored save's configuration if the store has none; return the save's progress.

        Return None, and send nothing, if the save, or some of its files, must move within the
        store.  While it is not proven yet that the save must move, it counts as stored.
        """
        local_save, node, location = scanned.local_save, self._options.node, own_manifest.location
        stored = _done_progress(local_save, self._view.done_by(own_manifest))
        reading = self._view.run_records.reading(
            node, local_save.run, local_save.checkpoint, time.time_ns()
        )
        manifests = reading.manifests
        if manifest_groups.better_location(node, location, manifests) != location:
            return stored if is_early(own_manifest, reading) else None
        save, is_exclusive = self.saves.get(scanned.key), self._view.store.is_exclusive
        if (save is None or save.placed_by != frozenset(stored.name for stored in manifests)) and (
            list_doubtful_names(node, location, manifests, is_exclusive=is_exclusive)
        ):
            return None
        context = self._upload_context(local_save, split_threads(self._options.threads)[-1])
        if sent_configs := send_missing_config(local_save, location, context, manifests):
            return _done_progress(
                local_save, Done("sent", f"sent {', '.join(sent_configs)}", own_manifest)
            )
        return stored

    def _correct_stored(
        self, local_save: LocalSave, own_manifest: Manifest, capacity: QueueCapacity
    ) -> UploadProgress:
        """Move a stored save to the location where it belongs; return that it is stored there.

        Remembers in the table of which manifests this was decided.  Raises what
        `upload.correct_location` raises.
        """
        names = frozenset(
            stored.name for stored in self._view.run_records.manifests(local_save.checkpoint)
        )
        files = outgoing_save(local_save, self._view.selection).files
        context = self._upload_context(local_save, capacity)
        location = correct_location(self._options.node, own_manifest.location, files, context)
        self.saves.change(local_save.key, partial(replace, placed_by=names))
        return _done_progress(
            local_save, self._view.done_by(replace(own_manifest, location=location))
        )

    def _drop_superseded(self, scanned: ScannedSave) -> UploadProgress:
        """Delete the pin of a save that is not sent, if the trainer has removed the checkpoint.

        Return its progress, phase ``superseded``.
        """
        if scanned.local_save.pin is not None and scanned.local_save.files.is_gone:
            drop(scanned.local_save.pin, self._scanner.lock)
        return _make_progress(
            scanned, "superseded", "a newer checkpoint replaced it before the upload"
        )

    def _find_lost(
        self,
        removed: Sequence[SaveState],
        scanned_saves: Sequence[ScannedSave],
        in_hand: Collection[object],
        *,
        is_ready: bool,
    ) -> None:
        """Mark due saves whose files are gone without being stored as lost; note each once.

        A save that the store has, or whose name the scan saw with another pin, is forgotten without
        a note.  ``removed``: due saves that the last scan did not see.  One that is being sent
        waits for its end, and unless ``is_ready`` all wait whose names the scan did not see.
        """
        names_here = {scanned.key[:2] for scanned in scanned_saves}
        why = "its files were removed before all of them were stored"
        for save in removed:
            is_scanned = save.key[:2] in names_here
            if not is_scanned and (save.key in in_hand or not is_ready):
                continue
            if is_scanned or self._view.is_done(save.scanned.local_save):
                self.saves.forget(save.key)
            else:
                self.saves.change(save.key, partial(mark_lost, reason=why))
                self._add_note(save.scanned, "lost", why)

    def _add_note(self, scanned: ScannedSave, phase: str, why: str) -> None:
        """Add a line to the notes, of which the last ten stay."""
        note = f"{phase} {scanned.local_save.run}/{scanned.local_save.checkpoint}: {why}"
        self.notes = (*self.notes, note)[-NOTES:]

    # What happens in a queue's thread.

    def _carry_out(self, scanned: ScannedSave, capacity: QueueCapacity) -> None:
        """Upload a save, and record the outcome, or the error, in the table.

        A save that was sent is also remembered for `take_sent`.  With ``order`` newest it is
        postponed, and not sent, if another save has finished that no plan has seen.
        """
        if self._options.order == "newest" and any(
            newer.verdict.finished and self.saves.get(newer.key) is None
            for newer in self._scanner.saves()
        ):
            # it has finished since the plan
            self.saves.change(scanned.key, partial(postpone, reason="a newer one goes first"))
            return
        self._transfers[scanned.key] = Transfer(0)
        self.saves.change(scanned.key, begin_upload)
        outcome = _catch_errors(scanned, partial(self._upload, capacity=capacity))
        self._transfers.pop(scanned.key, None)
        self.saves.change(scanned.key, partial(record_outcome, outcome=outcome))
        if isinstance(outcome, UploadProgress) and outcome.phase == "sent":
            self._sent.append(outcome)

    def _upload(self, scanned: ScannedSave, capacity: QueueCapacity) -> UploadProgress:
        """Upload a save, or move it if it is stored; return its progress.

        Phase ``waiting``, and nothing is sent, if it has changed since the plan, or is not finished
        any more.  If a manifest already has all of it, only its digests are remembered.  The pin's
        links become reflinks, and it gets the time of sending and the stored mark.  Measures the
        clock if that is due.  Raises Changed if bytes are others by now, and forgets what was read;
        Incomplete, Corrupt, Unsupported, StoreError.
        """
        done = self._view.why_done(scanned.local_save)
        if done is not None and done.phase == "stored" and done.manifest is not None:
            progress = self._correct_stored(scanned.local_save, done.manifest, capacity)
            _mark_stored(scanned.local_save, progress)
            return progress
        latest = self._scanner.latest(scanned.key)
        if latest is None or latest.since != scanned.since:
            return _make_progress(scanned, "waiting", "it changed while others were sent")
        if not latest.verdict.finished:
            return _make_progress(scanned, "waiting", latest.verdict.reason)
        local_save = latest.local_save
        pin_notes = notes_at_sending(
            local_save, time.time_ns(), latest.observation.save if latest.observation else ""
        )
        if local_save.pin is not None and pin_notes != local_save.pin.notes:
            with contextlib.suppress(StoreError):  # a full disk: it is sent all the same
                local_save = write_save_notes(local_save, pin_notes)
        outgoing, read_files = self._outgoing(local_save)
        context = self._upload_context(local_save, capacity)
        self._clock.measure()  # so that `StoreView.offset` is at most an hour old
        try:
            result = send_save(outgoing, pin_notes, context, read_files)
        except Changed:
            # the bytes may have changed and the times not: what was read is worth nothing
            read_files.entries.clear()
            raise
        if result.stored_before is None:
            self._uploaded.note(local_save.checkpoint, outgoing.files.stats)
            progress = sent_progress(outgoing, result)
            progress = replace(progress, notes=(*progress.notes, *outgoing.files.unpinned_warning))
        else:
            self._view.remember(
                local_save.checkpoint,
                {(f.path, f.size, f.mtime): f.digest for f in read_files.entries.values()},
            )
            progress = _done_progress(outgoing, self._view.done_by(result.stored_before))
        _mark_stored(local_save, progress)
        return progress

    def _outgoing(self, local_save: LocalSave) -> tuple[LocalSave, ReadFiles]:
        """Return the files to send of a save, and what an earlier try read of these very files.

        If no try has read them, the pin's links are replaced by reflinks first.  Both are
        remembered in the table.  Raises Incomplete if the save changes meanwhile.
        """
        manifests = self._view.run_records.manifests(local_save.checkpoint)

        def find_configs(files: LocalFiles) -> Mapping[str, LocalFile]:
            """Return the configuration files that may be sent with the save."""
            return drop_young(
                configs_to_send(files, local_save.checkpoint_dir, self._options.node, manifests)
            )

        outgoing = outgoing_save(local_save, self._view.selection, find_configs)
        save = self.saves.get(local_save.key)
        stats_read, read_files = (save.stats_read, save.read_files) if save else (None, ReadFiles())
        if outgoing.files.stats != stats_read:
            # again, since hardening gives the files new inodes; an earlier try may have read these
            outgoing = outgoing_save(harden_save(local_save), self._view.selection, find_configs)
        stats = outgoing.files.stats
        if stats != stats_read:
            read_files = ReadFiles()
        self.saves.change(local_save.key, partial(replace, stats_read=stats, read_files=read_files))
        return outgoing, read_files

    def _upload_context(self, local_save: LocalSave, capacity: QueueCapacity) -> UploadContext:
        """Return where and how a queue's thread uploads a save."""
        return UploadContext(
            self._view,
            local_save.checkpoint,
            after_chunk=self.queues.give_way,
            threads=capacity.threads,
            small=capacity.small,
            may_wait=True,
            output_dir=self._run.path,
            transfer=self._transfers.get(local_save.key) or Transfer(0),
        )


def harden_save(local_save: LocalSave) -> LocalSave:
    """Replace the hard links of a save's pin by reflinks if possible.

    Return the save with new stats, or as it is without a pin.  Raises Incomplete unless the pin
    still holds the files of the scan, by size and mtime.
    """
    if local_save.pin is None:
        return local_save
    replace_links(local_save.pin)
    by_path = local_save.files.by_path
    pinned = {
        f.path: LocalFile(f, local_save.pin.root, is_pinned=True)
        for f in walk(local_save.pin.root).files
        if f.path in by_path
    }
    if _versions(pinned) != _versions(
        {path: file for path, file in by_path.items() if file.is_pinned}
    ):
        raise Incomplete(f"{local_save.checkpoint}: its pin changed", hint=AGAIN)
    return replace(local_save, files=replace(local_save.files, by_path=dict(by_path) | pinned))


def _versions(files: Mapping[str, LocalFile]) -> dict[str, tuple[int, int]]:
    """Return size and mtime of each file: a later write changes them, and a reflink does not."""
    return {path: (f.stat.size, f.stat.mtime) for path, f in files.items()}


def _mark_stored(local_save: LocalSave, progress: UploadProgress) -> None:
    """Mark the save's pin, if any, as stored if the store has it, for hooks; ignore errors."""
    if (
        local_save.pin is not None
        and progress.location
        and progress.phase in ("sent", "stored", "elsewhere")
    ):
        with contextlib.suppress(CkptsyncError):  # the next plan does it again
            mark_stored(local_save.pin)


def _waiting_progress(scanned: ScannedSave) -> UploadProgress | None:
    """Return what an unfinished save waits for, perhaps ``not-final``; None for a finished one."""
    if scanned.verdict.finished:
        return None
    is_unended = scanned.observation is not None and scanned.observation.unended is not None
    return _make_progress(scanned, "not-final" if is_unended else "waiting", scanned.verdict.reason)


def _make_progress(scanned: ScannedSave, phase: Phase, detail: str) -> UploadProgress:
    """Return the progress of a scanned save."""
    return UploadProgress(*scanned.key, phase, detail)


def _done_progress(local_save: LocalSave, done_reason: Done) -> UploadProgress:
    """Return the progress of a save for which nothing is left to do."""
    notes = (*local_save.files.notes, *local_save.files.unpinned_warning)
    location = done_reason.manifest.location if done_reason.manifest else ""
    return UploadProgress(
        *local_save.key, done_reason.phase, done_reason.detail, location, notes=notes
    )


def _catch_errors(
    scanned: ScannedSave, work: Callable[[ScannedSave], T]
) -> T | UploadProgress | Failure:
    """Return what ``work`` returns for a save, or its error as a value.

    Incomplete becomes phase ``waiting``, since the next scan may find the save complete; other
    errors of ckptsync become a Failure.
    """
    try:
        return work(scanned)
    except Incomplete as e:  # it changed, or others are at it: the next scan may find it quiet
        return _make_progress(scanned, "waiting", str(e))
    except CkptsyncError as e:
        return describe_failure(scanned.local_save.run, scanned.local_save.checkpoint, e)
