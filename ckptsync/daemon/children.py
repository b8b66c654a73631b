"""Long work in processes of its own, which can be killed as a thread cannot.

Each child has a thread here that starts it, hears it and ends it: when it is told to, when it gets no further (`Bounds.stall`), when it takes
too long (`Bounds.deadline`).  First SIGTERM, then SIGKILL to its whole group.  A child dies with this process, however that dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.config.schema import Config
from ckptsync.daemon import orders
from ckptsync.daemon.orders import At, Brief, End, Failed, Order
from ckptsync.daemon.phases import pairs
from ckptsync.fleet.heartbeat import Job

PACKAGES = str(Path(__file__).parents[2])
COMMAND = (sys.executable, "-m", "ckptsync.daemon.child")
TO_END = 2.0  # seconds between SIGTERM and SIGKILL
TO_DIE = 5.0  # after SIGKILL: what hangs in a dead file server may not, and is left to itself
LOOK = 0.25
LINE = 16 << 20  # bytes of an answer
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds: without any sign of progress, and in all."""

    stall: float
    deadline: float


class Children:
    """Those that run.  ``command`` starts one; ``then`` of `begin` is called in the child's own thread when it has ended."""

    def __init__(self, config: Config, command: Sequence[str] = COMMAND) -> None:
        self._config, self._command = config, tuple(command)
        self._lock = threading.Lock()
        self._running: dict[Order, _Child] = {}
        self._is_ending = False

    def begin(self, order: Order, bounds: Bounds, then: Callable[[Order, End], None]) -> bool:
        """Whether it was begun: not while the same is done, nor after `end`."""
        child = _Child(self._command, Brief(order, self._config, os.getpid()), bounds)
        with self._lock:
            if self._is_ending or order in self._running:
                return False
            self._running[order] = child
        threading.Thread(target=self._live, args=(child, then), name=f"{order.kind} {order.subject}", daemon=True).start()
        return True

    def jobs(self) -> tuple[Job, ...]:
        """What is being done, for a heartbeat."""
        with self._lock:
            children = tuple(self._running.items())
        return tuple(Job(o.kind, o.subject, c.at.done, c.at.total or o.size, time.monotonic() - c.began) for o, c in children)

    def are_watched(self) -> bool:
        """Whether none is beyond its bounds: its thread would have ended it."""
        with self._lock:
            return not any(child.is_beyond(TO_END + TO_DIE + 10 * LOOK) for child in self._running.values())

    def end(self) -> None:
        """Ask all to end; none is begun any more."""
        with self._lock:
            self._is_ending = True
            for child in self._running.values():
                child.is_asked = True

    def _live(self, child: _Child, then: Callable[[Order, End], None]) -> None:
        order = child.brief.order
        try:
            ended = child.lived()
        except OSError as e:
            ended = Failed(f"no process can be started: {e.strerror}", is_ours=True)
        with self._lock:
            del self._running[order]
            is_ending = self._is_ending
        if not is_ending:  # what was cut off is no failure
            then(order, ended)


class _Child:
    def __init__(self, command: Sequence[str], brief: Brief, bounds: Bounds) -> None:
        self.brief, self.at, self.is_asked = brief, At(), False
        self.began = self._last = time.monotonic()
        self._command, self._bounds = command, bounds
        self._end: End | None = None

    def is_beyond(self, more: float) -> bool:
        return bool(self._broken(time.monotonic() - more))

    def lived(self) -> End:
        """From its start to its end, in the thread that it dies with."""
        with subprocess.Popen(  # noqa: S603 - no shell, our own module
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",  # not where the service is: what lies there must not be imported
            env=_environment(os.environ),
            start_new_session=True,  # a group to kill, and no Ctrl-C of ours
        ) as process:
            reason = ""
            try:
                self._brief(process)
                reason = self._heard(process)
            finally:
                is_dead = _ended(process)
                if not is_dead:
                    _let_go_of(process)
        if not is_dead:
            log.error("%s", pairs(phase="left", child=process.pid, detail="it cannot be killed: a file server that is gone"))
        if reason:
            return Failed(reason, passes=True, is_ours=True)
        return self._end or Failed(_death(process.returncode), passes=True, is_ours=True)

    def _brief(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # it is dead already: how, its status says
            process.stdin.write(orders.encode(self.brief))
            process.stdin.close()

    def _heard(self, process: subprocess.Popen[bytes]) -> str:
        """Until it has said all; or why it was ended before."""
        assert process.stdout
        source = process.stdout.fileno()
        ready = select.poll()
        ready.register(source, select.POLLIN)
        left = b""
        while not self.is_asked:
            if reason := self._broken(time.monotonic()):
                return reason
            if not ready.poll(LOOK * 1000):
                continue
            data = os.read(source, 65536)
            if not data:
                return ""
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                self._take(line)
            if len(left) > LINE:
                return "it said too much"
        return "the service is stopping"

    def _take(self, line: bytes) -> None:
        said = orders.message(line)
        self._last = time.monotonic()
        if isinstance(said, At):
            self.at = said
        elif said is not None:
            self._end = said

    def _broken(self, now: float) -> str:
        """Which bound is; nothing if none."""
        if now - self.began > self._bounds.deadline:
            return f"not done in {self._bounds.deadline:.0f} s, and killed"
        if now - self._last > self._bounds.stall:
            return f"no progress for {self._bounds.stall:.0f} s, and killed"
        return ""


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (PACKAGES, own.get("PYTHONPATH"))))
    return {**{key: value for key, value in own.items() if key not in _NOT_FOR_CHILDREN}, "PYTHONPATH": path}


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """End it and all of its group; whether it is dead.  It is waited for last: until then its group's number is nobody else's."""
    if not _is_over(process, LOOK):
        _kill(process, signal.SIGTERM)
        _is_over(process, TO_END)
    _kill(process, signal.SIGKILL)  # and what it may have started
    is_dead = _is_over(process, TO_DIE)
    if is_dead:
        process.wait()
    return is_dead


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of its group
        os.killpg(process.pid, number)


def _is_over(process: subprocess.Popen[bytes], patience: float) -> bool:
    until = time.monotonic() + patience
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _let_go_of(process: subprocess.Popen[bytes]) -> None:
    """Leaving a `Popen` waits for it, but for one that is said to have ended."""
    process.returncode = -signal.SIGKILL


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed: the system may have run out of memory"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with status {code}: the log says why"
