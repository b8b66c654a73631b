"""The program of a child process that does one job: ``python -m ckptsync.service.job_process``.

It reads a `JobBrief` from standard input, and writes a line to standard output whenever it has made
progress, and one at its end.  What libraries print goes to the log.  Only this program imports what
merges and verifies, so that the head stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from ckptsync.catalogue.child_job import Job, JobKind
from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.schema import Config, LimitsConfig
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.service import jobs
from ckptsync.service.jobs import JobDone, JobEnd, JobFailed, JobProgress, Message
from ckptsync.service.log import Line, configure, pairs
from ckptsync.service.tasks import progress_of_process
from ckptsync.stores import progress_signs
from ckptsync.stores.opening import open_store
from ckptsync.threads import start_thread

if TYPE_CHECKING:
    from ckptsync.head.consolidate import WrittenModel
    from ckptsync.head.removal import RemovalOutcome
    from ckptsync.records.report import Report
    from ckptsync.stores.contract import Store

BEAT = 1.0  # seconds between two checks for progress
NICER = 5  # than the head, which decides what is to be done
OOM_FIRST = 200  # added to the OOM score: where memory runs out, this process goes before the head
BUDGET = 600.0  # seconds after which retention begins with no other location; 900 is its deadline
LEAST_MEMORY = 16 << 20  # bytes: two parts of an upload
WINDOW = 6 << 20  # bytes that a merge has in flight for each thread: several work beside the head
_PR_SET_PDEATHSIG = 1

Progress = Callable[[int, int], None]
"""Takes bytes done, and of how many."""

log = logging.getLogger(__name__)


class Ended(BaseException):
    """SIGTERM: the work is left as after SIGKILL, except for drafts that can be removed."""


def main() -> int:
    """Do one job; the exit status is 0 if there is an answer, also if that is a failure."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        brief = jobs.decode_brief(sys.stdin.buffer.readline())
        die_with(brief.parent)
        signal.signal(signal.SIGTERM, _on_term)
        os.nice(NICER)
        with contextlib.suppress(OSError, ValueError):  # no Linux, or nobody may raise it
            score = Path("/proc/self/oom_score_adj")
            score.write_text(str(min(1000, int(score.read_text()) + OOM_FIRST)))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory holds the store's keys
        configure(brief.config.log)
        answers = _Answers(out)
        answers.send(_result_of(brief.job, brief.config, answers))
    os._exit(0)  # threads of a job that failed may still wait for a store


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, where it can."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux: children outlive a killed head
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _on_term(_number: int, _frame: object) -> NoReturn:
    progress_signs.announce_shutdown()
    raise Ended


def _result_of(job: Job, config: Config, answers: _Answers) -> JobEnd:
    try:
        with answers.beating():
            return run_job(job, config, answers.note)
    except CkptsyncError as e:
        return jobs.failure(e)
    except MemoryError:
        why = "it needs more memory than a child process of the head may have"
        return JobFailed(why, is_ours=True)
    except Ended:
        return JobFailed("the service is stopping", passes=True)
    except Exception as e:
        log.critical("%s %s", job.kind, job.subject, exc_info=e)
        return jobs.bug(e)


class _Answers:
    """Lines to the head, from two threads."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock, self._at = out, threading.Lock(), JobProgress()

    def send(self, message: Message) -> None:
        with self._lock:
            self._out.write(jobs.encode(message))
            self._out.flush()

    def note(self, done: int, total: int) -> None:
        """Take down how far the work is; the next beat sends it."""
        self._at = JobProgress(done, total)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Within the block, send a line each second in which there was progress."""
        over = threading.Event()

        def beat() -> None:
            before, sent = progress_of_process(), self._at
            while not over.wait(BEAT):
                now, at = progress_of_process(), self._at
                if at != sent or now.is_beyond(before):
                    self.send(at)
                    before, sent = now, at

        start_thread(beat, "beat")
        try:
            yield
        finally:
            over.set()


def run_job(job: Job, config: Config, progress: Progress) -> JobDone:
    """Run one job in this process; raises CkptsyncError."""
    url = config.store.url
    try:
        store = open_store(url, options_for(url, config.store.options), limits_of(share(config)))
    except ConfigError as e:  # the head has it open: it has gone meanwhile, and will be back
        raise StoreError(str(e), hint=e.hint) from e
    return _WORK[job.kind](store, job, config, progress)


def share(config: Config) -> LimitsConfig:
    """Return the part of the limits that is one child's: all children and the head share them."""
    limits, count = config.limits, config.head.jobs
    table = limits.bandwidth
    rates = tuple(rate and rate / count for rate in table.rates) if table else ()
    memory = max(min(limits.memory, LEAST_MEMORY), limits.memory // (count + 4))
    return replace(limits, bandwidth=replace(table, rates=rates) if table else None, memory=memory)


def _consolidate(store: Store, job: Job, config: Config, progress: Progress) -> JobDone:
    from ckptsync.head import consolidate  # noqa: PLC0415
    from ckptsync.merge.plan import MergeOptions, MergeResources  # noqa: PLC0415

    head, url, cluster = config.head, config.store.url, None
    # the cluster that Ray's own variable names, or that this machine is in
    if head.engine == "ray":
        address = os.environ.get("RAY_ADDRESS", "auto")
        access = options_for(url, config.store.options)
        cluster = consolidate.RayCluster(address, url, access, limits_of(config.limits))
    merge = MergeOptions(head.dtype, head.max_shard_size, allow_code=head.allow_code)
    options = consolidate.HeadOptions(merge, head.config_from, cluster)
    work = MergeResources(head.threads, window=WINDOW)
    made = consolidate.consolidate_location(
        store, job.run, job.location, options, progress=progress, work=work
    )
    return JobDone(tuple(map(made_line, made)), changed=bool(made))


def _verify(store: Store, job: Job, config: Config, progress: Progress) -> JobDone:
    from ckptsync.verify.verification import VerifyOptions, verify_scheduled  # noqa: PLC0415

    read = 0

    def count(size: int) -> None:
        nonlocal read
        read += size or 1  # 0: a sign of life of a process of its own, which has its own limits
        progress(read, job.size)

    level = job.level or config.verify.level
    options = VerifyOptions(level, time.time(), progress=count)
    verified = verify_scheduled(store, job.run, job.location, options)
    if verified is None:
        return JobDone()
    report, name = verified
    # damage is no error of the job: the report tells it, until another answers it
    return JobDone(tuple(report_lines(report, name)), changed=True)


def _retain(store: Store, _job: Job, config: Config, progress: Progress) -> JobDone:
    from ckptsync.catalogue.cached import Cache  # noqa: PLC0415
    from ckptsync.head.gc import RetentionRequest, apply_retention  # noqa: PLC0415

    removed, end = 0, time.monotonic() + BUDGET
    cache = Cache.load(store.url)

    def count(size: int) -> None:
        nonlocal removed
        removed += size
        progress(removed, 0)

    try:
        request = RetentionRequest(config.retention.of, config.retention.grace)
        result = apply_retention(store, request, cache, count, lambda: time.monotonic() > end)
    finally:
        cache.save(store.url)  # also when it must end: the next one continues there
    errors = [f"{f.run}/{f.location}".rstrip("/") + f": {f.error}" for f in result.failed]
    lines = tuple(map(retention_line, result.done))
    return JobDone(lines, tuple(errors), changed=bool(result.done))


_WORK: dict[JobKind, Callable[[Store, Job, Config, Progress], JobDone]] = {
    "consolidate": _consolidate,
    "verify": _verify,
    "retain": _retain,
}


def made_line(made: WrittenModel) -> Line:
    """Return the log line of a model that was made, repaired or completed."""
    counts = {"files": len(made.files), "bytes": made.size, "notes": "; ".join(made.notes)}
    text = pairs(phase="consolidated", run=made.run, location=made.location, **counts)
    return Line(f"made {made.model_record} {len(made.files)}", text)


def report_lines(report: Report, name: str) -> Iterator[Line]:
    """Yield the log lines of a report: one for its verdict, and one for each damage."""
    is_damaged = report.verdict == "damaged"
    where = {"run": report.run, "location": report.location}
    what = {"level": report.level, "verdict": report.verdict, "read": report.read}
    key = f"report {report.run}/{report.location} {name}"
    yield Line(key, pairs(phase="proved", **where, **what), level="error" if is_damaged else "info")
    for f in report.findings if is_damaged else ():
        found = {"kind": f.kind, "file": f.name, "detail": f.detail, "tensors": ",".join(f.tensors)}
        yield Line(f"{key} {f}", pairs(phase="found", run=report.run, **found), level="error")


def retention_line(outcome: RemovalOutcome) -> Line:
    """Return the log line of what retention did about a location."""
    phase = outcome.result.replace(" ", "-")
    where = {"run": outcome.run, "location": outcome.location, "scope": outcome.scope}
    count = {"files": outcome.files, "bytes": outcome.size}
    text = pairs(phase=phase, **where, **count, reason=outcome.reason)
    return Line(f"{phase} {outcome.run}/{outcome.location}", text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ended:  # before the work began, or after it has ended
        os._exit(128 + signal.SIGTERM)
