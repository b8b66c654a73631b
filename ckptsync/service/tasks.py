"""Work that is done again and again, and the one rule by which it is called hung.

A `Task` is one such work inside its error boundary, in a thread of its own.  One loop (`run`)
starts every task when it is due.  A `Watchdog` names those that run and make no progress.
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
"""Takes a bug: the process ends by it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a task has seen and done.

    ``lines``: to log where they are new; the rest is for `ckptsync status`.  ``queue``: what is on
    its way.  ``watch``: how each output directory is watched.  ``lacks``: see `WorkerResult`.
    """

    lines: tuple[Line, ...] = ()
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Task:
    """``work`` that is done every ``every`` seconds, and sooner where `at` or `hint` ask for it.

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
        """Run soon.  Any number of hints is one run."""
        self.at(DEBOUNCE)

    def at(self, seconds: float) -> None:
        """Run in so many seconds, or when it is due before that; if it runs now, once more."""
        with self._lock:
            self.due = min(self.due, time.monotonic() + seconds)
        self.wake()

    def start_if_due(self, now: float) -> None:
        """Run in the task's thread, if it is due and does not run.  Never waits."""
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
        """Return the seconds for which it has been at work; 0 if it rests."""
        return max(0.0, now - self.began) if self.is_running else 0.0

    def errors(self) -> tuple[str, ...]:
        """Return what the last run failed with, and what it found."""
        return (*([f"{self.name}: {self.error}"] if self.error else []), *self.outcome.errors)

    def __call__(self) -> None:
        """Run once, in this thread.  Never raises."""
        with self._lock:
            self.is_running, self.began = True, time.monotonic()
            self.due = self.due if self.due > self.began else NEVER
        self.thread = threading.get_native_id()
        try:
            with progress_signs.attributed_to(self.name):
                self._run()
        finally:
            now = time.monotonic()
            took = now - self.began
            rest = max(self.every - took, min(took, self.every))  # long work rests as long again
            with self._lock:
                self.finished += 1
                self.is_running = False
                self.due = min(self.due, now + rest)
            self.wake()

    def _serve(self) -> None:
        while self._go.acquire():
            self()

    def _run(self) -> None:
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
        """Count an operator's error, and log one that is new."""
        self.failures += 1
        if str(e) != self.error:
            what = {"exit_code": e.exit_code, "error": e, "hint": e.hint}
            where = {"task": self.name, "failures": self.failures}
            log.error("%s", pairs(phase="failed", **where, **what))
        self.error = str(e)


@dataclass(frozen=True, slots=True)
class Activity:
    """How far a task or a process has come: runs, signs of transfers, bytes, seconds of CPU."""

    finished: int
    signs: int
    moved: int
    cpu: float

    def is_beyond(self, before: Activity) -> bool:
        """Return whether there was progress in between."""
        counts, earlier = (self.finished, self.signs), (before.finished, before.signs)
        moved, cpu = self.moved - before.moved, self.cpu - before.cpu
        return counts != earlier or moved >= LEAST_BYTES or cpu >= LEAST_CPU


def progress_of(task: Task) -> Activity:
    """Return a task's own progress: signs that it gave, and what its own thread has done."""
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
    """Return the bytes that were read and written, 0 where a container hides them."""
    try:
        lines = Path(path).read_text("ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


class Watchdog:
    """The one rule: a task that runs must make progress within ``limit`` seconds.

    Progress is the task's own, since uploads that work must not hide a scan that hangs.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.found: tuple[str, ...] = ()
        """The names of the tasks that hung when `check` was called last."""
        self._clock = clock
        self._checked = clock()
        self._last: dict[str, tuple[Activity, float]] = {}

    def check(self, tasks: Iterable[Task]) -> tuple[str, ...]:
        """Return the names of those that have made no progress for too long."""
        self._checked = now = self._clock()
        last, self._last = self._last, {}
        for task in tasks:
            if task.is_running:
                progress = progress_of(task)
                before, since = last.get(task.name, (progress, now))
                is_new = progress.is_beyond(before)
                self._last[task.name] = (progress, now) if is_new else (before, since)
        still = {name: now - since for name, (_, since) in self._last.items()}
        self.found = tuple(name for name, seconds in still.items() if seconds > self.limit)
        return self.found

    def still(self) -> float:
        """Return the seconds for which nobody has checked, 0 while somebody does."""
        still = self._clock() - self._checked
        return still if still > UNCHECKED else 0.0
