"""The worker of one output directory: `scan` pins and judges saves, `plan` says what is sent.

`plan` queues uploads and repairs by what the last scan found, and cleans up; a queue's thread calls
`Worker._carry_out` for one save.  `result` returns what was seen and done.
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
    outgoing_save,
    send_missing_config,
    unless_young,
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
    begin,
    lose,
    postpone,
    queue,
    see,
    settle,
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
    """The state of each save on this node.  Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[Key, SaveState] = {}

    def states(self) -> tuple[SaveState, ...]:
        """Return all of them: those of the last plan in its order, then those that were removed."""
        with self._lock:
            return tuple(self._states.values())

    def get(self, key: Key) -> SaveState | None:
        """Return one; ``None`` if no plan has seen it."""
        with self._lock:
            return self._states.get(key)

    def see(self, scanned: Sequence[ScannedSave]) -> list[SaveState]:
        """Put in what a plan sees, and forget all else but what was to be uploaded.

        Return that.
        """
        with self._lock:
            before = self._states
            self._states = {one.key: see(before.get(one.key), one) for one in scanned}
            removed = [s for key, s in before.items() if s.is_due and key not in self._states]
            self._states |= {s.key: s for s in removed}
            return removed

    def change(self, key: Key, transition: Callable[[SaveState], SaveState]) -> None:
        """Change a save's state, if it has one."""
        with self._lock:
            if key in self._states:
                self._states[key] = transition(self._states[key])

    def forget(self, key: Key) -> None:
        """Forget a save."""
        with self._lock:
            self._states.pop(key, None)


class Worker:
    """Scans an output directory, and plans the uploads and repairs that `queues` carry out.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.
    `scan` is for any thread, and never reads the store; the rest is for one thread, and others may
    scan meanwhile.  ``saves``: where each stands.  ``notes``: what an operator should see though it
    is over.  Raises ConfigError where the run and the store lie in each other.
    """

    def __init__(
        self, options: WorkerOptions, store: Store, queues: UploadQueues | None = None
    ) -> None:
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
        # of the last plan
        self._transfers: dict[Key, Transfer] = {}  # of the saves that are being sent
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
        """The keys under which its jobs wait in the queues."""
        return self, self._repairs

    @property
    def is_done(self) -> bool:
        """Whether it has nothing to send, nor to report of what it had."""
        return not any(save.is_due for save in self.saves.states())

    def scan(self, now: float) -> Scan:
        """Pin what has appeared, and judge it.  ``now`` in seconds on any clock that only grows."""
        self._clock.notice(now)
        scan = self._scanner.scan(now)
        return replace(scan, notes=(*scan.notes, *self.notes))

    def pinned_bytes(self) -> int:
        """Return the bytes of files that had no names but our pins' at the last scan."""
        return held_bytes(
            [one.seen.pin for one in self._scanner.saves() if one.seen.pin is not None]
        )

    def plan(self, now: float) -> None:
        """Queue what the last scan found finished, and remove what is not needed.

        Errors are in the result: one checkpoint's never keep another back.
        """
        last_scan = self._scanner.last or self.scan(now)
        failures, is_ready = list(last_scan.failures), False
        cleaned: Sequence[UploadProgress] = ()
        scanned = self._scanner.saves()
        try:
            self._view.refresh()
            failures += self._repairs.repair_manifests()
            is_ready = True
        except CkptsyncError as e:
            failures.append(describe_failure(self._run.name, "", e))
        self._plan_uploads(scanned, is_ready=is_ready)
        self._forget_digests(scanned)
        self._repairs.plan([one.seen for one in scanned] if is_ready else None)
        if is_ready:
            # a scan during the refresh may have failed
            here = {f.checkpoint for f in last_scan.failures}
            here |= {one.seen.checkpoint for one in scanned}
            cleaned, stuck = clean_up(
                here, self._options, self._view, self._scanner, self._uploaded
            )
            failures += stuck
        self._cleaned, self._failures = cleaned, failures
        progress = [*(save.progress for save in self.saves.states()), *cleaned]
        self._clock.measure_in_time(
            is_idle=bool(progress) and all(p.phase in DONE for p in progress)
        )

    def result(self) -> WorkerResult:
        """Return what became by now of all that the last plan saw."""
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
        """Return each save that is here, and that the store does not have whole, by the last scan.

        ``offset`` leads from the scans' clock to seconds since the epoch.  Any thread may ask.
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
        saves = (self._running(one, offset) for one in self._scanner.saves())
        return [
            *(p for p in saves if p is not None),
            *wrong,
            *self._repairs.running(time.time() - time.monotonic()),
        ]

    def _running(self, one: ScannedSave, offset: float) -> Progress | None:
        """Return where a save stands that was scanned; None if the store has it, or will not."""
        save, verdict = self.saves.get(one.key), one.verdict
        is_seen = save is None or (save.state in ("seen", "waiting") and not save.is_due)
        if verdict.reason == STORED:
            return None
        progress = Progress(
            kind="upload",
            state="waiting",
            run=one.seen.run,
            checkpoint=one.seen.checkpoint,
            since=max(0.0, one.first + offset),
            total=sum(stat.size for stat in one.seen.files.stats),
        )
        if is_seen and not verdict.finished:
            if one.observation is not None and one.observation.unended is not None:
                return None  # perhaps the final model: nothing is due as long as the training runs
            left = verdict.left
            until = None if left is None else max(0.0, self._scanner.judged_at + left + offset)
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
        transfer = self._transfers.get(one.key)
        if save.state == "uploading" and transfer is not None:
            total = transfer.total or progress.total
            return replace(progress, state="uploading", done=transfer.done, total=total)
        state = "queued" if save.state == "queued" else "waiting"
        return replace(progress, state=state, reason=save.outcome.detail)

    def take_sent(self) -> list[UploadProgress]:
        """Return the uploads that ended in the store, and forget them: each is returned once.

        `result` has them only until the next plan, which finds them stored.
        """
        return [self._sent.popleft() for _ in range(len(self._sent))]

    def _is_planned(self, one: ScannedSave) -> bool:
        save = self.saves.get(one.key)
        return save is not None and save.is_planned(one)

    def _forget_digests(self, scanned: Sequence[ScannedSave]) -> None:
        """Forget the digests of checkpoints that are gone; queues write to them meanwhile."""
        digests = self._view.known_digests
        for name in set(digests) - {one.seen.checkpoint for one in scanned}:
            digests.pop(name, None)

    # What is decided in the plan's thread.

    def _plan_uploads(self, scanned: Sequence[ScannedSave], *, is_ready: bool) -> None:
        """Decide of each save, and queue what is due.

        ``is_ready``: the store's records were read just before; else all have to wait.  What is in
        hand is the queue's thread's to change.
        """
        jobs = self.queues.withdraw(self)
        in_hand, names = {job.save for job in jobs}, {job.name for job in jobs}
        removed = self.saves.see(scanned)
        due: list[ScannedSave] = []
        for one in scanned:
            if one.key in in_hand:
                due.append(one)
                continue
            is_free = is_ready and one.key[:2] not in names
            outcome = _attempt(one, partial(self._finish_or_wait, is_free=is_free))
            if outcome is None:
                due.append(one)
                continue
            self.saves.change(one.key, partial(settle, outcome=outcome))
        self._find_lost(removed, scanned, in_hand, is_ready=is_ready)
        if not is_ready:
            for one in due:
                if one.key not in in_hand:
                    self.saves.change(one.key, partial(postpone, reason=UNREAD))
            self.queues.post(self, [])
            return
        turns = [self._turn(one, is_in_hand=one.key in in_hand) for one in due]
        first, dropped = order_saves(turns, self._options.order, self._options.superseded)
        for one in dropped:
            outcome = _attempt(one, self._superseded)
            self.saves.change(one.key, partial(settle, outcome=outcome))
        first = [one for one in first if one.key not in in_hand]
        for one in first:
            self.saves.change(one.key, queue)
        self.queues.post(self, [self._job(one) for one in first])

    def _turn(self, one: ScannedSave, *, is_in_hand: bool) -> PendingSave[ScannedSave]:
        seen = one.seen
        written = max((s.mtime for s in seen.files.stats), default=0)
        age = (one.first, seen.checkpoint_dir.step or 0, seen.k)
        return PendingSave(one, seen.run, age, written, is_in_hand or self._view.is_begun(seen))

    def _job(self, one: ScannedSave) -> UploadJob:
        size = sum(stat.size for stat in one.seen.files.stats)
        return UploadJob(one.key, one.key[:2], size, partial(self._carry_out, one))

    def _finish_or_wait(self, one: ScannedSave, *, is_free: bool) -> UploadProgress | None:
        """Return why a save is not uploaded now; ``None`` if it is to be uploaded.

        A stored one that must move within the store is queued like one to be uploaded; the pin of a
        lost one is removed.  Not ``is_free``: a save of its name is in hand, or the records could
        not be read, so nothing is done.
        """
        seen, found = one.seen, self._view.why_done(one.seen)
        if not is_free:
            return _done_progress(seen, found) if found else _unless_finished(one)
        broken = self._view.known.broken_location(seen.checkpoint)
        if broken is not None:
            raise broken
        if seen.pin is not None and not seen.pin.node:
            return _progress(one, "waiting", "no node owns its pin yet")
        if found is not None:
            done: UploadProgress | None = _done_progress(seen, found)
            if found.phase == "stored" and found.manifest is not None:
                done = self._complete_stored(one, found.manifest)
            if done is not None:
                _mark_stored(seen, done)
            return done
        if one.is_lost and seen.pin is not None:
            drop(seen.pin, self._scanner.lock)
            why = "deleted or abandoned by the trainer before the worker knew that it was complete"
            self._note(one, "missed", why)
            return _progress(one, "missed", why)
        return _unless_finished(one)

    def _complete_stored(self, one: ScannedSave, mine: Manifest) -> UploadProgress | None:
        """Return that a save is stored, after its configuration was sent if that is missing.

        ``None`` if it has to move within the store, or some of its files have.
        """
        seen, node, location = one.seen, self._options.node, mine.location
        stored = _done_progress(seen, self._view.done_by(mine))
        reading = self._view.known.reading(node, seen.run, seen.checkpoint, time.time_ns())
        known = reading.manifests
        if manifest_groups.better_location(node, location, known) != location:
            return stored if is_early(mine, reading) else None
        save, is_exclusive = self.saves.get(one.key), self._view.store.is_exclusive
        if (save is None or save.placed_by != frozenset(k.name for k in known)) and (
            list_doubtful_names(node, location, known, is_exclusive=is_exclusive)
        ):
            return None
        to = self._context(seen, split_threads(self._options.threads)[-1])
        if added := send_missing_config(seen, location, to, known):
            return _done_progress(seen, Done("sent", f"sent {', '.join(added)}", mine))
        return stored

    def _correct_stored(
        self, seen: LocalSave, mine: Manifest, capacity: QueueCapacity
    ) -> UploadProgress:
        """Return that a save is stored, after it was moved to where it belongs in the store."""
        names = frozenset(k.name for k in self._view.known.manifests(seen.checkpoint))
        files = outgoing_save(seen, self._view.selection).files
        to = self._context(seen, capacity)
        location = correct_location(self._options.node, mine.location, files, to)
        self.saves.change(seen.key, partial(replace, placed_by=names))
        return _done_progress(seen, self._view.done_by(replace(mine, location=location)))

    def _superseded(self, one: ScannedSave) -> UploadProgress:
        if one.seen.pin is not None and one.seen.files.gone:
            drop(one.seen.pin, self._scanner.lock)
        return _progress(one, "superseded", "a newer checkpoint replaced it before the upload")

    def _find_lost(
        self,
        removed: Sequence[SaveState],
        scanned: Sequence[ScannedSave],
        in_hand: Collection[object],
        *,
        is_ready: bool,
    ) -> None:
        """Report, once, what was to be sent, or was being sent, and is not here any more."""
        here = {one.key[:2] for one in scanned}
        why = "its files were removed before all of them were stored"
        for save in removed:
            is_here = save.key[:2] in here
            if not is_here and (save.key in in_hand or not is_ready):
                continue
            if is_here or self._view.is_done(save.scanned.seen):
                self.saves.forget(save.key)
            else:
                self.saves.change(save.key, partial(lose, reason=why))
                self._note(save.scanned, "lost", why)

    def _note(self, one: ScannedSave, phase: str, why: str) -> None:
        note = f"{phase} {one.seen.run}/{one.seen.checkpoint}: {why}"
        self.notes = (*self.notes, note)[-NOTES:]

    # What happens in a queue's thread.

    def _carry_out(self, one: ScannedSave, capacity: QueueCapacity) -> None:
        """Upload a save, and report what became of it."""
        if self._options.order == "newest" and any(
            other.verdict.finished and self.saves.get(other.key) is None
            for other in self._scanner.saves()
        ):
            # it has finished since the plan
            self.saves.change(one.key, partial(postpone, reason="a newer one goes first"))
            return
        self._transfers[one.key] = Transfer(0)
        self.saves.change(one.key, begin)
        outcome = _attempt(one, partial(self._upload, capacity=capacity))
        self._transfers.pop(one.key, None)
        self.saves.change(one.key, partial(settle, outcome=outcome))
        if isinstance(outcome, UploadProgress) and outcome.phase == "sent":
            self._sent.append(outcome)

    def _upload(self, one: ScannedSave, capacity: QueueCapacity) -> UploadProgress:
        """Upload a save, unless it has changed since the plan; move one that is stored.

        Raises Incomplete if it changes meanwhile.
        """
        stored = self._view.why_done(one.seen)
        if stored is not None and stored.phase == "stored" and stored.manifest is not None:
            done = self._correct_stored(one.seen, stored.manifest, capacity)
            _mark_stored(one.seen, done)
            return done
        latest = self._scanner.latest(one.key)
        if latest is None or latest.since != one.since:
            return _progress(one, "waiting", "it changed while others were sent")
        if not latest.verdict.finished:
            return _progress(one, "waiting", latest.verdict.reason)
        seen = latest.seen
        noted = notes_at_sending(
            seen, time.time_ns(), latest.observation.save if latest.observation else ""
        )
        if seen.pin is not None and noted != seen.pin.notes:
            with contextlib.suppress(StoreError):  # a full disk: it is sent all the same
                seen = write_save_notes(seen, noted)
        outgoing, read = self._outgoing(seen)
        context = self._context(seen, capacity)
        self._clock.measure()  # so that `view.offset()` is at most an hour old
        try:
            sent = send_save(outgoing, noted, context, read)
        except Changed:
            # the bytes may have changed and the times not: what was read is worth nothing
            read.entries.clear()
            raise
        if sent.stored_before is None:
            self._uploaded.note(seen.checkpoint, outgoing.files.stats)
            done = sent_progress(outgoing, sent)
            done = replace(done, notes=(*done.notes, *outgoing.files.unpinned_warning))
        else:
            self._view.remember(
                seen.checkpoint,
                {(f.path, f.size, f.mtime): f.digest for f in read.entries.values()},
            )
            done = _done_progress(outgoing, self._view.done_by(sent.stored_before))
        _mark_stored(seen, done)
        return done

    def _outgoing(self, seen: LocalSave) -> tuple[LocalSave, ReadFiles]:
        """Return what is sent of a save, and what an earlier try read of these very files.

        Files that no try has read yet are put out of every writer's reach first.
        """
        manifests = self._view.known.manifests(seen.checkpoint)

        def beside(files: LocalFiles) -> Mapping[str, LocalFile]:
            return unless_young(
                configs_to_send(files, seen.checkpoint_dir, self._options.node, manifests)
            )

        outgoing = outgoing_save(seen, self._view.selection, beside)
        save = self.saves.get(seen.key)
        stats_read, read = (save.stats_read, save.read) if save else (None, ReadFiles())
        if outgoing.files.stats != stats_read:
            # again, since hardening gives the files new inodes; an earlier try may have read these
            outgoing = outgoing_save(harden_save(seen), self._view.selection, beside)
        stats = outgoing.files.stats
        if stats != stats_read:
            read = ReadFiles()
        self.saves.change(seen.key, partial(replace, stats_read=stats, read=read))
        return outgoing, read

    def _context(self, seen: LocalSave, capacity: QueueCapacity) -> UploadContext:
        return UploadContext(
            self._view,
            seen.checkpoint,
            after_chunk=self.queues.give_way,
            threads=capacity.threads,
            small=capacity.small,
            may_wait=True,
            output_dir=self._run.path,
            transfer=self._transfers.get(seen.key) or Transfer(0),
        )


def harden_save(seen: LocalSave) -> LocalSave:
    """Return the same save, its pin out of every writer's reach if the file system can do that.

    Raises Incomplete unless the pin still holds the files of the scan.
    """
    if seen.pin is None:
        return seen
    replace_links(seen.pin)
    held = seen.files.by_path
    pinned = {
        f.path: LocalFile(f, seen.pin.root, is_pinned=True)
        for f in walk(seen.pin.root).files
        if f.path in held
    }
    if _versions(pinned) != _versions({path: h for path, h in held.items() if h.is_pinned}):
        raise Incomplete(f"{seen.checkpoint}: its pin changed", hint=AGAIN)
    return replace(seen, files=replace(seen.files, by_path=dict(held) | pinned))


def _versions(files: Mapping[str, LocalFile]) -> dict[str, tuple[int, int]]:
    """Return what tells a file that was written again, and a reflink keeps."""
    return {path: (f.stat.size, f.stat.mtime) for path, f in files.items()}


def _mark_stored(seen: LocalSave, done: UploadProgress) -> None:
    """Tell the hook, which may be waiting for it."""
    if seen.pin is not None and done.location and done.phase in ("sent", "stored", "elsewhere"):
        with contextlib.suppress(CkptsyncError):  # the next plan does it again
            mark_stored(seen.pin)


def _unless_finished(one: ScannedSave) -> UploadProgress | None:
    """Return what an unfinished save waits for; None for a finished one."""
    if one.verdict.finished:
        return None
    is_unended = one.observation is not None and one.observation.unended is not None
    return _progress(one, "not-final" if is_unended else "waiting", one.verdict.reason)


def _progress(one: ScannedSave, phase: Phase, detail: str) -> UploadProgress:
    return UploadProgress(*one.key, phase, detail)


def _done_progress(seen: LocalSave, found: Done) -> UploadProgress:
    notes = (*seen.files.notes, *seen.files.unpinned_warning)
    location = found.manifest.location if found.manifest else ""
    return UploadProgress(*seen.key, found.phase, found.detail, location, notes=notes)


def _attempt(one: ScannedSave, work: Callable[[ScannedSave], T]) -> T | UploadProgress | Failure:
    """Return what ``work`` made of a save, or its error as a value."""
    try:
        return work(one)
    except Incomplete as e:  # it changed, or others are at it: the next scan may find it quiet
        return _progress(one, "waiting", str(e))
    except CkptsyncError as e:
        return describe_failure(one.seen.run, one.seen.checkpoint, e)
