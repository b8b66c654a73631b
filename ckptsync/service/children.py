"""The head's long work in child processes: what is ordered, what is answered, how many at once, and when what failed is tried again.

A head gives a child its `Brief` on its standard input (never on a command line, nor in the environment, which every user of a machine can see: it holds
keys); the child (`ckptsync.service.child`) answers with lines of JSON.  Each child has a thread here that starts it, hears it and ends it: when it is told
to, when it gets no further (`Bounds.stall`), when it takes too long (`Bounds.deadline`).  A child dies with this process, however that dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from ckptsync.child import TO_DIE, TO_END, Child
from ckptsync.config.schema import Config
from ckptsync.decoding import Decoder
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.fleet.heartbeat import Job
from ckptsync.records.report import Level
from ckptsync.service.log import Line, pairs
from ckptsync.service.periodic import backoff

COMMAND = (sys.executable, "-m", "ckptsync.service.child")
LOOK = 0.25  # seconds between two looks at whether a child is to end
MEMORY = 2 << 30  # bytes of a child's heap and stacks, beyond what transfers may hold: ten times of what any work needs
MORE_STALL = 60.0  # seconds beyond limits.stall: a wait before the next try is no hang
BASE, FLOOR = 900.0, 1_000_000  # seconds of an order of no bytes, and bytes a second beyond which nothing is called slow
SOON, LATE = 60.0, 3600.0
"""Seconds until what passes by itself (a store, a network, a process that was killed) is tried again, see `backoff`; and until
anything else is: bytes, layouts and options stay as they are, unless somebody mends them without a record of it."""
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")

Kind = Literal["consolidate", "verify", "retain"]

log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """``kind`` of work on a ``run``'s ``location``, or on all of them, of ``size`` bytes; ``level`` of a verification; ``now``: seconds on this machine's clock."""

    kind: Kind
    run: str = ""
    location: str = ""
    size: int = 0
    level: Level | None = None
    now: float = 0.0

    @property
    def subject(self) -> str:
        """As people are told."""
        return f"{self.run}/{self.location}" if self.location else self.run or "every run"


class Brief(msgspec.Struct, frozen=True):
    """All that a child is given.  ``parent``: the process that it must not outlive."""

    order: Order
    config: Config
    parent: int


class At(msgspec.Struct, frozen=True, tag="at"):
    """It gets on: ``done`` of ``total`` bytes, 0 where nobody knows."""

    done: int = 0
    total: int = 0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It has ended well.  ``changed``: whether the store is another now; ``errors``: for `ckptsync status`, such as what is damaged."""

    lines: tuple[Line, ...] = ()
    errors: tuple[str, ...] = ()
    changed: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done.  ``passes``: whether that may pass by itself; ``is_ours``: our bug, or a process that was killed."""

    text: str
    hint: str = ""
    exit_code: int = 1
    passes: bool = False
    is_ours: bool = False

    def __str__(self) -> str:
        return self.text


Message = At | Done | Failed
End = Done | Failed

_BRIEF = Decoder(Brief, "an order")
_MESSAGE: Decoder[Message] = Decoder(Message, "a message")  # type: ignore[arg-type]  # a union is no type to mypy


def encode(said: Brief | Message) -> bytes:
    """One line."""
    return msgspec.json.encode(said) + b"\n"


def brief(line: bytes) -> Brief:
    """Raises Corrupt."""
    return _BRIEF.decode(line, "standard input")


def message(line: bytes) -> Message | None:
    """``None`` of what is no message: a child must not be able to harm its parent."""
    try:
        return _MESSAGE.decode(line, "a child")
    except Corrupt:
        return None


def failure(e: CkptsyncError) -> Failed:
    """An operator's error; those of a store or a network pass by themselves."""
    return Failed(str(e), e.hint, e.exit_code, passes=e.exit_code == 4)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds: without any sign of progress, and in all."""

    stall: float
    deadline: float


def bounds(config: Config, order: Order) -> Bounds:
    """Far more than it needs: only what hangs, or never ends, meets them."""
    table = config.limits.bandwidth
    slowest = min((rate for rate in table.rates if rate), default=FLOOR) / config.head.jobs if table else FLOOR
    return Bounds(config.limits.stall + MORE_STALL, BASE + 4 * order.size / min(FLOOR, slowest))


class Children:
    """Those that run.  ``command`` starts one; ``then`` of `begin` is called in the child's own thread when it has ended."""

    def __init__(self, config: Config, command: Sequence[str] = COMMAND) -> None:
        self._config, self._command = config, tuple(command)
        self._lock = threading.Lock()
        self._running: dict[Order, _Running] = {}
        self._is_ending = False

    def begin(self, order: Order, bounds: Bounds, then: Callable[[Order, End], None]) -> bool:
        """Whether it was begun: not while the same is done, nor after `end`."""
        running = _Running(Brief(order, self._config, os.getpid()), bounds, self._command)
        with self._lock:
            if self._is_ending or order in self._running:
                return False
            self._running[order] = running
        threading.Thread(target=self._live, args=(running, then), name=f"{order.kind} {order.subject}", daemon=True).start()
        return True

    def jobs(self) -> tuple[Job, ...]:
        """What is being done, for a heartbeat."""
        with self._lock:
            running = tuple(self._running.items())
        return tuple(Job(o.kind, o.subject, r.at.done, r.at.total or o.size, time.monotonic() - r.began) for o, r in running)

    def are_watched(self) -> bool:
        """Whether none is beyond its bounds: its thread would have ended it."""
        late = time.monotonic() - (TO_END + TO_DIE + 10 * LOOK)
        with self._lock:
            return not any(running.beyond(late) for running in self._running.values())

    def end(self) -> None:
        """Ask all to end; none is begun any more."""
        with self._lock:
            self._is_ending = True
            for running in self._running.values():
                running.is_asked = True

    def _live(self, running: _Running, then: Callable[[Order, End], None]) -> None:
        order = running.brief.order
        try:
            ended = running.live()
        except OSError as e:
            ended = Failed(f"no process can be started: {e.strerror}", is_ours=True)
        with self._lock:
            del self._running[order]
            is_ending = self._is_ending
        if not is_ending:  # what was cut off is no failure
            then(order, ended)


class _Running:
    """One child, in the thread that it dies with."""

    def __init__(self, brief: Brief, bounds: Bounds, command: Sequence[str]) -> None:
        self.brief, self.at, self.is_asked = brief, At(), False
        self.began = self._last = time.monotonic()
        self._bounds, self._command = bounds, command
        self._end: End | None = None

    def beyond(self, now: float) -> str:
        """Which bound it has broken; nothing if none."""
        if now - self.began > self._bounds.deadline:
            return f"not done in {self._bounds.deadline:.0f} s, and killed"
        if now - self._last > self._bounds.stall:
            return f"no progress for {self._bounds.stall:.0f} s, and killed"
        return ""

    def live(self) -> End:
        """From its start to its end.  Raises OSError if it cannot be started."""
        inherited = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_CHILDREN}
        child = Child(self._command, inherited)
        reason = "it was not heard to its end"
        try:
            if self.brief.order.kind != "verify":  # a loader of tensors is limited itself
                child.limit(resource.RLIMIT_DATA, MEMORY + 2 * self.brief.config.limits.memory)
            reason = self._hear(child)
        finally:
            code = child.end(0.0 if reason else LOOK)
        if code is None:
            log.error("%s", pairs(phase="left", child=child.pid, detail="it cannot be killed: a file server that is gone"))
        if reason:
            return Failed(reason, passes=True, is_ours=True)
        return self._end or Failed(_death(code), passes=True, is_ours=True)

    def _hear(self, child: Child) -> str:
        """Give it its brief and listen until it has said all; why it is to be ended before that."""
        with contextlib.suppress(OSError):  # it is dead already: what it said is heard, and how it died its status says
            child.send(encode(self.brief))
        while not self.is_asked:
            if reason := self.beyond(time.monotonic()):
                return reason
            line = child.line(LOOK)
            if line == b"":
                return ""
            if line:
                self._take(line)
        return "the service is stopping"

    def _take(self, line: bytes) -> None:
        said = message(line)
        self._last = time.monotonic()
        if isinstance(said, At):
            self.at = said
        elif said is not None:
            self._end = said


def _death(code: int | None) -> str:
    if code is None or code == -signal.SIGKILL:
        return "its process was killed: the system may have run out of memory"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with status {code}: the log says why"


@dataclass(frozen=True, slots=True)
class Task:
    """An order, and what changes when it may come to another end.  ``lasts``: what was well stays well while the key is the same."""

    order: Order
    key: str
    lasts: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """What became of a task of this ``key``, ``count`` times in succession; nothing ``failed`` if it was well.  ``until``: when it may be tried again."""

    key: str
    until: float
    failed: Failed | None = None
    count: int = 0


def wait_after(before: Wait | None, task: Task, end: End, now: float) -> Wait | None:
    """When what has ended may be tried again, unless its key changes.  Pure."""
    if isinstance(end, Done):
        if task.lasts:
            return Wait(task.key, float("inf"))
        return None if end.changed else Wait(task.key, now + SOON)
    count = before.count + 1 if before and before.failed and before.key == task.key else 1
    seconds = backoff(count, SOON, LATE) if end.passes or end.is_ours else LATE
    return Wait(task.key, now + seconds, end, count)


class Tasks:
    """The tasks of one role: ``most`` at once, each tried again when it is time.  ``hint`` is called when one has ended: there may be more to do."""

    def __init__(self, children: Children, config: Config, most: int, hint: Callable[[], None] = lambda: None) -> None:
        self._children, self._config, self._most, self._hint = children, config, most, hint
        self._lock = threading.Lock()
        self._begun: dict[Order, Task] = {}
        self._waits: dict[str, Wait] = {}
        self._said: dict[str, tuple[str, ...]] = {}

    def begin(self, tasks: Iterable[Task]) -> tuple[str, ...]:
        """Begin as many as there is room for, in their order; the subjects of all that are due, those that are being done among them."""
        tasks = tuple(tasks)
        now, subjects = time.monotonic(), {task.order.subject for task in tasks}
        with self._lock:
            self._waits = {subject: wait for subject, wait in self._waits.items() if subject in subjects}  # all else is well
            due = [t for t in tasks if self._may_begin(t, now)]
            at_work = {order.subject for order in self._begun}
            fresh = [t for t in due if t.order.subject not in at_work][: max(0, self._most - len(at_work))]
            self._begun |= {t.order: t for t in fresh}
        for task in fresh:
            if not self._children.begin(task.order, bounds(self._config, task.order), self._ended):
                with self._lock:
                    del self._begun[task.order]
        return tuple(dict.fromkeys((*sorted(at_work), *(t.order.subject for t in due))))

    def errors(self) -> tuple[str, ...]:
        """Of those that failed and are not due again, what they failed with; what those that were done found."""
        with self._lock:
            failed = [f"{subject}: {wait.failed}" for subject, wait in self._waits.items() if wait.failed]
            return (*failed, *(error for errors in self._said.values() for error in errors))

    def lines(self) -> tuple[Line, ...]:
        """The failures, for the log: each once for as long as it stays the same."""
        with self._lock:
            return tuple(
                Line(f"failed {subject}", pairs(phase="failed", subject=subject, error=w.failed, hint=w.failed.hint), is_error=True)
                for subject, w in self._waits.items()
                if w.failed
            )

    def _may_begin(self, task: Task, now: float) -> bool:
        """Whether it is due: always, if anything has changed since."""
        wait = self._waits.get(task.order.subject)
        return wait is None or wait.key != task.key or now >= wait.until

    def _ended(self, order: Order, end: End) -> None:
        """In the child's own thread.  What was done is logged at once; failures are told by `lines`, where they are new."""
        with self._lock:
            task = self._begun.pop(order)
            wait = wait_after(self._waits.pop(order.subject, None), task, end, time.monotonic())
            if wait:
                self._waits[order.subject] = wait
            self._said.pop(order.subject, None)
            if isinstance(end, Done) and end.errors:
                self._said[order.subject] = end.errors
        if isinstance(end, Done):
            logger = logging.getLogger("ckptsync.verifier" if order.kind == "verify" else "ckptsync.head")
            for line in end.lines:
                line.write(logger)
        self._hint()
