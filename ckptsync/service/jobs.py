"""The long work of head and verifier, in child processes.

`Jobs` starts them, listens to them and ends them: when the service stops, when one makes no
progress, when one takes too long.  It also decides when a job that failed is tried again.  A child
(`ckptsync.service.job_process`) reads its `JobBrief` from its standard input, never from its
command line or environment, which other users can see: it holds keys.  It answers with lines of
JSON.  A child dies with this process, however this process dies.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from ckptsync.catalogue.child_job import Job, JobKind
from ckptsync.child import Child
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.quantities import backoff
from ckptsync.service.log import Line, pairs
from ckptsync.status.heartbeat import RunningJob
from ckptsync.threads import start_thread
from ckptsync.typed_json import Decoder

COMMAND = (sys.executable, "-m", "ckptsync.service.job_process")
LISTEN = 0.25  # seconds between two checks whether a child must end
MEMORY = 2 << 30  # bytes of a child's heap beside its transfers: ten times what any job needs
MORE_STALL = 60.0  # seconds beyond limits.stall: a wait before the next try is no hang
BASE, FLOOR = 900.0, 1_000_000  # deadline: seconds without bytes; bytes a second that count as slow
SOON, LATE = 60.0, 3600.0
"""Seconds until a failed job is tried again.  `SOON`, then doubled: what may pass by itself (a
store, a network, a killed process).  `LATE`: bytes, layouts and options do not change themselves.
"""
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")

log = logging.getLogger(__name__)


class JobBrief(msgspec.Struct, frozen=True):
    """All that a child is given.  ``parent``: the process that it must not outlive."""

    job: Job
    config: Config
    parent: int


class JobProgress(msgspec.Struct, frozen=True, tag="at"):
    """Progress of a job: ``done`` of ``total`` bytes; 0 if the total is unknown."""

    done: int = 0
    total: int = 0


class JobDone(msgspec.Struct, frozen=True, tag="done"):
    """A job that succeeded.

    ``changed``: it wrote to the store; ``errors``: shown by `ckptsync status`.
    """

    lines: tuple[Line, ...] = ()
    errors: tuple[str, ...] = ()
    changed: bool = False


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A job that failed.

    ``passes``: a retry may succeed; ``is_ours``: a bug or a killed process.
    """

    text: str
    hint: str = ""
    exit_code: int = 1
    passes: bool = False
    is_ours: bool = False

    def __str__(self) -> str:
        return self.text


Message = JobProgress | JobDone | JobFailed
JobEnd = JobDone | JobFailed

_BRIEF = Decoder(JobBrief, "a brief")
_MESSAGE: Decoder[Message] = Decoder(Message, "a message")  # type: ignore[arg-type]  # a union is no type to mypy


def encode(message: JobBrief | Message) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def decode_brief(line: bytes) -> JobBrief:
    """Return the brief of a line; raises Corrupt."""
    return _BRIEF.decode(line, "standard input")


def decode_message(line: bytes) -> Message | None:
    """Return the message of a line, or ``None``: a child must not be able to harm its parent."""
    try:
        return _MESSAGE.decode(line, "a child")
    except Corrupt:
        return None


def failure(e: CkptsyncError) -> JobFailed:
    """Return the end that an operator's error is; errors of a store or a network may pass."""
    return JobFailed(str(e), e.hint, e.exit_code, passes=e.exit_code == 4)


def bug(e: Exception) -> JobFailed:
    """Return the end that any other error is: the caller logs it."""
    hint = "this is a bug: the log has the traceback"
    return JobFailed(f"{type(e).__name__}: {e}", hint, is_ours=True)


def bounds(config: Config, job: Job) -> tuple[float, float]:
    """Return seconds that only a job exceeds that hangs or never ends: without progress, in all."""
    table = config.limits.bandwidth
    rates = [rate / config.head.jobs for rate in table.rates if rate] if table else []
    return config.limits.stall + MORE_STALL, BASE + 4 * job.size / min([FLOOR, *rates])


@dataclass(frozen=True, slots=True)
class Wait:
    """The last end of a job with this ``key``, and ``until`` when it is not tried again.

    ``count``: how often it has ``failed`` in succession.
    """

    key: str
    until: float
    failed: JobFailed | None = None
    count: int = 0


def wait_after(before: Wait | None, job: Job, end: JobEnd, now: float) -> Wait | None:
    """Return how long a job that has ended waits, unless its key changes.  Pure."""
    if isinstance(end, JobDone):
        if job.once_per_key:
            return Wait(job.key, float("inf"))
        return None if end.changed else Wait(job.key, now + SOON)
    is_again = before is not None and before.failed is not None and before.key == job.key
    count = before.count + 1 if before and is_again else 1
    seconds = backoff(count, SOON, LATE) if end.passes or end.is_ours else LATE
    return Wait(job.key, now + seconds, end, count)


_Name = tuple[JobKind, str]


class Jobs:
    """Runs jobs in child processes, ``most`` of each kind at once.

    ``ended`` is called, in the child's own thread, after each job: there may be more to do.
    """

    def __init__(
        self,
        config: Config,
        most: Mapping[JobKind, int],
        ended: Callable[[Job], None] = lambda _: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._config, self._most, self._ended, self._command = config, most, ended, command
        self._lock = threading.Lock()
        self._is_ending = False
        self._running: dict[_Name, _Running] = {}
        self._waits: dict[_Name, Wait] = {}
        self._found: dict[_Name, tuple[str, ...]] = {}

    def begin(self, kind: JobKind, jobs: Iterable[Job]) -> tuple[str, ...]:
        """Begin as many of these jobs as there is room for, in their order.

        Returns the subjects of all that are due or running.  ``jobs`` must be all jobs of this
        kind: waits of others are dropped, since their cause is gone.
        """
        jobs = tuple(jobs)
        subjects, now = {job.subject for job in jobs}, time.monotonic()
        with self._lock:
            for name in [n for n in self._waits if n[0] == kind and n[1] not in subjects]:
                del self._waits[name]
            waits = [(job, self._waits.get((kind, job.subject))) for job in jobs]
            due = [job for job, w in waits if not w or w.key != job.key or now >= w.until]
            running = sorted(subject for which, subject in self._running if which == kind)
            idle = [job for job in due if job.subject not in running]
            room = 0 if self._is_ending else max(0, self._most[kind] - len(running))
            for job in idle[:room]:
                child = _Running(JobBrief(job, self._config, os.getpid()), self._command)
                self._running[kind, job.subject] = child
                title = f"{kind} {job.subject}"
                try:
                    start_thread(partial(self._run, child), title)
                except (
                    CkptsyncError
                ) as e:  # else it would count as running, and never be tried again
                    del self._running[kind, job.subject]
                    before = self._waits.get((kind, job.subject))
                    end = msgspec.structs.replace(failure(e), is_ours=True)
                    if wait := wait_after(before, job, end, now):
                        self._waits[kind, job.subject] = wait
        return tuple(dict.fromkeys((*running, *(job.subject for job in due))))

    def errors(self, kind: JobKind) -> tuple[str, ...]:
        """Return why jobs failed that are not well yet, and what those that ended well found."""
        failed = [f"{subject}: {end}" for subject, end in self._failed(kind)]
        with self._lock:
            found = [e for name, errors in self._found.items() if name[0] == kind for e in errors]
        return (*failed, *found)

    def lines(self, kind: JobKind) -> tuple[Line, ...]:
        """Return the present failures, for the log."""
        return tuple(
            Line(
                f"failed {subject}",
                pairs(phase="failed", subject=subject, error=end, hint=end.hint),
                level="error",
            )
            for subject, end in self._failed(kind)
        )

    def _failed(self, kind: JobKind) -> list[tuple[str, JobFailed]]:
        with self._lock:
            waits = list(self._waits.items())
        return [(name[1], w.failed) for name, w in waits if name[0] == kind and w.failed]

    def running(self) -> tuple[RunningJob, ...]:
        """Return what children do now, for a heartbeat."""
        with self._lock:
            children = list(self._running.items())
        now = time.monotonic()
        return tuple(
            RunningJob(kind, subject, c.at.done, c.at.total or c.brief.job.size, now - c.began)
            for (kind, subject), c in children
        )

    def end(self) -> None:
        """Ask all children to end; no other is begun."""
        with self._lock:
            self._is_ending = True
            for child in self._running.values():
                child.must_end = True

    def _run(self, child: _Running) -> None:
        """Run one child from its start to its end, in its own thread."""
        job = child.brief.job
        name = (job.kind, job.subject)
        try:
            end = child.run()
        except OSError as e:
            end = JobFailed(f"no process can be started: {e.strerror}", is_ours=True)
        except Exception as e:  # else the job would count as running, and never be tried again
            log.critical("%s %s", job.kind, job.subject, exc_info=e)
            end = bug(e)
        with self._lock:
            del self._running[name]
            if self._is_ending:  # what was cut off is no failure
                return
            self._found.pop(name, None)
            if isinstance(end, JobDone) and end.errors:
                self._found[name] = end.errors
            if wait := wait_after(self._waits.pop(name, None), job, end, time.monotonic()):
                self._waits[name] = wait
        if isinstance(end, JobDone):  # what failed is logged by `lines`, where it is new
            role = "verifier" if job.kind == "verify" else "head"
            for line in end.lines:
                line.write(logging.getLogger(f"ckptsync.{role}"))
        self._ended(job)


class _Running:
    """One child process."""

    def __init__(self, brief: JobBrief, command: Sequence[str]) -> None:
        self.brief, self.at, self.must_end = brief, JobProgress(), False
        self.began = time.monotonic()
        self._command = command
        self._stall, self._deadline = bounds(brief.config, brief.job)

    def run(self) -> JobEnd:
        """Give the child its brief and listen to it until it ends, or must end."""
        child = Child(self._command, {k: v for k, v in os.environ.items() if k not in _SYSTEMD})
        end: JobEnd | None = None
        reason = "the head stopped listening to the child process"
        try:
            if self.brief.job.kind != "verify":  # a loader of tensors has its own limit
                child.limit(resource.RLIMIT_DATA, MEMORY + 2 * self.brief.config.limits.memory)
            with contextlib.suppress(OSError):  # it is dead already: its status says how it died
                child.send(encode(self.brief))
            last = time.monotonic()
            while not (reason := self._reason_to_end(last)):
                line = child.line(LISTEN)
                if line == b"":
                    break
                if line:
                    last, message = time.monotonic(), decode_message(line)
                    if isinstance(message, JobProgress):
                        self.at = message
                    else:
                        end = message or end
        finally:
            code = child.end(0.0 if reason else LISTEN)
        if code is None:
            detail = "the child process cannot be killed: its file server does not answer"
            log.error("%s", pairs(phase="left", child=child.pid, detail=detail))
        if reason or end is None:
            return JobFailed(reason or _death(code), passes=True, is_ours=True)
        return end

    def _reason_to_end(self, last: float) -> str:
        """Return why the child must end now, or "".  ``last``: when it sent its last line."""
        now = time.monotonic()
        if self.must_end:
            return "the service is stopping"
        if now - self.began > self._deadline:
            return f"killed: no result after {self._deadline:.0f} s"
        if now - last > self._stall:
            return f"killed: no progress for {self._stall:.0f} s"
        return ""


def _death(code: int | None) -> str:
    if code is None or code == -signal.SIGKILL:
        return "its process was killed: the system may have run out of memory"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:  # most real-time signals have no name
            name = f"signal {-code}"
        return f"its process was killed by {name}"
    return f"its process ended with status {code}: the log says why"
