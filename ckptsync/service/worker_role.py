"""The worker role: it scans the output directories that exist now, and uploads what is finished.

`WorkerRole.scan` pins and judges, and asks no store: each second it checks where a name has come
or gone, and scans there, and elsewhere when the interval of `rest_after` is over.
`WorkerRole.plan` gives what is due to the upload queues; it asks the store, so it is a task of its
own: a store that does not answer must not keep anything from being pinned.  Each queue uploads in
a task of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal

from ckptsync.config.output_dirs import list_unmatched, list_watched, output_directories
from ckptsync.config.schema import Config, WorkerConfig
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.quantities import backoff
from ckptsync.records.progress import Progress
from ckptsync.service.directory_changes import directories_to_check, directory_states
from ckptsync.service.fs_events import Watch
from ckptsync.service.log import Line, moment, pairs, shown
from ckptsync.service.process_control import Locks
from ckptsync.service.store_connection import remember
from ckptsync.service.tasks import NEVER, Fatal, Outcome, Task
from ckptsync.stores.contract import Store
from ckptsync.walk import SPOOL, UnsafeSpool
from ckptsync.worker.logs import RunLogs
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.queue import UploadQueues
from ckptsync.worker.results import WorkerResult
from ckptsync.worker.scanner import Scan
from ckptsync.worker.worker import NOTES, Worker

CHECK_EVERY = 1.0  # seconds between two checks whether a name has come or gone, at least
CHECKS = 30  # in each `scan_every`, at most: who has very many directories sets that
RESULTS_EVERY = 0.5  # seconds that the end of an upload waits for others, before all are reported
LOGS_EVERY = 2  # times `scan_every` between two looks at logs
UNFINISHED_EVERY = 0.5  # seconds between scans while a save grows, which moves no directory
PATIENCE = 20  # part of the time since anything moved that the next scan of a save may wait
LONGEST_REST = 300.0  # seconds between scans, or plans; on a shared disk a pin whose worker has not
# scanned for `scanner.DEAD_AFTER` is taken over
FIRST, LONGEST = 2.0, 15.0  # seconds until a store that is away is tried again, see `backoff`


def rest_after(still: float, every: float, finishes: float | None = None) -> float:
    """Return the seconds until the next scan or plan, ``still`` seconds after the last change.

    That is ``every``, and then twice as long each time, up to `LONGEST_REST`; less while a save is
    not finished.  ``finishes``: seconds until one is, if nothing changes.
    """
    if finishes is None:
        return max(every, min(still, LONGEST_REST))
    rest = max(UNFINISHED_EVERY, min(every, still / PATIENCE))
    return min(rest, finishes or rest)


@dataclass(slots=True)
class _OutputDirectory:
    """One output directory: what the last scan found, and when the next one is due."""

    run: RunDir
    worker: Worker
    found: Scan = field(default_factory=Scan)
    moved: float = field(default_factory=time.monotonic)
    due: float = 0.0
    folders: tuple[str, ...] = ()  # in which new names may appear, and their state at the last scan
    state: object = ()

    def has_moved(self) -> bool:
        """Return whether a name has come or gone since the last scan."""
        return directory_states(self.folders) != self.state

    def scan(self, now: float) -> None:
        folders = directories_to_check(self.run.path)
        # before the scan: the next check sees what comes during it
        state = directory_states(folders)
        self.found = self.worker.scan(now)
        self.folders, self.state = folders, state

    def is_outdated(self) -> bool:
        """Return whether another scan may find other things than the last one.

        It failed, or a name came or went since.
        """
        has_failed = any(not failure.checkpoint for failure in self.found.failures)
        return has_failed or self.has_moved()


class WorkerRole:
    """A `Worker` for each output directory that is there, so that one may come and go meanwhile."""

    def __init__(self, config: Config, node: str, store: Store, fatal: Fatal) -> None:
        self._config, self._node, self._store = config, node, store
        self._every = every = config.worker.scan_every
        self._locks = Locks(node)
        self._watch: Watch | None = None
        self._hints: set[str] = set()
        self._directories: dict[RunDir, _OutputDirectory] = {}
        # of directories that have gone: they may still upload
        self._removed: dict[RunDir, Worker] = {}
        self._watched: tuple[str, ...] = ()
        self._watched_state: object = None
        self._renew_at = 0.0
        self._problems: tuple[str, ...] = ()
        self._unmatched: tuple[str, ...] = ()
        self._unsafe: Collection[str] = ()
        self._notes: tuple[str, ...] = ()  # of removed directories
        self._plan_errors: list[str] = []
        self._lock = threading.Lock()
        self._plan_at = 0.0
        self._moved, self._outages = time.monotonic(), 0
        self.scanning = Task("scan", max(CHECK_EVERY, every / CHECKS), self.scan, fatal)
        self.planning = Task("worker", every, self.plan, fatal)
        self._queues = UploadQueues(config.limits.threads)
        self._queues.ended = self._ended
        self._has_results = False
        self.uploading = tuple(
            Task(f"upload-queue-{n}", NEVER, queue.run_next, fatal)
            for n, queue in enumerate(self._queues.queues, 1)
        )
        for queue, task in zip(self._queues.queues, self.uploading, strict=True):
            queue.wake = partial(task.at, 0.0)
        self._logs: dict[RunDir, RunLogs] = {}
        self.carrying = (
            (Task("logs", LOGS_EVERY * every, self.carry_logs, fatal),)
            if config.worker.logs
            else ()
        )

    def begin(self) -> None:
        """Find the output directories.

        Raises ConfigError if one is another worker's, or none may be used.
        """
        for run in output_directories(self._config.worker.runs, self._store.url).runs:
            # one that cannot be used is a problem that each scan reports
            with contextlib.suppress(StoreError, UnsafeSpool):
                self._locks.hold(Path(run.path) / SPOOL)
        self._renew()
        # else other users could end a service
        ours = [problem for problem in self._problems if problem not in self._unsafe]
        if ours and not self._directories:
            raise ConfigError("; ".join(ours), hint="see worker.runs in the configuration")

    def close(self) -> None:
        """Release watches and locks."""
        if self._watch:
            self._watch.close()
        self._locks.close()

    def runs(self) -> Mapping[str, Path]:
        """Return the output directories by the names of their runs."""
        return {run.name: run.path for run in self._directories}

    def held(self) -> list[tuple[Path, int]]:
        """Return the output directories, each with the bytes that only our pins still hold."""
        return [(run.path, one.worker.pinned_bytes()) for run, one in self._directories.items()]

    def running(self) -> Iterator[Progress]:
        """Yield each save that the store does not have whole, in heartbeats' words."""
        offset = time.time() - time.monotonic()
        workers = [one.worker for one in self._directories.values()]
        for worker in (*workers, *tuple(self._removed.values())):
            yield from worker.running(offset)

    def hint(self, path: str = "") -> None:
        """Have an output directory scanned soon, in which something was written.

        "": all of them.
        """
        with self._lock:
            self._hints.add(path)
        self.scanning.hint()

    def scan(self) -> Outcome:
        """Check what has moved, and scan what is due."""
        now, every = time.monotonic(), self._every
        with self._lock:
            hints, self._hints = self._hints, set()
        is_renewed = now >= self._renew_at or directory_states(self._watched) != self._watched_state
        if is_renewed:
            self._renew()
            self._renew_at = now + every
        directories = list(self._directories.values())
        for one in directories:
            if hints & {"", str(one.run.path)} or one.has_moved():
                one.moved = one.due = self._moved = now
        due = [one for one in directories if now >= one.due]
        if not due and not is_renewed:
            return self.scanning.outcome
        with self._queues.scan_lock:
            for one in due:
                one.scan(now)
        for one in due:
            one.due = now + rest_after(now - one.moved, every, one.found.due)
            if one.found.due == 0:
                self._plan_within(0)
        if self._moved == now:
            self._plan_within(every)
        self.scanning.at(min((one.due - now for one in directories), default=NEVER))
        return self._scanned(directories)

    def carry_logs(self) -> Outcome:
        """Send the logs that have changed; one directory's error keeps no other back."""
        notes, errors = list[str](), list[str]()
        self._logs = {
            run: self._logs.get(run) or RunLogs(run, self._node, self._store)
            for run in tuple(self._directories)
        }
        for run, logs in self._logs.items():
            try:
                notes += logs.carry()
            except StoreError as e:  # noqa: PERF203 - as above
                errors.append(f"logs of {run.name}: {e}")
        lines = [
            Line(f"note {note}", pairs(phase="note", detail=note), level="warning")
            for note in notes
        ]
        return Outcome((*_left_out(errors), *lines), errors=tuple(errors), notes=tuple(notes))

    def _scanned(self, directories: list[_OutputDirectory]) -> Outcome:
        """Return what the last scans have seen."""
        found = [one.found for one in directories]
        failures = tuple(failure for scan in found for failure in scan.failures)
        lost = self._watch.notes() if self._watch else ()
        notes = tuple(
            dict.fromkeys((*lost, *self._notes, *(note for scan in found for note in scan.notes)))
        )
        result = WorkerResult(self._node, failures=failures, notes=notes)
        return Outcome(
            (*_left_out(self._problems), *worker_lines(result, {})),
            errors=(*self._problems, *result.errors),
            notes=(*self._unmatched, *notes),
            watch=(
                {shown(path): mode for path, mode in self._watch.modes().items()}
                if self._watch
                else {}
            ),
        )

    def _renew(self) -> None:
        """Find the output directories again; one that cannot be used holds up no other."""
        self._watched = list_watched(self._config.worker.runs)
        self._watched_state = directory_states(self._watched)  # before the directories are listed
        found = output_directories(self._config.worker.runs, self._store.url)
        before, after = self._directories, dict[RunDir, _OutputDirectory]()
        problems = [*found.problems, *found.unsafe]
        for run in found.runs:
            at = RunDir(run.name, Path(run.path))
            try:
                self._locks.hold(at.path / SPOOL)
                options = worker_options(self._config, self._node, at)
                after[at] = before.get(at) or _OutputDirectory(
                    at, Worker(options, self._store, self._queues)
                )
            except CkptsyncError as e:
                problems.append(str(e))
        self._problems, self._unsafe = tuple(problems), found.unsafe
        self._unmatched = list_unmatched(self._config.worker.runs)
        self._removed |= {
            at: one.worker for at, one in before.items() if at not in after and not at.path.is_dir()
        }
        if list(after) != list(before) or self._watch is None:
            if self._watch:
                self._watch.close()
            self._watch = Watch((str(run.path) for run in after), self.hint)
        else:
            self._watch.refresh()
        self._directories = after

    def _plan_within(self, seconds: float) -> None:
        """Plan in so many seconds, or when that is due before."""
        with self._lock:
            self._plan_at = min(self._plan_at, time.monotonic() + seconds)
        self.planning.at(seconds)

    def _ended(self) -> None:
        """Report, in a moment, that an upload has ended."""
        self._has_results = True
        self.planning.at(RESULTS_EVERY)

    def plan(self) -> Outcome:
        """Give what is due to the queues, if it is time for that; report what became of everything.

        After an upload has ended it is called early, and only reports results.  Plans come when a
        save is finished, every `scan_every` while something is on its way, and after `rest_after`
        else: some work only the store knows, such as damage to repair.
        """
        now = time.monotonic()
        next_plan = now + self._every
        with self._lock:
            is_due = now >= self._plan_at
            self._plan_at = next_plan if is_due else self._plan_at
        if not (is_due or self._has_results):
            return self.planning.outcome
        self._has_results = False
        if is_due:
            self._plan()
        workers = [one.worker for one in self._directories.values()]
        sent = tuple(p for worker in workers for p in worker.take_sent())
        results = [worker.result() for worker in workers]
        queue = tuple(item for result in results for item in result.queue)
        errors = (*self._plan_errors, *(error for result in results for error in result.errors))
        if is_due:
            is_idle = not (queue or errors or self._removed)
            with self._lock:
                # a scan may have asked for another
                if is_idle and self._plan_at == next_plan:
                    self._plan_at = now + rest_after(now - self._moved, self._every)
        if not any(failure.may_pass for result in results for failure in result.failures):
            self._outages = 0
        elif self._plan_at - now > LONGEST:
            # nodes whose store went away together must not come back together
            self._outages += 1
            self._plan_within(backoff(self._outages, FIRST, LONGEST) * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        if self.planning.outcome.queue and not queue:
            give_back_memory()
        running = {(p.run, p.checkpoint): p for p in self.running() if p.kind == "upload"}
        return Outcome(
            (
                *_left_out(self._plan_errors),
                *(line for result in results for line in worker_lines(result, running)),
                *worker_lines(WorkerResult(self._node, sent), {}),
            ),
            queue,
            errors,
            lacks={record: names for result in results for record, names in result.lacks.items()},
        )

    def _plan(self) -> None:
        """Plan for every directory."""
        self._plan_errors = []
        directories = self._directories
        workers = {run: one.worker for run, one in directories.items()}
        self._queues.retain({key for worker in workers.values() for key in worker.queue_keys})
        for run, worker in (*workers.items(), *self._removed.items()):
            try:
                if run not in self._removed:
                    remember(run.path / SPOOL, self._store.url)
                one = directories.get(run)
                # A save that came after the last scan need not wait for the next plan, and no other
                # task scans a removed directory.  Without `scan_lock`, to which uploads give way:
                # another directory's scan, which may never end, would hold up this plan.
                if one is None or one.worker is not worker or one.is_outdated():
                    worker.scan(time.monotonic())
                worker.plan(time.monotonic())
            except CkptsyncError as e:  # noqa: PERF203 - one directory's failure keeps no other back
                self._plan_errors.append(str(e))
        for run, worker in list(self._removed.items()):
            self._notes = tuple(dict.fromkeys((*self._notes, *worker.notes)))[-NOTES:]
            if worker.is_done or run.path.is_dir():
                self._removed.pop(run, None)


def worker_options(config: Config, node: str, run: RunDir) -> WorkerOptions:
    """Return the options of a `Worker`, from the keys of ``worker`` and the threads."""
    names = {f.name for f in fields(WorkerOptions)} & {f.name for f in fields(WorkerConfig)}
    keys = {name: getattr(config.worker, name) for name in names}
    return WorkerOptions(node, run, threads=config.limits.threads, **keys)


def _left_out(problems: tuple[str, ...] | list[str]) -> list[Line]:
    texts = {problem: pairs(phase="left-out", error=problem) for problem in problems}
    return [Line(f"problem {key}", text, level="error") for key, text in texts.items()]


def give_back_memory() -> None:
    """Return freed memory to the system.

    glibc keeps what threads have freed, some 20 MB after a large save.
    """
    with contextlib.suppress(OSError, AttributeError):  # musl has no such call, and keeps less
        ctypes.CDLL(None).malloc_trim(0)


def worker_lines(
    result: WorkerResult, running: Mapping[tuple[str, str], Progress]
) -> Iterator[Line]:
    """Yield the log lines of phases of checkpoints, of repairs and of failures.

    ``running``: by run and checkpoint, what of it waits, why and until when.
    """
    for p in result.progress:
        if p.phase == "stored":  # `sent` was logged, or it was stored before this process began
            continue
        what: dict[str, object] = {"run": p.run, "checkpoint": p.checkpoint, "location": p.location}
        if p.phase == "sent":
            what |= {"files": p.files, "bytes": p.size}
        elif p.phase in ("waiting", "not-final"):
            what["reason"] = p.detail.partition("; finished if")[0]  # what follows counts seconds
        elif p.phase != "failed":  # a failure has its own line
            what["detail"] = p.detail
        text = state = pairs(phase=p.phase, **what, notes="; ".join(p.notes))
        entry = running.get((p.run, p.checkpoint))
        if p.phase == "waiting" and entry and entry.until is not None:
            what["until"] = moment(entry.until)
            text = pairs(phase=p.phase, **what, notes="; ".join(p.notes))
        is_lost = p.phase in ("missed", "lost")
        level: Literal["info", "warning", "error"] = "warning" if p.notes else "info"
        level = "error" if is_lost else level
        yield Line(f"checkpoint {p.run}/{p.checkpoint} {p.k}", text, level, state)
    for repair in result.repairs:
        phase = "not-repaired" if repair.reason else "repaired"
        where = {"run": repair.run, "file": repair.name, "report": repair.report}
        text = pairs(phase=phase, **where, reason=repair.reason)
        level = "warning" if repair.reason else "info"
        yield Line(f"repair {repair.report} {repair.name}", text, level)
    for note in result.notes:
        yield Line(f"note {note}", pairs(phase="note", detail=note), level="warning")
    for f in result.failures:
        # differs each time, and is no news
        hint = re.sub(r"(; )?given up after [0-9]+ tries in [0-9]+ s$", "", f.hint)
        text = pairs(phase="failed", run=f.run, checkpoint=f.checkpoint, error=f.text, hint=hint)
        yield Line(f"failure {f.run} {f.checkpoint}", text, level="error")
