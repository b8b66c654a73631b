"""The worker role: scans the output directories that exist now, and uploads finished saves.

Scans, plans and uploads are separate tasks, so that checkpoints are pinned in time even where the
store does not answer.  `WorkerRole.scan` pins and judges without the store: each second it checks
which directories have new or removed names, and scans those; others after `rest_after`.
`WorkerRole.plan` reads the store and queues uploads; each queue uploads in a task of its own.
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


def rest_after(idle_seconds: float, every: float, finishes: float | None = None) -> float:
    """Return the seconds until the next scan or plan.

    Without an unfinished save: ``idle_seconds``, at least ``every``, and at most `LONGEST_REST` if
    that is more.  With one: ``idle_seconds / PATIENCE``, between `UNFINISHED_EVERY` and ``every``;
    or ``finishes``, if that is sooner and not 0.

    Args:
        idle_seconds: since the last change.
        every: the configured interval.
        finishes: seconds until an unfinished save counts as finished if nothing changes; 0 if that
            cannot be told, None if there is no unfinished save.

    """
    if finishes is None:
        return max(every, min(idle_seconds, LONGEST_REST))
    pause = max(UNFINISHED_EVERY, min(every, idle_seconds / PATIENCE))
    return min(pause, finishes or pause)


@dataclass(slots=True)
class _OutputDirectory:
    """One output directory: its worker, its last scan, and when the next one is due.

    Times are on the monotonic clock.  ``folders``: directories in which new names may appear;
    ``state``: of these, before the last scan.
    """

    run: RunDir
    worker: Worker
    last_scan: Scan = field(default_factory=Scan)
    changed_at: float = field(default_factory=time.monotonic)
    next_scan: float = 0.0
    folders: tuple[str, ...] = ()
    state: object = ()

    def has_changed(self) -> bool:
        """Read ``folders``; return whether a name has come or gone in them since the last scan."""
        return directory_states(self.folders) != self.state

    def scan(self, now: float) -> None:
        """Scan now; set ``last_scan``, and ``folders`` and ``state`` as they were before the scan.

        ``now``: monotonic.  Failures are in ``last_scan``.
        """
        folders = directories_to_check(self.run.path)
        # before the scan: the next check sees what comes during it
        state = directory_states(folders)
        self.last_scan = self.worker.scan(now)
        self.folders, self.state = folders, state

    def is_outdated(self) -> bool:
        """Return whether the last scan failed for the whole directory, or `has_changed`.

        Failures of single checkpoints do not count.
        """
        has_failed = any(not failure.checkpoint for failure in self.last_scan.failures)
        return has_failed or self.has_changed()


class WorkerRole:
    """The tasks of a worker, with one `Worker` for each output directory that exists now."""

    def __init__(self, config: Config, node: str, store: Store, fatal: Fatal) -> None:
        """Make the tasks and upload queues; start none, and touch no directory before `begin`."""
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
        self._changed_at, self._outages = time.monotonic(), 0
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
        """Find the output directories, lock their spools and begin to watch them.

        Raises ConfigError if another worker has locked one; also if none can be used, and not only
        because other users can write to them.  That none exists yet is no error.
        """
        for run in output_directories(self._config.worker.runs, self._store.url).runs:
            # one that cannot be used is a problem that each scan reports
            with contextlib.suppress(StoreError, UnsafeSpool):
                self._locks.hold(Path(run.path) / SPOOL)
        self._renew()
        # else other users could end a service
        own_problems = [problem for problem in self._problems if problem not in self._unsafe]
        if own_problems and not self._directories:
            raise ConfigError("; ".join(own_problems), hint="see worker.runs in the configuration")

    def close(self) -> None:
        """End the watch, wait for its threads, and release the locks."""
        if self._watch:
            self._watch.close()
        self._locks.close()

    def runs(self) -> Mapping[str, Path]:
        """Return the output directories by the names of their runs."""
        return {run.name: run.path for run in self._directories}

    def pinned_bytes(self) -> list[tuple[Path, int]]:
        """Return the output directories, each with the bytes of files that only pins still have."""
        return [
            (run.path, directory.worker.pinned_bytes())
            for run, directory in self._directories.items()
        ]

    def running(self) -> Iterator[Progress]:
        """Yield the progress of saves that are not completely stored, and of repairs.

        Directories that were removed count while their worker still uploads.
        """
        offset = time.time() - time.monotonic()
        workers = [directory.worker for directory in self._directories.values()]
        for worker in (*workers, *tuple(self._removed.values())):
            yield from worker.running(offset)

    def hint(self, path: str = "") -> None:
        """Make a scan of the output directory ``path`` due ("": all), in 0.3 s.  Any thread."""
        with self._lock:
            self._hints.add(path)
        self.scanning.hint()

    def scan(self) -> Outcome:
        """Scan each output directory that has a hint, a changed name or an interval that is over.

        Finds the directories anew every `scan_every` seconds, or when a new one has appeared.
        Uploads wait during the scans (``scan_lock``).  Makes a plan due: at once if `Scan.due` is
        0, within `scan_every` after a hint or a changed name.  Sets when the next scan is due.
        Returns the outcome of all directories, with errors, or the last one if nothing was due.
        """
        now, every = time.monotonic(), self._every
        with self._lock:
            hints, self._hints = self._hints, set()
        is_renewed = now >= self._renew_at or directory_states(self._watched) != self._watched_state
        if is_renewed:
            self._renew()
            self._renew_at = now + every
        directories = list(self._directories.values())
        for directory in directories:
            if hints & {"", str(directory.run.path)} or directory.has_changed():
                directory.changed_at = directory.next_scan = self._changed_at = now
        due_directories = [directory for directory in directories if now >= directory.next_scan]
        if not due_directories and not is_renewed:
            return self.scanning.outcome
        with self._queues.scan_lock:
            for directory in due_directories:
                directory.scan(now)
        for directory in due_directories:
            directory.next_scan = now + rest_after(
                now - directory.changed_at, every, directory.last_scan.due
            )
            if directory.last_scan.due == 0:
                self._plan_within(0)
        if self._changed_at == now:
            self._plan_within(every)
        self.scanning.at(
            min((directory.next_scan - now for directory in directories), default=NEVER)
        )
        return self._scanned(directories)

    def carry_logs(self) -> Outcome:
        """Upload the logs of all output directories that have changed; return notes and errors.

        A run's StoreError is one of these errors, and holds up no other run.
        """
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
        """Return the outcome of the last scans of these directories, and the problems of others."""
        scans = [directory.last_scan for directory in directories]
        failures = tuple(failure for scan in scans for failure in scan.failures)
        watch_notes = self._watch.notes() if self._watch else ()
        notes = tuple(
            dict.fromkeys(
                (*watch_notes, *self._notes, *(note for scan in scans for note in scan.notes))
            )
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
        """Find the output directories again; lock and watch those that are new.

        A directory that is no longer named or usable is dropped; if it was removed, its worker is
        kept in ``_removed``, since it may still upload.  If the list has changed, the `Watch` is
        replaced.  Problems are kept for the next outcome.
        """
        self._watched = list_watched(self._config.worker.runs)
        self._watched_state = directory_states(self._watched)  # before the directories are listed
        output_dirs = output_directories(self._config.worker.runs, self._store.url)
        before, after = self._directories, dict[RunDir, _OutputDirectory]()
        problems = [*output_dirs.problems, *output_dirs.unsafe]
        for run in output_dirs.runs:
            run_dir = RunDir(run.name, Path(run.path))
            try:
                self._locks.hold(run_dir.path / SPOOL)
                options = worker_options(self._config, self._node, run_dir)
                after[run_dir] = before.get(run_dir) or _OutputDirectory(
                    run_dir, Worker(options, self._store, self._queues)
                )
            except CkptsyncError as e:
                problems.append(str(e))
        self._problems, self._unsafe = tuple(problems), output_dirs.unsafe
        self._unmatched = list_unmatched(self._config.worker.runs)
        self._removed |= {
            run_dir: directory.worker
            for run_dir, directory in before.items()
            if run_dir not in after and not run_dir.path.is_dir()
        }
        if list(after) != list(before) or self._watch is None:
            if self._watch:
                self._watch.close()
            self._watch = Watch((str(run.path) for run in after), self.hint)
        else:
            self._watch.refresh()
        self._directories = after

    def _plan_within(self, seconds: float) -> None:
        """Make a plan due in that many seconds, unless it is due earlier.  Any thread."""
        with self._lock:
            self._plan_at = min(self._plan_at, time.monotonic() + seconds)
        self.planning.at(seconds)

    def _ended(self) -> None:
        """Have `plan` report in `RESULTS_EVERY` seconds that an upload has ended.  Any thread."""
        self._has_results = True
        self.planning.at(RESULTS_EVERY)

    def plan(self) -> Outcome:
        """Queue uploads if a plan is due, and return the results of all workers.

        If only an upload has ended, this reports results and plans nothing; if neither, it returns
        the last outcome.  The next plan is due after `scan_every`, or, while nothing is queued or
        failed, after `rest_after`, since only the store knows of damage to repair.  After failures
        that may pass it is due after a random, growing pause of at most `LONGEST` seconds.  Memory
        is given back once the queue is empty.
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
        workers = [directory.worker for directory in self._directories.values()]
        sent_saves = tuple(p for worker in workers for p in worker.take_sent())
        results = [worker.result() for worker in workers]
        queue = tuple(item for result in results for item in result.queue)
        errors = (*self._plan_errors, *(error for result in results for error in result.errors))
        if is_due:
            is_idle = not (queue or errors or self._removed)
            with self._lock:
                # a scan may have asked for another
                if is_idle and self._plan_at == next_plan:
                    self._plan_at = now + rest_after(now - self._changed_at, self._every)
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
                *worker_lines(WorkerResult(self._node, sent_saves), {}),
            ),
            queue,
            errors,
            lacks={record: names for result in results for record, names in result.lacks.items()},
        )

    def _plan(self) -> None:
        """Let the worker of every directory plan; the workers of removed ones, too.

        Before that it scans directories whose last scan `is_outdated` and removed ones, and writes
        into each spool which store it belongs to.  Waiting jobs of other directories leave the
        queues.  A CkptsyncError is kept in ``_plan_errors``, and ends the plan of that directory
        only.  Removed directories are dropped when their worker is done, or they exist again; the
        last `NOTES` of their notes are kept.
        """
        self._plan_errors = []
        directories = self._directories
        workers = {run: directory.worker for run, directory in directories.items()}
        self._queues.retain({key for worker in workers.values() for key in worker.queue_keys})
        for run, worker in (*workers.items(), *self._removed.items()):
            try:
                if run not in self._removed:
                    remember(run.path / SPOOL, self._store.url)
                directory = directories.get(run)
                # A save that came after the last scan need not wait for the next plan, and no other
                # task scans a removed directory.  Without `scan_lock`, to which uploads give way:
                # another directory's scan, which may never end, would hold up this plan.
                if directory is None or directory.worker is not worker or directory.is_outdated():
                    worker.scan(time.monotonic())
                worker.plan(time.monotonic())
            except CkptsyncError as e:  # noqa: PERF203 - one directory's failure keeps no other back
                self._plan_errors.append(str(e))
        for run, worker in list(self._removed.items()):
            self._notes = tuple(dict.fromkeys((*self._notes, *worker.notes)))[-NOTES:]
            if worker.is_done or run.path.is_dir():
                self._removed.pop(run, None)


def worker_options(config: Config, node: str, run: RunDir) -> WorkerOptions:
    """Return the options of a `Worker`, from the keys of ``worker`` and `limits.threads`."""
    names = {f.name for f in fields(WorkerOptions)} & {f.name for f in fields(WorkerConfig)}
    keys = {name: getattr(config.worker, name) for name in names}
    return WorkerOptions(node, run, threads=config.limits.threads, **keys)


def _left_out(problems: tuple[str, ...] | list[str]) -> list[Line]:
    """Return an error line for each problem of a directory, its plan or its logs."""
    texts = {problem: pairs(phase="left-out", error=problem) for problem in problems}
    return [Line(f"problem {key}", text, level="error") for key, text in texts.items()]


def give_back_memory() -> None:
    """Have glibc return freed memory to the system: some 20 MB after a large save.

    Does nothing with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):  # musl has no such call, and keeps less
        ctypes.CDLL(None).malloc_trim(0)


def worker_lines(
    result: WorkerResult, running: Mapping[tuple[str, str], Progress]
) -> Iterator[Line]:
    """Yield the log lines of a result: checkpoints, repairs, notes and failures.

    Saves that were stored before have none.  Lost and missed ones, and failures, are errors; what
    has notes, and repairs that were not possible, are warnings.  ``running``: the progress of
    uploads by run and checkpoint, which says until when one waits.
    """
    for save in result.progress:
        if save.phase == "stored":  # `sent` was logged, or it was stored before this process began
            continue
        values: dict[str, object] = {
            "run": save.run,
            "checkpoint": save.checkpoint,
            "location": save.location,
        }
        if save.phase == "sent":
            values |= {"files": save.files, "bytes": save.size}
        elif save.phase in ("waiting", "not-final"):
            # what follows counts seconds
            values["reason"] = save.detail.partition("; finished if")[0]
        elif save.phase != "failed":  # a failure has its own line
            values["detail"] = save.detail
        text = state = pairs(phase=save.phase, **values, notes="; ".join(save.notes))
        entry = running.get((save.run, save.checkpoint))
        if save.phase == "waiting" and entry and entry.until is not None:
            values["until"] = moment(entry.until)
            text = pairs(phase=save.phase, **values, notes="; ".join(save.notes))
        is_lost = save.phase in ("missed", "lost")
        level: Literal["info", "warning", "error"] = "warning" if save.notes else "info"
        level = "error" if is_lost else level
        yield Line(f"checkpoint {save.run}/{save.checkpoint} {save.k}", text, level, state)
    for repair in result.repairs:
        phase = "not-repaired" if repair.reason else "repaired"
        subject = {"run": repair.run, "file": repair.name, "report": repair.report}
        text = pairs(phase=phase, **subject, reason=repair.reason)
        level = "warning" if repair.reason else "info"
        yield Line(f"repair {repair.report} {repair.name}", text, level)
    for note in result.notes:
        yield Line(f"note {note}", pairs(phase="note", detail=note), level="warning")
    for f in result.failures:
        # differs each time, and is no news
        hint = re.sub(r"(; )?given up after [0-9]+ tries in [0-9]+ s$", "", f.hint)
        text = pairs(phase="failed", run=f.run, checkpoint=f.checkpoint, error=f.text, hint=hint)
        yield Line(f"failure {f.run} {f.checkpoint}", text, level="error")
