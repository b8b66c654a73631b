"""Work that is done again and again, and what runs it: a loop on monotonic time for the worker, APScheduler for head and verifier.

A `Periodic` is one such work inside its error boundary.  `looping` and `scheduled` run any number of them, each in a thread of its own, never two of one
at a time, and `backoff` says when what has failed is tried again.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeVar

from ckptsync.errors import CkptsyncError
from ckptsync.service.log import Line, changed, pairs

if TYPE_CHECKING:
    from apscheduler.schedulers.background import BackgroundScheduler

DEBOUNCE = 0.3  # seconds that a hint waits for others: a trainer writes many files at once
LEAST_JUMP = 2.0  # seconds by which a wall clock is set at once; NTP slews by half a millisecond a second

T = TypeVar("T")

log = logging.getLogger(__name__)


def backoff(tries: int, first: float, longest: float) -> float:
    """Return the seconds until what has failed so many times in succession is tried again: doubled each time."""
    return min(longest, first * 2.0 ** min(tries - 1, 32))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a role has seen and done: ``lines`` to log where they are new, the rest for `ckptsync status`.

    ``oldest``: since when the first of the ``queue`` waits, in seconds of the monotonic clock.  ``watch``: how each output directory is watched.
    ``is_held_up``: something failed that may succeed in a moment.  ``lacks``: what reports want of this node, and it has no more.
    """

    lines: tuple[Line, ...] = ()
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    oldest: float | None = None
    watch: Mapping[str, str] = field(default_factory=dict)
    is_held_up: bool = False
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Periodic:
    """``work`` that is done every ``every`` seconds, and when it is hinted at.

    An operator's error (`CkptsyncError`) is logged once per change and counted, and the next run tries again.  Anything else is our bug: ``fatal`` is
    told, and the process ends, so that its supervisor starts it afresh.  Of what ``work`` says only changes are logged.
    """

    def __init__(self, name: str, every: float, work: Callable[[], Outcome | None], fatal: Callable[[BaseException], None]) -> None:
        self.name, self.every = name, every
        self.soon: Callable[[float], None] = lambda _: None
        """Runs it within so many seconds; set by what runs it."""
        self.outcome = Outcome()
        self.error = ""
        """What the last run failed with; empty if it was well."""
        self.failures = self.finished = 0
        self.is_running = False
        self.began = 0.0
        """When it was last begun, on the monotonic clock."""
        self.thread = 0
        """The kernel's number of the thread that runs it, or did last."""
        self._work, self._fatal = work, fatal
        self._log = logging.getLogger(f"ckptsync.{name}")
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()
        self._wanted: float | None = None

    def __call__(self) -> None:
        """Run once.  Never raises."""
        with self._lock:
            self.is_running, self.thread, self.began = True, threading.get_native_id(), time.monotonic()
            if self._wanted is not None and self._wanted <= time.monotonic():
                self._wanted = None
        try:
            self._run()
        finally:
            with self._lock:
                self.finished += 1
                self.is_running = False
                wanted = self._wanted
            if wanted is not None:
                self.soon(max(0.0, wanted - time.monotonic()))

    def hint(self) -> None:
        """Run soon; once more if it is running, since it may have looked already.  Any number of hints is one."""
        self.at(DEBOUNCE)

    def at(self, seconds: float) -> None:
        """Run in so many seconds, or earlier: of several wishes the first counts; those that came while it ran, once it has ended."""
        wanted = time.monotonic() + seconds
        with self._lock:
            if self._wanted is not None and self._wanted <= wanted:
                return
            self._wanted = wanted
            if self.is_running:
                return
        self.soon(seconds)

    def busy(self, now: float) -> float:
        """Seconds for which it has been at work; 0 if it rests."""
        return max(0.0, now - self.began) if self.is_running else 0.0

    def errors(self) -> tuple[str, ...]:
        """What the last run failed with, and what it found."""
        return (*([f"{self.name}: {self.error}"] if self.error else []), *self.outcome.errors)

    def _run(self) -> None:
        try:
            self.outcome = self._work() or self.outcome
            lines, self._said = changed(self._said, self.outcome.lines)
            for line in lines:
                line.write(self._log)
        except CkptsyncError as e:
            self.failures += 1
            if str(e) != self.error:
                told = pairs(tick=self.name, failures=self.failures, exit_code=e.exit_code, error=e, hint=e.hint)
                log.error("%s", told)  # noqa: TRY400 - the operator's error needs no traceback
            self.error = str(e)
        except BaseException as e:  # noqa: BLE001 - whatever it is, the process ends by it
            self.error = f"{type(e).__name__}: {e}"
            self._fatal(e)
        else:
            if self.error:
                log.info("%s", pairs(tick=self.name, phase="recovered", failures=self.failures))
            self.error = ""


@contextmanager
def looping(works: Iterable[Periodic]) -> Iterator[None]:
    """Run each of them at once and then every ``every`` seconds of monotonic time, until the block ends; running ones are not waited for."""
    loops = [_Loop(work) for work in works]
    try:
        for loop in loops:
            loop.begin()
        yield
    finally:
        for loop in loops:
            loop.end()


class _Loop:
    """Waits in poll(2) for a pipe: `Event.wait` counts wall time where Python was built without sem_clockwait(3), as the common standalone builds are."""

    def __init__(self, work: Periodic) -> None:
        self._work, self._due, self._is_ending = work, 0.0, False
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)
        self._thread = threading.Thread(target=self._run, name=work.name, daemon=True)

    def begin(self) -> None:
        self._work.soon = self._soon
        self._thread.start()

    def end(self) -> None:
        self._work.soon = lambda _: None
        with self._lock:
            self._is_ending = True
            self._wake()

    def _soon(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        with self._lock:
            if due < self._due:
                self._due = due
                self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # the pipe is full of other wakes
        except OSError:
            if not self._is_ending:  # the thread has ended, and closed it
                raise

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        while not self._is_ending:
            left = self._due - time.monotonic()
            if left > 0:
                if ready.poll(left * 1000):
                    os.read(self._reader, 4096)
                continue
            self._once()
        with self._lock:
            os.close(self._reader)
            os.close(self._writer)

    def _once(self) -> None:
        """Work that took longer than its period rests as long as that."""
        began = time.monotonic()
        with self._lock:
            self._due = float("inf")
        self._work()
        took = time.monotonic() - began
        self._soon(max(self._work.every - took, min(took, self._work.every)))


@contextmanager
def scheduled(works: Iterable[Periodic]) -> Iterator[Callable[[], None]]:
    """Have APScheduler run each of them at once and then every ``every`` seconds, until the block ends; running ones are not waited for.

    It counts wall time: set back by an hour, nothing would run for an hour.  Whoever sees that clock jump (`Clocks`) calls what this gives, which runs
    everything now.
    """
    works = tuple(works)
    scheduler = _scheduler(works) if works else None

    def again() -> None:
        for work in works:
            work.soon(0)

    try:
        yield again
    finally:
        for work in works:
            work.soon = lambda _: None
        if scheduler:
            scheduler.shutdown(wait=False)


def _scheduler(works: tuple[Periodic, ...]) -> BackgroundScheduler:
    from apscheduler.executors.pool import ThreadPoolExecutor  # noqa: PLC0415 - a worker alone does without, and without its memory
    from apscheduler.schedulers.background import BackgroundScheduler  # noqa: PLC0415

    scheduler = BackgroundScheduler(
        executors={"default": ThreadPoolExecutor(len(works))},
        job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        timezone=timezone.utc,
        daemon=True,
    )

    def soon(name: str) -> Callable[[float], None]:
        return lambda seconds: scheduler.modify_job(name, next_run_time=_in(seconds))

    for work in works:
        scheduler.add_job(work, "interval", seconds=work.every, id=work.name, next_run_time=_in(0))
        work.soon = soon(work.name)
    scheduler.start()
    return scheduler


def _in(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


class Clocks:
    """The wall clock beside the monotonic one, which nobody sets."""

    def __init__(self) -> None:
        self._apart = time.time() - time.monotonic()
        self.notes: tuple[str, ...] = ()
        """What has jumped since the start; the last few."""

    def jumped(self) -> float:
        """Seconds by which the wall clock was set since the last call, forwards or (below zero) back; 0 if it was not."""
        apart = time.time() - time.monotonic()
        by, self._apart = apart - self._apart, apart
        if abs(by) < LEAST_JUMP:
            return 0.0
        self.notes = (*self.notes, f"the clock jumped by {by:+.0f} s at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}")[-3:]
        return by


def in_background(ask: Callable[[], T]) -> Future[T]:
    """Begin what may never come to an end, in a thread that the end of the process cuts short: it must be safe to."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as e:  # noqa: BLE001 - raised again where it is asked for
            answer.set_exception(e)

    threading.Thread(target=run, name="background", daemon=True).start()
    return answer
