"""The worker: `scan` pins and judges saves, `plan` decides what is uploaded or repaired.

`result` returns what was seen and done.

`Uploads` decides of every save of a scan, and queues what is due.  A queue's thread calls
`Uploads._carry_out`, which takes a snapshot of the save and drafts its manifest; `upload.upload`
does the rest.
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
from ckptsync.walk import walk
from ckptsync.worker.cleanup import clean_up
from ckptsync.worker.finished import Rule
from ckptsync.worker.model_configs import configs_to_send, outgoing_save, unless_young
from ckptsync.worker.node_identity import Clock
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.progress import (
    ON_THE_WAY,
    Failure,
    Phase,
    UploadProgress,
    WorkerResult,
    failure,
)
from ckptsync.worker.queue import (
    QueueCapacity,
    Turn,
    UploadJob,
    UploadQueues,
    order_saves,
    split_threads,
)
from ckptsync.worker.repair import FileRepairs
from ckptsync.worker.scanner import Key, Scan, Scanned, Scanner, key_of, write_save_notes
from ckptsync.worker.snapshot import (
    AGAIN,
    Changed,
    LocalFile,
    LocalFiles,
    LocalSave,
    Snapshot,
    draft_manifest,
    note_sending,
    take_snapshot,
)
from ckptsync.worker.spool_room import SpoolRule, held_bytes
from ckptsync.worker.store_view import Done, StoreView, done_of, why_done
from ckptsync.worker.upload import (
    UploadContext,
    correct_location,
    list_doubtful_names,
    send_late,
    sent_progress,
    upload,
)

DONE = ("stored", "elsewhere", "retired")
DOUBTFUL = 10  # times `unmarked`
NOTES = 10  # of saves that were missed; the log has them all
OTHERS = "others are sent first"


class Worker:
    """Scans, pins and judges saves, and plans the uploads and repairs that `queues` carry out.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.
    `scan` is for any thread, and never reads the store; the rest is for one, and others may scan
    meanwhile.  Raises ConfigError where a run and the store lie in each other.
    """

    def __init__(
        self, options: WorkerOptions, store: Store, queues: UploadQueues | None = None
    ) -> None:
        self._options, node = checked_options(options, store.url), options.node
        self.queues = queues or UploadQueues(options.threads)
        self._clock = Clock(store, node)
        self._view = StoreView(store, node, options.selection, lambda: self._clock.last)
        pinner = Pinner(
            node, self._view.is_proven, SpoolRule(options.spool_budget, options.spool_full)
        )
        rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
        self._scanner = Scanner(
            options.runs, pinner, rule, self._view.is_done, self._view.has_other_part
        )
        self._uploads = Uploads(options, self._view, self._scanner, self._clock, self.queues)
        self._repairs = FileRepairs(self._view, self.queues)
        self._scanned: Sequence[Scanned] = ()
        self._cleaned: list[UploadProgress] = []
        self._failures: list[Failure] = []
        for run in options.runs:
            clean_own(run.path, node)

    @property
    def queue_keys(self) -> tuple[object, ...]:
        """The keys under which its jobs wait in the queues."""
        return self._uploads, self._repairs

    @property
    def is_done(self) -> bool:
        """Whether it has nothing to send, nor to report of what it had."""
        return self._uploads.is_done

    def scan(self, now: float) -> Scan:
        """Pin what has appeared, and judge it.  ``now`` in seconds on any clock that only grows."""
        self._clock.notice(now)
        found = self._scanner.scan(now)
        return replace(found, notes=(*found.notes, *self._uploads.notes))

    def pinned_bytes(self) -> int:
        """Return the bytes of files that had no names but our pins' at the last scan."""
        return held_bytes([w.seen.pin for w in self._scanner.saves() if w.seen.pin is not None])

    def plan(self, now: float) -> None:
        """Scan, queue what is finished, and remove what is not needed.

        Errors are in the result: one checkpoint's never keep another back.
        """
        found = self.scan(now)
        scanned = self._scanner.saves()
        self._scanned, self._cleaned, self._failures = scanned, [], list(found.failures)
        ready: list[RunDir] = []
        for run in self._options.runs:
            try:
                self._view.refresh(run.name)
                self._failures += self._repairs.restore_manifests(run)
                ready.append(run)
            except CkptsyncError as e:  # noqa: PERF203 - a few runs, each for itself
                self._failures.append(failure(run.name, "", e))
        self._uploads.plan(scanned, now, {run.name for run in ready})
        for one in scanned:
            # what could not even be tried has to wait for the next plan, too
            if one.verdict.finished:
                self._scanner.mark_tried(one)
        self._forget(scanned)
        seen = {run: [w.seen for w in scanned if w.seen.run == run.name] for run in ready}
        self._repairs.plan(seen)
        for run in ready:
            here = {s.checkpoint_dir.name for s in seen[run]} | {
                f.checkpoint for f in found.failures if f.run == run.name
            }
            cleaned, stuck = clean_up(run, here, self._options, self._view, self._scanner)
            self._cleaned += cleaned
            self._failures += stuck
        progress = [*self._uploads.result()[0], *self._cleaned]
        self._clock.measure_in_time(
            now, is_idle=bool(progress) and all(p.phase in DONE for p in progress)
        )

    def result(self, now: float) -> WorkerResult:
        """Return what became by now of all that the last plan saw."""
        found, failed = self._uploads.result()
        repairs, unrepaired = self._repairs.result()
        progress = (*found, *self._cleaned)
        waiting = {(p.run, p.checkpoint) for p in progress if p.phase in ON_THE_WAY}
        since = {
            f"{w.seen.run}/{w.seen.checkpoint_dir.name}": w.first
            for w in reversed(self._scanned)
            if w.key[:2] in waiting
        }
        return WorkerResult(
            self._options.node,
            progress,
            tuple(repairs),
            (*self._failures, *unrepaired, *failed),
            self._scanner.due(now),
            since,
            sum(p.size for p in progress if p.phase == "sent"),
            self._uploads.notes,
            self._repairs.lacking(),
        )

    def _forget(self, scanned: Sequence[Scanned]) -> None:
        """Forget what is remembered of saves that are gone."""
        here = {one.key for one in scanned}
        for run in self._options.runs:
            read = self._view.of(run.name).read
            for name in [
                name for name in tuple(read) if not any(key[:2] == (run.name, name) for key in here)
            ]:
                read.pop(name, None)
        self._uploads.forget(here)


def harden_save(seen: LocalSave) -> LocalSave:
    """Return the same save, its pin out of every writer's reach if the file system can do that."""
    if seen.pin is None:
        return seen
    harden(seen.pin)
    held = seen.files.by_path
    pinned = {
        f.path: LocalFile(f, seen.pin.root, is_pinned=True)
        for f in walk(seen.pin.root).files
        if f.path in held
    }
    before = {path: h.stat.size for path, h in held.items() if h.is_pinned}
    if {path: h.stat.size for path, h in pinned.items()} != before:
        raise Incomplete(f"{seen.checkpoint_dir.name}: its pin changed", hint=AGAIN)
    return replace(seen, files=replace(seen.files, by_path=dict(held) | pinned))


class Uploads:
    """Decides which saves are sent, and remembers what became of each.

    `plan` and `result` are for one thread; queues send in others.

    All that it remembers may be lost: then it waits, reads and asks the store once more.
    ``notes``: what an operator should see though it is over.
    """

    def __init__(
        self,
        options: WorkerOptions,
        view: StoreView,
        scanner: Scanner,
        clock: Clock,
        queues: UploadQueues,
    ) -> None:
        self._options, self._view, self._scanner = options, view, scanner
        self._clock, self._queues = clock, queues
        self._snapshots: dict[Key, Snapshot] = {}
        # by stored save: the manifests that were known when it was last seen to lie where it
        # belongs
        self._corrected: dict[Key, frozenset[str]] = {}
        self._progress: dict[Key, UploadProgress] = {}
        self._failures: dict[Key, Failure] = {}
        self._news: deque[tuple[Key, UploadProgress, Failure | None]] = deque()
        self._going: dict[Key, Scanned] = {}
        self.notes: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be sent any more, nor to be reported of what was."""
        return not self._going

    def plan(self, scanned: Sequence[Scanned], now: float, ready: Collection[str]) -> None:
        """Decide of each save, and queue what is due.

        ``ready``: runs of which the store's records were read just before; the others have to wait.
        """
        jobs = self._queues.withdraw(self)
        in_hand, names = {job.save for job in jobs}, {job.name for job in jobs}
        failures: dict[Key, Failure] = {}
        planned: dict[Key, UploadProgress | None] = {}

        def decide(one: Scanned, how: Callable[[Scanned], UploadProgress | None]) -> None:
            planned[one.key], failed = _attempt(one, partial(how, one))
            if failed is not None:
                failures[one.key] = failed

        turns: list[Turn[Scanned]] = []
        for one in scanned:
            seen = one.seen
            is_free = one.key[:2] not in names and seen.run in ready
            decide(one, self._decide if is_free else self._known)
            if planned[one.key] is None and seen.run in ready:
                written = max((s.mtime for s in seen.files.stats), default=0)
                is_begun = one.key in in_hand or self._view.is_begun(seen)
                turns.append(
                    Turn(
                        one,
                        seen.run,
                        (one.first, seen.checkpoint_dir.step or 0, seen.k),
                        written,
                        is_begun,
                    )
                )
        first, dropped = order_saves(turns, self._options.order, self._options.superseded)
        for one in dropped:
            decide(one, self._superseded)
        self._remember(planned, failures, in_hand)
        self._find_lost(scanned, in_hand, ready)
        self._going |= {one.key: one for one in scanned if planned[one.key] is None}
        due = [one for one in first if one.key not in in_hand]
        for one in due:
            self._scanner.mark_tried(one)
        self._queues.post(self, [self._job(one, now, planned) for one in due])

    def result(self) -> tuple[list[UploadProgress], list[Failure]]:
        """Return what became of each by now, in their order.

        A failure is reported until another try has ended, a success until the next plan.
        """
        while self._news:
            key, progress, failed = self._news.popleft()
            before = self._progress.get(key)
            if (
                before is None
                or before.phase == "lost"
                or (progress.phase, before.phase) == ("sending", "failed")
            ):
                continue
            self._progress[key] = progress
            self._failures.pop(key, None)
            if failed is not None:
                self._failures[key] = failed
        return list(self._progress.values()), list(self._failures.values())

    def forget(self, here: Collection[Key]) -> None:
        """Forget all but these saves.

        The mappings stay the same objects, since queues write to them meanwhile.
        """
        for memory in (self._snapshots, self._corrected):
            for key in [key for key in tuple(memory) if key not in here]:
                memory.pop(key, None)

    def _remember(
        self,
        planned: Mapping[Key, UploadProgress | None],
        failures: Mapping[Key, Failure],
        in_hand: Collection[object],
    ) -> None:
        """Replace what was reported; of what waits its turn, or is in hand, a failure stays."""
        before, failed = self._progress, self._failures
        self._progress, self._failures = {}, dict(failures)
        for key, progress in planned.items():
            if progress is None and key in failed:
                self._progress[key], self._failures[key] = before[key], failed[key]
            elif progress is None:
                waiting = UploadProgress(*key, "waiting", OTHERS)
                self._progress[key] = (
                    UploadProgress(*key, "sending", "") if key in in_hand else waiting
                )
            else:
                self._progress[key] = progress

    # What is decided in the plan's thread.

    def _known(self, one: Scanned) -> UploadProgress | None:
        """Return what the cached records say of a save; ``None`` if that is nothing.

        For saves whose name is in hand, or of whose run the records could not be read.
        """
        found = why_done(
            one.seen, self._options.node, self._view.of(one.seen.run), self._view.selection
        )
        return _done_progress(one.seen, found) if found else None

    def _decide(self, one: Scanned) -> UploadProgress | None:
        """Return why a save is not uploaded now; ``None`` if it is to be uploaded."""
        seen, known = one.seen, self._view.of(one.seen.run)
        broken = known.broken_location(seen.checkpoint_dir.name)
        if broken is not None:
            raise broken
        if seen.pin is not None and not seen.pin.node:
            return _progress(one, "waiting", "no node owns its pin yet")
        found = why_done(seen, self._options.node, known, self._view.selection)
        if found is not None:
            if found.phase == "stored" and found.manifest is not None:
                done = self._stored(one, found.manifest)
            else:
                done = _done_progress(seen, found)
            self._mark_stored(one, done)
            return done
        if one.is_lost and seen.pin is not None:
            drop(seen.pin, self._scanner.lock)
            why = "deleted or abandoned by the trainer before the worker knew that it was complete"
            self._note(one, "missed", why)
            return _progress(one, "missed", why)
        return None if one.verdict.finished else _progress(one, "waiting", one.verdict.reason)

    def _stored(self, one: Scanned, mine: Manifest) -> UploadProgress:
        """Return that a save is stored, after its location and its configuration were corrected."""
        seen, selection = one.seen, self._view.selection
        known = self._view.of(seen.run).manifests(seen.checkpoint_dir.name)
        to, node = self._context(seen, split_threads(self._options.threads)[-1]), self._options.node
        names, location = frozenset(k.name for k in known), mine.location
        is_elsewhere = save_groups.better_location(node, location, known) != location
        if is_elsewhere and to.must_wait(mine, known):
            return _done_progress(seen, done_of(mine, node))
        is_new = self._corrected.get(one.key) != names
        if is_elsewhere or (is_new and list_doubtful_names(node, location, known, to.store)):
            location = correct_location(node, location, outgoing_save(seen, selection).files, to)
            self._corrected[one.key] = names
        elif added := send_late(seen, location, to, known):
            return _done_progress(seen, Done("sent", f"sent {', '.join(added)}", mine))
        return _done_progress(seen, done_of(replace(mine, location=location), node))

    def _superseded(self, one: Scanned) -> UploadProgress:
        self._scanner.mark_tried(one)
        if one.seen.pin is not None and one.seen.files.gone:
            drop(one.seen.pin, self._scanner.lock)
        return _progress(one, "superseded", "a newer checkpoint replaced it before the upload")

    def _find_lost(
        self, scanned: Sequence[Scanned], in_hand: Collection[object], ready: Collection[str]
    ) -> None:
        """Report, once, what was to be sent, or was being sent, and is not here any more."""
        here = {one.key[:2] for one in scanned}
        for key, one in list(self._going.items()):
            is_here, seen = key[:2] in here, one.seen
            if not is_here and (key in in_hand or seen.run not in ready):
                continue
            self._going.pop(key)
            if not is_here and not self._view.is_done(seen):
                why = "its files were removed before all of them were stored"
                self._progress[key] = _progress(one, "lost", why)
                self._note(one, "lost", why)

    def _note(self, one: Scanned, phase: str, why: str) -> None:
        note = f"{phase} {one.seen.run}/{one.seen.checkpoint_dir.name}: {why}"
        self.notes = (*self.notes, note)[-NOTES:]

    # What happens in a queue's thread.

    def _job(self, one: Scanned, now: float, planned: Collection[Key]) -> UploadJob:
        size = sum(stat.size for stat in one.seen.files.stats)
        return UploadJob(one.key, one.key[:2], size, partial(self._carry_out, one, now, planned))

    def _carry_out(
        self, one: Scanned, now: float, planned: Collection[Key], capacity: QueueCapacity
    ) -> None:
        """Upload a save, and report what became of it."""
        is_newest_first = self._options.order == "newest"
        if is_newest_first and any(
            w.verdict.finished and w.key not in planned for w in self._scanner.saves()
        ):
            # it has finished since the plan
            waits = _progress(one, "waiting", "a newer one goes first")
            self._news.append((one.key, waits, None))
            return
        self._news.append((one.key, _progress(one, "sending", ""), None))
        progress, failed = _attempt(one, partial(self._upload, one, now, capacity))
        assert progress is not None
        self._news.append((one.key, progress, failed))

    def _upload(self, one: Scanned, now: float, capacity: QueueCapacity) -> UploadProgress:
        """Upload a save, unless it has changed since the plan.

        Raises Incomplete if it changes meanwhile.
        """
        latest = self._scanner.latest(one.key)
        if latest is None or latest.since != one.since:
            return _progress(one, "waiting", "it changed while others were sent")
        if not latest.verdict.finished:
            return _progress(one, "waiting", latest.verdict.reason)
        seen = latest.seen
        noted = note_sending(
            seen, time.time_ns(), latest.observation.save if latest.observation else ""
        )
        if seen.pin is not None and noted != seen.pin.notes:
            with contextlib.suppress(StoreError):  # a full disk: it is sent all the same
                seen = write_save_notes(seen, noted)
        going, snapshot = self._take_snapshot(seen)
        node, known = self._options.node, self._view.of(seen.run)
        offset, gone = self._clock.offset(now), known.lost_of(node, seen.checkpoint_dir.name)
        planned = draft_manifest(going, snapshot, node, noted, clock_offset=offset, gone=gone)
        try:
            sent = upload(planned, going.files, self._context(seen, capacity), snapshot.read)
        except Changed:
            snapshot.read.clear()  # no time of a file may have changed with its bytes
            raise
        if sent.stored_before is None:
            done = sent_progress(going, snapshot, sent)
            done = replace(done, notes=(*done.notes, *going.files.pin_notes))
        else:
            read = {(f.path, f.size, f.mtime): f.digest for f in snapshot.files if f.digest}
            known.remember(seen.checkpoint_dir.name, read)
            done = _done_progress(going, done_of(sent.stored_before, node))
        self._mark_stored(latest, done)
        return done

    def _take_snapshot(self, seen: LocalSave) -> tuple[LocalSave, Snapshot]:
        """Return what is sent of a save, and its snapshot.

        That is the snapshot of an earlier try, if these very files are sent.
        """
        node, selection = self._options.node, self._view.selection
        manifests = self._view.of(seen.run).manifests(seen.checkpoint_dir.name)

        def beside(files: LocalFiles) -> Mapping[str, LocalFile]:
            return unless_young(configs_to_send(files, seen.checkpoint_dir, node, manifests))

        key = key_of(seen)
        going, snapshot = outgoing_save(seen, selection, beside), self._snapshots.get(key)
        if snapshot is None or snapshot.stats != going.files.stats:
            going = outgoing_save(harden_save(seen), selection, beside)
        if snapshot is None or snapshot.stats != going.files.stats:
            snapshot = self._snapshots[key] = take_snapshot(going.files)
        return going, snapshot

    def _mark_stored(self, one: Scanned, done: UploadProgress) -> None:
        """Tell the hook, which may be waiting for it."""
        if (
            one.seen.pin is not None
            and done.location
            and done.phase in ("sent", "stored", "elsewhere")
        ):
            with contextlib.suppress(CkptsyncError):  # the next plan does it again
                mark_stored(one.seen.pin)

    def _context(self, seen: LocalSave, capacity: QueueCapacity) -> UploadContext:
        return UploadContext(
            self._view,
            seen.run,
            seen.checkpoint_dir.name,
            threads=capacity.threads,
            small=capacity.small,
            may_wait=True,
            output_dir=next((r.path for r in self._options.runs if r.name == seen.run), None),
        )


def _progress(one: Scanned, phase: Phase, detail: str) -> UploadProgress:
    return UploadProgress(*one.key, phase, detail)


def _done_progress(seen: LocalSave, found: Done) -> UploadProgress:
    notes = (*seen.files.notes, *seen.files.pin_notes)
    location = found.manifest.location if found.manifest else ""
    return UploadProgress(*key_of(seen), found.phase, found.detail, location, notes=notes)


def _attempt(
    one: Scanned, work: Callable[[], UploadProgress | None]
) -> tuple[UploadProgress | None, Failure | None]:
    """Return what ``work`` made of a save, or its error as values."""
    try:
        return work(), None
    except Incomplete as e:  # it changed, or others are at it: the next scan may find it quiet
        return _progress(one, "waiting", str(e)), None
    except CkptsyncError as e:
        found = failure(one.seen.run, one.seen.checkpoint_dir.name, e)
        return _progress(one, "failed", str(e)), found
