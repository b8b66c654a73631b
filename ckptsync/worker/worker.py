"""The worker of one output directory: `scan` pins and judges saves, `plan` says what is sent.

`plan` queues uploads and repairs by what the last scan found, and cleans up; a queue's thread calls
`Worker._carry_out` for one save.  `result` returns what was seen and done.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.records import save_groups
from ckptsync.records.manifest import Manifest
from ckptsync.spool.pins import clean_own, drop, harden, mark_stored
from ckptsync.stores.contract import Store
from ckptsync.walk import Stat, walk
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
from ckptsync.worker.model_configs import configs_to_send, outgoing_save, unless_young
from ckptsync.worker.node_identity import Clock
from ckptsync.worker.options import WorkerOptions, checked_options
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.queue import (
    QueueCapacity,
    Turn,
    UploadJob,
    UploadQueues,
    order_saves,
    split_threads,
)
from ckptsync.worker.repair import FileRepairs
from ckptsync.worker.results import (
    ON_THE_WAY,
    Failure,
    Phase,
    UploadProgress,
    WorkerResult,
    failure,
)
from ckptsync.worker.scanner import Scan, Scanned, Scanner, write_save_notes
from ckptsync.worker.spool_room import SpoolRule, held_bytes
from ckptsync.worker.store_view import Done, StoreView
from ckptsync.worker.upload import (
    UploadContext,
    correct_location,
    list_doubtful_names,
    send_missing_config,
    send_save,
    sent_progress,
)

DONE = ("stored", "elsewhere", "retired")
DOUBTFUL = 10  # times `unmarked`
NOTES = 10  # of saves that were missed; the log has them all
OTHERS = "others are sent first"
UNREAD = "the store's records cannot be read now"
_Outcome = UploadProgress | Failure
"""What became of a save."""


class Worker:
    """Scans an output directory, and plans the uploads and repairs that `queues` carry out.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.
    `scan` is for any thread, and never reads the store; the rest is for one thread, and others may
    scan meanwhile.  Raises ConfigError where the run and the store lie in each other.
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
            store=store.url,
        )
        self._repairs = FileRepairs(options.run, self._view, self.queues)
        self._uploaded = UploadedFiles(self.queues.give_way)
        self._found: Scan | None = None
        self._planned: Sequence[Scanned] = ()
        self._cleaned: list[UploadProgress] = []
        self._failures: list[Failure] = []
        self._outcomes: dict[Key, _Outcome] = {}
        self._news: deque[tuple[Key, _Outcome]] = deque()  # of the queues' threads
        self._going: dict[Key, Scanned] = {}  # what is to be sent, or being sent
        # what an earlier try read, and of which files
        self._read: dict[Key, tuple[Sequence[Stat], ReadFiles]] = {}
        # of stored saves: the manifests that were known when it was last seen to lie where it
        # belongs
        self._corrected: dict[Key, frozenset[str]] = {}
        self._notes: tuple[str, ...] = ()  # what an operator should see though it is over
        clean_own(options.run.path, node)

    @property
    def queue_keys(self) -> tuple[object, ...]:
        """The keys under which its jobs wait in the queues."""
        return self, self._repairs

    @property
    def is_done(self) -> bool:
        """Whether it has nothing to send, nor to report of what it had."""
        return not self._going

    def scan(self, now: float) -> Scan:
        """Pin what has appeared, and judge it.  ``now`` in seconds on any clock that only grows."""
        self._clock.notice(now)
        self._found = self._scanner.scan(now)
        return replace(self._found, notes=(*self._found.notes, *self._notes))

    def pinned_bytes(self) -> int:
        """Return the bytes of files that had no names but our pins' at the last scan."""
        return held_bytes(
            [one.seen.pin for one in self._scanner.saves() if one.seen.pin is not None]
        )

    def plan(self, now: float) -> None:
        """Queue what the last scan found finished, and remove what is not needed.

        Errors are in the result: one checkpoint's never keep another back.
        """
        if self._found is None:
            self.scan(now)
        assert self._found is not None
        unseen, run = self._found.failures, self._run.name
        scanned = self._planned = self._scanner.saves()
        self._cleaned, self._failures, is_ready = [], list(unseen), False
        try:
            self._view.refresh()
            self._failures += self._repairs.repair_manifests()
            is_ready = True
        except CkptsyncError as e:
            self._failures.append(failure(run, "", e))
        self._plan_uploads(scanned, is_ready=is_ready)
        self._forget(scanned)
        self._repairs.plan([one.seen for one in scanned] if is_ready else None)
        if is_ready:
            # a scan during the refresh may have failed
            here = {f.checkpoint for f in unseen} | {one.seen.checkpoint for one in scanned}
            self._cleaned, stuck = clean_up(
                here, self._options, self._view, self._scanner, self._uploaded
            )
            self._failures += stuck
        progress = [*self._progress(), *self._cleaned]
        self._clock.measure_in_time(
            is_idle=bool(progress) and all(p.phase in DONE for p in progress)
        )

    def result(self) -> WorkerResult:
        """Return what became by now of all that the last plan saw."""
        progress = (*self._progress(), *self._cleaned)
        failed = [o for o in self._outcomes.values() if isinstance(o, Failure)]
        repairs, unrepaired = self._repairs.result()
        waiting = {(p.run, p.checkpoint) for p in progress if p.phase in ON_THE_WAY}
        since = {
            f"{one.seen.run}/{one.seen.checkpoint}": one.first
            for one in reversed(self._planned)
            if one.key[:2] in waiting
        }
        return WorkerResult(
            self._options.node,
            progress,
            tuple(repairs),
            (*self._failures, *unrepaired, *failed),
            since,
            self._notes,
            self._repairs.lacking(),
        )

    def _progress(self) -> list[UploadProgress]:
        """Return what became of each save by now, in their order.

        A failure is reported until another try has ended, a success until the next plan.
        """
        while self._news:
            key, news = self._news.popleft()
            before = self._outcomes.get(key)
            if before is None:
                continue
            phase = _as_progress(key, before).phase
            if phase != "lost" and (_as_progress(key, news).phase, phase) != ("sending", "failed"):
                self._outcomes[key] = news
        return [_as_progress(key, outcome) for key, outcome in self._outcomes.items()]

    def _forget(self, scanned: Sequence[Scanned]) -> None:
        """Forget what is remembered of saves that are gone; queues write to it meanwhile."""
        here = {one.key for one in scanned}
        for memory in (self._read, self._corrected):
            for key in [key for key in tuple(memory) if key not in here]:
                memory.pop(key, None)
        digests = self._view.known_digests
        for name in set(digests) - {name for _, name, _ in here}:
            digests.pop(name, None)

    # What is decided in the plan's thread.

    def _plan_uploads(self, scanned: Sequence[Scanned], *, is_ready: bool) -> None:
        """Decide of each save, and queue what is due.

        ``is_ready``: the store's records were read just before; else all have to wait.
        """
        jobs = self.queues.withdraw(self)
        in_hand, names = {job.save for job in jobs}, {job.name for job in jobs}
        planned: dict[Key, _Outcome | None] = {}  # `None`: it is to be sent
        turns: list[Turn[Scanned]] = []
        for one in scanned:
            seen = one.seen
            if one.key in in_hand:
                planned[one.key] = None
            else:
                is_free = is_ready and one.key[:2] not in names
                planned[one.key] = _attempt(one, partial(self._finish_or_wait, is_free=is_free))
            if planned[one.key] is None and is_ready:
                written = max((s.mtime for s in seen.files.stats), default=0)
                age = (one.first, seen.checkpoint_dir.step or 0, seen.k)
                is_begun = one.key in in_hand or self._view.is_begun(seen)
                turns.append(Turn(one, seen.run, age, written, is_begun))
        first, dropped = order_saves(turns, self._options.order, self._options.superseded)
        for one in dropped:
            planned[one.key] = _attempt(one, self._superseded)
        going = {one.key: one for one in scanned if planned[one.key] is None}
        self._outcomes = {
            key: outcome or self._on_the_way(key, in_hand, OTHERS if is_ready else UNREAD)
            for key, outcome in planned.items()
        }
        self._find_lost(scanned, in_hand, is_ready=is_ready)
        self._going |= going
        for one in scanned:
            # what could not even be tried has to wait for the next plan, too
            if one.verdict.finished:
                self._scanner.mark_planned(one)
        keys_at_plan = {one.key for one in scanned}
        due = [
            UploadJob(
                one.key,
                one.key[:2],
                sum(stat.size for stat in one.seen.files.stats),
                partial(self._carry_out, one, keys_at_plan),
            )
            for one in first
            if one.key not in in_hand
        ]
        self.queues.post(self, due)

    def _on_the_way(self, key: Key, in_hand: Collection[object], why: str) -> _Outcome:
        """Return what to report of a save that waits, or is in hand: a failure stays."""
        before = self._outcomes.get(key)
        if isinstance(before, Failure):
            return before
        if key in in_hand:
            return UploadProgress(*key, "sending", "")
        return UploadProgress(*key, "waiting", why)

    def _finish_or_wait(self, one: Scanned, *, is_free: bool) -> UploadProgress | None:
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
            done = _done_progress(seen, found)
            if found.phase == "stored" and found.manifest is not None:
                if self._must_correct(one, found.manifest):
                    return None
                done = self._complete_stored(one, found.manifest)
            _mark_stored(seen, done)
            return done
        if one.is_lost and seen.pin is not None:
            drop(seen.pin, self._scanner.lock)
            why = "deleted or abandoned by the trainer before the worker knew that it was complete"
            self._note(one, "missed", why)
            return _progress(one, "missed", why)
        return _unless_finished(one)

    def _must_correct(self, one: Scanned, mine: Manifest) -> bool:
        """Return whether a stored save has to move within the store, or some of its files have."""
        seen, node, location = one.seen, self._options.node, mine.location
        known = self._view.known.manifests(seen.checkpoint)
        to = self._context(seen, split_threads(self._options.threads)[-1])
        if save_groups.better_location(node, location, known) != location:
            return not to.must_wait(mine, known)
        is_new = self._corrected.get(one.key) != frozenset(k.name for k in known)
        return is_new and bool(list_doubtful_names(node, location, known, to.store))

    def _complete_stored(self, one: Scanned, mine: Manifest) -> UploadProgress:
        """Return that a save is stored, after its configuration was sent if that is missing."""
        seen = one.seen
        known = self._view.known.manifests(seen.checkpoint)
        to = self._context(seen, split_threads(self._options.threads)[-1])
        is_elsewhere = (
            save_groups.better_location(self._options.node, mine.location, known) != mine.location
        )
        if not is_elsewhere and (added := send_missing_config(seen, mine.location, to, known)):
            return _done_progress(seen, Done("sent", f"sent {', '.join(added)}", mine))
        return _done_progress(seen, self._view.done_by(mine))

    def _correct_stored(
        self, seen: LocalSave, mine: Manifest, capacity: QueueCapacity
    ) -> UploadProgress:
        """Return that a save is stored, after it was moved to where it belongs in the store."""
        names = frozenset(k.name for k in self._view.known.manifests(seen.checkpoint))
        files = outgoing_save(seen, self._view.selection).files
        to = self._context(seen, capacity)
        location = correct_location(self._options.node, mine.location, files, to)
        self._corrected[seen.key] = names
        return _done_progress(seen, self._view.done_by(replace(mine, location=location)))

    def _superseded(self, one: Scanned) -> UploadProgress:
        if one.seen.pin is not None and one.seen.files.gone:
            drop(one.seen.pin, self._scanner.lock)
        return _progress(one, "superseded", "a newer checkpoint replaced it before the upload")

    def _find_lost(
        self, scanned: Sequence[Scanned], in_hand: Collection[object], *, is_ready: bool
    ) -> None:
        """Report, once, what was to be sent, or was being sent, and is not here any more."""
        here = {one.key[:2] for one in scanned}
        for key, one in list(self._going.items()):
            is_here = key[:2] in here
            if not is_here and (key in in_hand or not is_ready):
                continue
            self._going.pop(key)
            if not is_here and not self._view.is_done(one.seen):
                why = "its files were removed before all of them were stored"
                self._outcomes[key] = _progress(one, "lost", why)
                self._note(one, "lost", why)

    def _note(self, one: Scanned, phase: str, why: str) -> None:
        note = f"{phase} {one.seen.run}/{one.seen.checkpoint}: {why}"
        self._notes = (*self._notes, note)[-NOTES:]

    # What happens in a queue's thread.

    def _carry_out(
        self, one: Scanned, keys_at_plan: Collection[Key], capacity: QueueCapacity
    ) -> None:
        """Upload a save, and report what became of it."""
        is_newest_first = self._options.order == "newest"
        if is_newest_first and any(
            other.verdict.finished and other.key not in keys_at_plan
            for other in self._scanner.saves()
        ):
            # it has finished since the plan
            waits = _progress(one, "waiting", "a newer one goes first")
            self._news.append((one.key, waits))
            return
        self._news.append((one.key, _progress(one, "sending", "")))
        outcome = _attempt(one, partial(self._upload, capacity=capacity))
        assert outcome is not None
        self._news.append((one.key, outcome))

    def _upload(self, one: Scanned, capacity: QueueCapacity) -> UploadProgress:
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
        self._clock.measure()  # so that `view.offset()` is at most an hour old
        try:
            sent = send_save(outgoing, noted, self._context(seen, capacity), read)
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
        stats_read, read = self._read.get(seen.key, (None, ReadFiles()))
        if outgoing.files.stats == stats_read:
            return outgoing, read
        # again, since hardening gives the files new inodes; an earlier try may have read these
        outgoing = outgoing_save(harden_save(seen), self._view.selection, beside)
        if outgoing.files.stats != stats_read:
            read = ReadFiles()
            self._read[seen.key] = outgoing.files.stats, read
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
        )


def harden_save(seen: LocalSave) -> LocalSave:
    """Return the same save, its pin out of every writer's reach if the file system can do that.

    Raises Incomplete unless the pin still holds the files of the scan.
    """
    if seen.pin is None:
        return seen
    harden(seen.pin)
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


def _unless_finished(one: Scanned) -> UploadProgress | None:
    """Return what an unfinished save waits for; None for a finished one."""
    if one.verdict.finished:
        return None
    is_unended = one.observation is not None and one.observation.unended is not None
    return _progress(one, "not-final" if is_unended else "waiting", one.verdict.reason)


def _progress(one: Scanned, phase: Phase, detail: str) -> UploadProgress:
    return UploadProgress(*one.key, phase, detail)


def _done_progress(seen: LocalSave, found: Done) -> UploadProgress:
    notes = (*seen.files.notes, *seen.files.unpinned_warning)
    location = found.manifest.location if found.manifest else ""
    return UploadProgress(*seen.key, found.phase, found.detail, location, notes=notes)


def _as_progress(key: Key, outcome: _Outcome) -> UploadProgress:
    if isinstance(outcome, Failure):
        return UploadProgress(*key, "failed", outcome.text)
    return outcome


def _attempt(one: Scanned, work: Callable[[Scanned], UploadProgress | None]) -> _Outcome | None:
    """Return what ``work`` made of a save, or its error as a value."""
    try:
        return work(one)
    except Incomplete as e:  # it changed, or others are at it: the next scan may find it quiet
        return _progress(one, "waiting", str(e))
    except CkptsyncError as e:
        return failure(one.seen.run, one.seen.checkpoint, e)
