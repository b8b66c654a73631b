"""Run the long work of head and verifier as ckptsync commands in child processes.

A thread that hangs cannot be killed, and a process can.  So `Jobs` starts ``ckptsync … -c FILE
--progress json`` for each job, reads its progress and its result, kills it when the service stops,
when it makes no progress or takes too long, and decides when a failed job is tried again.  The same
command can be typed by hand.  Keys are in the configuration file and in the environment, never on a
command line.  A child dies with this process, however it dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec

from ckptsync.child import Child, describe_end
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.head.due_jobs import Job, JobKind
from ckptsync.quantities import backoff
from ckptsync.records.progress import Progress, State
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.service.log import Line, pairs
from ckptsync.threads import start_thread
from ckptsync.typed_json import Decoder

COMMAND = (sys.executable, "-m", "ckptsync")
LISTEN = 0.25  # seconds between two checks whether a child must end
TO_EXIT = 2.0  # seconds that a child has after its result: threads may still wait for a store
MEMORY = 2 << 30  # bytes of a child's heap beside its transfers: ten times what any job needs
NICER = 5  # than the head, which decides what is to be done
OOM_FIRST = 200  # added to the OOM score: where memory runs out, a child goes before the head
MORE_STALL = 60.0  # seconds beyond limits.stall: a wait before the next try is no hang
BASE, FLOOR = 900.0, 1_000_000  # deadline: seconds without bytes; bytes a second that count as slow
SOON, LATE = 60.0, 3600.0
"""Seconds until a failed job is tried again.  `SOON`, then doubled: what may pass by itself (a
store, a network, a killed process).  `LATE`: bytes, layouts and options do not change themselves.
"""
PASSING = frozenset({1, 2, 3, 4})
"""Exit codes of what may pass: no memory or threads, a configuration that is being edited or names
a store that is away, something that is missing or another head's model, a store."""
OTHERS = "other jobs go first"
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
_LIMIT = 64 << 20  # bytes of a line

log = logging.getLogger(__name__)


class JobProgress(msgspec.Struct, frozen=True):
    """How far a command is: ``done`` of ``total`` bytes; 0 if the total is unknown."""

    done: int
    total: int


_Entry = dict[str, Any]


class CommandResult(msgspec.Struct, frozen=True):
    """The last line of a command: what it prints with ``--json``, or its error.

    ``models`` are of `consolidate`, ``reports`` and ``errors`` of `verify`, ``done`` and ``failed``
    of `gc`, ``events`` of `events run`.
    """

    exit_code: int
    error: str = ""
    hint: str = ""
    models: tuple[_Entry, ...] = ()
    reports: tuple[_Entry, ...] = ()
    errors: tuple[_Entry, ...] = ()
    done: tuple[_Entry, ...] = ()
    failed: tuple[_Entry, ...] = ()
    events: tuple[_Entry, ...] = ()

    @property
    def is_change(self) -> bool:
        """Return whether the command wrote to the store."""
        has_run = any(not e["was_done"] for e in self.events)
        return has_run or bool(
            self.models or self.done or any(r.get("recorded") for r in self.reports)
        )

    def lines(self) -> Iterator[Line]:
        """Yield the log lines of what the command did: models, recorded reports, events, deletions.

        A damaged report is an error with a line for each finding. ``errors``, ``failed`` have none.
        """
        name_keys = ("run", "location")
        for m in self.models:
            counts = {"files": len(m["files"]), "bytes": m["bytes"], "notes": "; ".join(m["notes"])}
            yield Line("", pairs(phase="consolidated", **_some(m, *name_keys), **counts))
        for r in (r for r in self.reports if r["recorded"]):
            level: Literal["error", "info"] = "error" if r["verdict"] == "damaged" else "info"
            # `level` is the line's own
            verdict = {**_some(r, *name_keys), "check": r["level"], **_some(r, "verdict", "read")}
            yield Line("", pairs(phase="verified", **verdict), level)
            for f in r["findings"] if level == "error" else ():
                values = {
                    "run": r["run"],
                    "kind": f["kind"],
                    "file": f["name"],
                    "detail": f["detail"],
                }
                yield Line(
                    "", pairs(phase="found", **values, tensors=",".join(f["tensors"])), level
                )
        for e in (e for e in self.events if not e["was_done"]):
            keys = ("run", "location", "name", "event", "seconds", "note")
            measured = {f"metric {name}": value for name, value in e["metrics"].items()}
            yield Line("", pairs(phase="event", **_some(e, *keys), **measured))
        for d in self.done:
            phase = d["outcome"].replace(" ", "-")
            done = _some(d, *name_keys, "scope", "files", "bytes", "reason")
            yield Line("", pairs(phase=phase, **done))


def _some(entry: _Entry, *keys: str) -> _Entry:
    """Return an entry with these keys only."""
    return {key: entry[key] for key in keys}


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Why a job failed.  ``passes``: a retry may succeed; ``command`` repeats it."""

    text: str
    hint: str = ""
    passes: bool = False
    command: str = ""

    def __str__(self) -> str:
        """Return the text."""
        return self.text


JobEnd = CommandResult | JobFailed
_LINES: tuple[Decoder[Any], ...] = (
    Decoder(JobProgress, "progress"),
    Decoder(CommandResult, "a result", _LIMIT),
)


def decode_line(line: bytes) -> JobProgress | CommandResult | None:
    """Return the progress or the result in a line of a child, or None of any other line."""
    for decoder in _LINES:
        with contextlib.suppress(Corrupt):
            message: JobProgress | CommandResult = decoder.decode(line, "a child")
            return message
    return None


def end_of(result: CommandResult) -> JobEnd:
    """Return the first failure of a command, or the result itself if it did not fail.

    Damage that a verification found is no failure: its report says it.
    """
    if result.error:
        return JobFailed(result.error, result.hint, result.exit_code in PASSING)
    for first in result.errors[:1]:
        return JobFailed(first["error"], first["hint"], first["exit_code"] in PASSING)
    return result


def bounds(config: Config, job: Job) -> tuple[float, float]:
    """Return the longest time without progress and the deadline of a job, in seconds.

    The deadline is `BASE` and ``job.seconds``; or, if that is 0, four times what its bytes take at
    `FLOOR`, or at the lowest rate of `limits.bandwidth`, shared by `head.jobs`, if that is slower.
    """
    stall = config.limits.stall + MORE_STALL
    if job.seconds:
        return stall, job.seconds + BASE
    table = config.limits.bandwidth
    rates = [rate / config.head.jobs for rate in table.rates if rate] if table else []
    return stall, BASE + 4 * job.size / min([FLOOR, *rates])


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a job waits after its last end: while its ``key`` is this one, ``until`` then.

    ``until`` is on the monotonic clock.  ``failed``: why it failed, if it did; ``count``: how often
    in succession.
    """

    key: str
    until: float
    failed: JobFailed | None = None
    count: int = 0


def wait_after(before: Wait | None, job: Job, end: JobEnd, now: float) -> Wait | None:
    """Return how long a job that has ended waits, or None if it need not.  Pure.

    After a failure that may pass it waits `SOON` seconds, doubled with each failure in succession
    with the same key, up to `LATE`; after others `LATE`.  A job that changed nothing waits `SOON`;
    one that runs once for a key waits forever.
    """
    if isinstance(end, CommandResult):
        if job.once_per_key:
            return Wait(job.key, float("inf"))
        return None if end.is_change else Wait(job.key, now + SOON)
    count = before.count + 1 if before and before.key == job.key else 1
    seconds = backoff(count, SOON, LATE) if end.passes else LATE
    return Wait(job.key, now + seconds, end, count)


_Name = tuple[JobKind, str]


class Jobs:
    """Runs jobs in child processes, ``most`` of each kind at once.

    ``ended`` is called, in the child's own thread, after each job: there may be more to do.
    ``command``: the words before those of a job.
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
        self._running: dict[_Name, _JobProcess] = {}
        self._waits: dict[_Name, Wait] = {}
        # what `begin` was given last, and since when: what is due, or waits after a failure
        self._jobs: dict[_Name, tuple[Job, float]] = {}
        self._due: dict[JobKind, frozenset[str]] = {}
        self._errors: dict[_Name, tuple[str, ...]] = {}

    def begin(self, kind: JobKind, jobs: Iterable[Job]) -> tuple[str, ...]:
        """Begin as many of the due jobs as may run at once; return the subjects due or running.

        A job is due unless it waits after its last end.  ``jobs`` are all jobs of this kind, in the
        order in which they are begun: waits of any other are forgotten, since its cause is gone.
        Each has a thread; without one it has failed. After `end` none begins.
        """
        jobs = tuple(jobs)
        subjects, now = {job.subject for job in jobs}, time.monotonic()
        with self._lock:
            for name in [n for n in self._waits if n[0] == kind and n[1] not in subjects]:
                del self._waits[name]
            waits = [(job, self._waits.get((kind, job.subject))) for job in jobs]
            due_jobs = [
                job for job, wait in waits if not wait or wait.key != job.key or now >= wait.until
            ]
            since = {name: began for name, (_, began) in self._jobs.items()}
            due_or_failed = [
                job for job, wait in waits if job in due_jobs or (wait and wait.failed)
            ]
            other_kinds = {name: job for name, job in self._jobs.items() if name[0] != kind}
            self._jobs = other_kinds | {
                (kind, job.subject): (job, since.get((kind, job.subject), now))
                for job in due_or_failed
            }
            self._due[kind] = frozenset(job.subject for job in due_jobs)
            running = sorted(
                subject for running_kind, subject in self._running if running_kind == kind
            )
            idle = [job for job in due_jobs if job.subject not in running]
            free_slots = 0 if self._is_ending else max(0, self._most[kind] - len(running))
            for job in idle[:free_slots]:
                name = (kind, job.subject)
                self._running[name] = child = _JobProcess(job, self._config, self._command)
                try:
                    start_thread(partial(self._run, child), f"{kind} {job.subject}")
                except CkptsyncError as e:
                    # else it would count as running, and never be tried again
                    del self._running[name]
                    self._record_wait(child, JobFailed(str(e), e.hint, passes=True))
        return tuple(dict.fromkeys((*running, *(job.subject for job in due_jobs))))

    def _record_wait(self, child: _JobProcess, end: JobEnd) -> None:
        """Record how long a job that has ended waits before it runs again (`wait_after`).

        Remove its wait if it need not.  A failure gets the command that repeats it.  The caller
        holds the lock.
        """
        name = (child.job.kind, child.job.subject)
        if isinstance(end, JobFailed):
            end = replace(end, command=shlex.join(child.words))
        before = self._waits.pop(name, None)
        if wait := wait_after(before, child.job, end, time.monotonic()):
            self._waits[name] = wait

    def errors(self, kind: JobKind) -> tuple[str, ...]:
        """Return the present failures of a kind, and the partial failures in its last results."""
        failed = [f"{subject}: {end} (`{end.command}`)" for subject, end in self._failed(kind)]
        with self._lock:
            more = [e for name, errors in self._errors.items() if name[0] == kind for e in errors]
        return (*failed, *more)

    def lines(self, kind: JobKind) -> tuple[Line, ...]:
        """Return the present failures, for the log, each with the command that repeats it."""
        return tuple(
            Line(
                f"failed {subject}",
                pairs(
                    phase="failed", subject=subject, error=end, hint=end.hint, command=end.command
                ),
                level="error",
            )
            for subject, end in self._failed(kind)
        )

    def _failed(self, kind: JobKind) -> list[tuple[str, JobFailed]]:
        """Return the subjects of a kind whose last end was a failure, with that failure."""
        with self._lock:
            waits = list(self._waits.items())
        return [(name[1], w.failed) for name, w in waits if name[0] == kind and w.failed]

    def running(self) -> tuple[Progress, ...]:
        """Return the progress of the jobs that run now, for a heartbeat."""
        with self._lock:
            children = list(self._running.values())
        return tuple(
            replace(_entry(c.job, "running", c.began), done=c.progress.done, total=c.progress.total)
            for c in children
        )

    def waiting(self) -> tuple[Progress, ...]:
        """Return the jobs that are due and have not begun, and those that failed and wait.

        A failed one has the time of its next try, or None if only a new key brings one.
        """
        with self._lock:
            jobs = [
                (n, *job_and_time)
                for n, job_and_time in self._jobs.items()
                if n not in self._running
            ]
            waits, due_subjects = dict(self._waits), dict(self._due)
        entries = []
        for name, job, since in jobs:
            wait, entry = waits.get(name), _entry(job, "queued", since)
            if wait and wait.failed:
                until = wall(wait.until) if wait.until != float("inf") else None
                entry = replace(entry, state="failed", reason=str(wait.failed), until=until)
                entries.append(replace(entry, hint=wait.failed.hint))
            elif job.subject in due_subjects.get(name[0], ()):
                entries.append(replace(entry, reason=OTHERS))
        return tuple(entries)

    def end(self) -> None:
        """Request the end of all children, without waiting; no job is begun after this."""
        with self._lock:
            self._is_ending = True
            for child in self._running.values():
                child.must_end = True

    def _run(self, child: _JobProcess) -> None:
        """Run one child to its end, in its own thread, and store how it ended.  Never raises.

        Logs a result, and a bug, which counts as a failure, as critical; `lines` has failures. Then
        calls ``ended``. Once `end` was called, nothing of this is done.
        """
        job = child.job
        name = (job.kind, job.subject)
        try:
            end = child.run()
        except OSError as e:
            end = JobFailed(f"no process can be started: {e.strerror}", passes=True)
        except Exception as e:  # else the job would count as running, and never be tried again
            log.critical("%s %s", job.kind, job.subject, exc_info=e)
            hint = "this is a bug: the log has the traceback"
            end = JobFailed(f"{type(e).__name__}: {e}", hint, passes=True)
        with self._lock:
            del self._running[name]
            if self._is_ending:  # what was cut off is no failure
                return
            self._errors.pop(name, None)
            if isinstance(end, CommandResult):
                self._jobs.pop(name, None)
            if isinstance(end, CommandResult) and end.failed:
                names = [f"{f['run']}/{f['location']}".rstrip("/") for f in end.failed]
                errors = zip(names, end.failed, strict=True)
                self._errors[name] = tuple(f"{location}: {f['error']}" for location, f in errors)
            self._record_wait(child, end)
        if isinstance(end, CommandResult):  # what failed is logged by `lines`, where it is new
            role = "verifier" if job.kind == "verify" else "head"
            for line in end.lines():
                line.write(logging.getLogger(f"ckptsync.{role}"))
        self._ended(job)


class _JobProcess:
    """The child process of one job.

    ``progress``: the last that it printed.  ``must_end``: set by another thread to have it killed.
    """

    def __init__(self, job: Job, config: Config, command: Sequence[str]) -> None:
        """Prepare the command, its limit of memory and its deadlines; start nothing."""
        self.job, self.progress, self.must_end = job, JobProgress(0, 0), False
        self.words = job.command(config.file)
        self.began = time.monotonic()
        self._command, self._memory = command, MEMORY + 2 * config.limits.memory
        self._stall, self._deadline = bounds(config, job)

    def run(self) -> JobEnd:
        """Start the command, read its lines until it ends or must end, and return how it ended.

        A child that is killed, or ends without a result, has failed, and a retry may succeed.
        After its result it has `TO_EXIT` seconds to exit.  Sets ``progress`` with each line of
        progress.  Raises OSError if no process can be started.
        """
        environment = {k: v for k, v in os.environ.items() if k not in _SYSTEMD}
        _, name, *arguments = self.words
        child = Child([*self._command, name, "--progress", "json", *arguments], environment)
        end: JobEnd | None = None
        reason = "the head stopped listening to the child process"
        try:
            child.go_behind(NICER, OOM_FIRST)
            # a loader of tensors has its own limit, and a program of the operator's none
            if self.job.kind not in ("verify", "event"):
                child.limit(resource.RLIMIT_DATA, self._memory)
            last = time.monotonic()
            while not (reason := self._reason_to_end(last)) and end is None:
                line = child.line(LISTEN)
                if line == b"":
                    break
                if line:
                    last, message = time.monotonic(), decode_line(line)
                    if isinstance(message, JobProgress):
                        self.progress = message
                    elif message is not None:
                        end = end_of(message)
        finally:
            code = child.end(0.0 if reason else TO_EXIT)
        if code is None:
            detail = "the child process cannot be killed: its file server does not answer"
            log.error("%s", pairs(phase="left", child=child.pid, detail=detail))
        if reason or end is None:
            return JobFailed(reason or _describe_death(code), passes=True)
        return end

    def _reason_to_end(self, last: float) -> str:
        """Return why the child must be killed now: a request, the deadline, no progress; or "".

        ``last``: when it sent its last line, on the monotonic clock.
        """
        now = time.monotonic()
        if self.must_end:
            return "the service is stopping"
        if now - self.began > self._deadline:
            return f"killed: no result after {self._deadline:.0f} s"
        if now - last > self._stall:
            return f"killed: no progress for {self._stall:.0f} s"
        return ""


def _entry(job: Job, state: State, since: float) -> Progress:
    """Return a job as an entry of a heartbeat; ``since`` is on the monotonic clock."""
    return Progress(
        kind=job.kind,
        state=state,
        run=job.run,
        checkpoint=checkpoint_of(job.location) if job.location else "",
        location=job.location,
        since=wall(since),
        name=f"{job.name} ({job.event})" if job.name else "",
    )


def wall(monotonic: float) -> float:
    """Return a time of the monotonic clock as seconds since the epoch."""
    return max(0.0, monotonic + time.time() - time.monotonic())


def _describe_death(code: int | None) -> str:
    """Return how a child ended that gave no result; ``code`` is None if it could not be killed."""
    if code is None or code == -signal.SIGKILL:
        return "its process was killed: the system may have run out of memory"
    return f"its process {describe_end(code)}{': the log says why' if code >= 0 else ''}"
