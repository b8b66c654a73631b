"""Work that a service repeats for as long as it runs, and the rule by which it counts as hung.

A `Task` repeats one function in a thread of its own: an expected error is logged and the function
is tried again, a bug ends the process.  One loop (`run`) starts every task when it is due.  A
`Watchdog` names the tasks that run and have made no progress for too long.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync.errors import CkptsyncError
from ckptsync.service.log import Line, changed, pairs
from ckptsync.stores import progress_signs
from ckptsync.threads import start_thread

DEBOUNCE = 0.3  # seconds that a hint waits for others: a trainer writes many files at once
RETRY = 10.0  # seconds until a task is begun again that got no thread
HUNG = 600.0  # seconds beyond limits.stall: nothing that works is silent for so long
LEAST_BYTES, LEAST_CPU = 64 << 10, 0.1  # that count as progress: a thread that only polls uses less
UNCHECKED = 60.0  # seconds after which the loop that checks is called hung itself
NEVER = float("inf")
_TICKS = os.sysconf("SC_CLK_TCK")

Fatal = Callable[[BaseException], None]
"""Is called with the exception of a bug; ends the process."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a task did, for the log and for `ckptsync status`.

    ``lines``: the present states, of which changes are logged.  ``queue``: the subjects that are
    queued or running.  ``watch``: how each output directory is watched, by its path.  ``lacks``:
    see `WorkerResult`.
    """

    lines: tuple[Line, ...] = ()
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Task:
    """``work`` that is run every ``every`` seconds, and sooner after `at` or `hint`.

    An operator's error (`CkptsyncError`) is logged once per change and counted, and the next run
    tries again.  Anything else is a bug: ``fatal`` gets it, and the process ends, so that its
    supervisor starts it afresh.  Of an outcome's lines only changes are logged.
    """

    def __init__(
        self, name: str, every: float, work: Callable[[], Outcome | None], fatal: Fatal
    ) -> None:
        self.name, self.every = name, every
        self.due = 0.0
        """When it is to run, on the monotonic clock."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the loop that starts this task; set by that loop."""
        self.outcome = Outcome()
        self.error = ""
        """What the last run failed with; empty if it was well."""
        self.failures = self.finished = 0
        self.is_running = False
        self.began = 0.0
        self.thread = 0
        """The kernel's number of the thread that runs it."""
        self._work, self._fatal = work, fatal
        self._log = logging.getLogger(f"ckptsync.{name}")
        self._logged: dict[str, str] = {}
        self._lock = threading.Lock()
        self._go = threading.Semaphore(0)
        self._has_thread = False

    def hint(self) -> None:
        """Make the task due in `DEBOUNCE` seconds.  Several hints lead to one run."""
        self.at(DEBOUNCE)

    def at(self, seconds: float) -> None:
        """Make the task due in that many seconds, unless it is due earlier; wake the loop.

        If it is running now, it runs once more after that.
        """
        with self._lock:
            self.due = min(self.due, time.monotonic() + seconds)
        self.wake()

    def start_if_due(self, now: float) -> None:
        """Run in the task's thread, if it is due and not running.  Never waits, never raises.

        The first call starts the thread.  If none can be had, that is logged as a failure of the
        task, which is due again after `RETRY`.
        """
        with self._lock:
            if self.is_running or now < self.due:
                return
            self.is_running, self.began = True, now
        if not self._has_thread:
            try:
                start_thread(self._serve, self.name)
            except CkptsyncError as e:
                self._failed(e)
                with self._lock:
                    self.is_running, self.due = False, now + RETRY
                return
            self._has_thread = True
        self._go.release()

    def busy(self, now: float) -> float:
        """Return for how many seconds the present run has lasted; 0 if none is running."""
        return max(0.0, now - self.began) if self.is_running else 0.0

    def errors(self) -> tuple[str, ...]:
        """Return the error of the last run, if it failed, and the errors of the last outcome."""
        return (*([f"{self.name}: {self.error}"] if self.error else []), *self.outcome.errors)

    def __call__(self) -> None:
        """Run once, in this thread, and set when it is due next.  Never raises.

        That is ``every`` seconds after this run began, but after a pause as long as the run (at
        most ``every``); sooner after `at`.
        """
        with self._lock:
            self.is_running, self.began, self.due = True, time.monotonic(), NEVER
        self.thread = threading.get_native_id()
        try:
            with progress_signs.attributed_to(self.name):
                self._run()
        finally:
            now = time.monotonic()
            took = now - self.began
            pause = max(self.every - took, min(took, self.every))
            with self._lock:
                self.finished += 1
                self.is_running = False
                self.due = min(self.due, now + pause)
            self.wake()

    def _serve(self) -> None:
        """Run once for each start, for ever; the main function of the task's thread."""
        while self._go.acquire():
            self()

    def _run(self) -> None:
        """Do the work, store its outcome, and log what changed; give a bug to ``fatal``.

        After a failure, or if the work returns None, the outcome before stays.  Sets ``error``.
        """
        try:
            self.outcome = self._work() or self.outcome
            lines, self._logged = changed(self._logged, self.outcome.lines)
            for line in lines:
                line.write(self._log)
        except CkptsyncError as e:
            self._failed(e)
        except BaseException as e:  # noqa: BLE001 - whatever it is, the process ends by it
            self.error = f"{type(e).__name__}: {e}"
            self._fatal(e)
        else:
            if self.error:
                log.info("%s", pairs(task=self.name, phase="recovered", failures=self.failures))
            self.error = ""

    def _failed(self, e: CkptsyncError) -> None:
        """Count and store an operator's error; log it unless the last run had the same text."""
        self.failures += 1
        if str(e) != self.error:
            details = {"exit_code": e.exit_code, "error": e, "hint": e.hint}
            fields = {"task": self.name, "failures": self.failures}
            log.error("%s", pairs(phase="failed", **fields, **details))
        self.error = str(e)


@dataclass(frozen=True, slots=True)
class Activity:
    """Counters of a task or a process, by which progress is recognised.

    ``finished`` runs, ``signs`` of transfers, bytes ``moved``, seconds of ``cpu``.
    """

    finished: int
    signs: int
    moved: int
    cpu: float

    def is_beyond(self, before: Activity) -> bool:
        """Return whether there was progress since ``before``.

        That is another run or sign, or at least `LEAST_BYTES` or `LEAST_CPU`.
        """
        counts, earlier = (self.finished, self.signs), (before.finished, before.signs)
        moved, cpu = self.moved - before.moved, self.cpu - before.cpu
        return counts != earlier or moved >= LEAST_BYTES or cpu >= LEAST_CPU


def progress_of(task: Task) -> Activity:
    """Return the counters of a task's own thread; CPU and bytes are 0 where /proc lacks them."""
    thread = f"/proc/self/task/{task.thread}"
    try:
        stat = Path(f"{thread}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        cpu = (int(stat[11]) + int(stat[12])) / _TICKS
    except OSError:  # it has not begun, or this is no Linux
        cpu = 0.0
    signs = progress_signs.signs_of(task.name)
    return Activity(task.finished, signs, _moved(f"{thread}/io"), cpu)


def progress_of_process() -> Activity:
    """Return the progress of all threads of this process together."""
    return Activity(0, progress_signs.signs(), _moved("/proc/self/io"), time.process_time())


def _moved(path: str) -> int:
    """Return the bytes that a file ``io`` of /proc counts as read and written; 0 if it is absent.

    It is absent or unreadable for a thread that has ended, in some containers, or without Linux.
    """
    try:
        lines = Path(path).read_text("ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


class Watchdog:
    """Names the tasks that run and have made no progress for ``limit`` seconds.

    Progress is the task's own, since uploads that work must not hide a scan that hangs.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.hung: tuple[str, ...] = ()
        """The names of the tasks that hung when `check` was called last."""
        self._clock = clock
        self._checked = clock()
        self._last: dict[str, tuple[Activity, float]] = {}

    def check(self, tasks: Iterable[Task]) -> tuple[str, ...]:
        """Return the names of the running tasks without progress for more than ``limit`` seconds.

        A task counts as idle from the first call that finds it running.  Remembers the counters of
        all running tasks for the next call, and sets ``hung``.
        """
        self._checked = now = self._clock()
        last, self._last = self._last, {}
        for task in tasks:
            if task.is_running:
                progress = progress_of(task)
                before, since = last.get(task.name, (progress, now))
                is_new = progress.is_beyond(before)
                self._last[task.name] = (progress, now) if is_new else (before, since)
        idle_seconds = {name: now - since for name, (_, since) in self._last.items()}
        self.hung = tuple(name for name, seconds in idle_seconds.items() if seconds > self.limit)
        return self.hung

    def unchecked(self) -> float:
        """Return the seconds since `check` was called last, or 0 if that is at most `UNCHECKED`."""
        seconds = self._clock() - self._checked
        return seconds if seconds > UNCHECKED else 0.0
