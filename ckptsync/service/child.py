"""One order of a head's, in a process of its own: ``python -m ckptsync.service.child``.

Reads a `Brief` from standard input; on standard output says a line whenever it has got on, and one at the end.  What libraries print goes to the log.
It alone imports what merges and verifies, so that the head stays small.
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

from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.schema import Config, LimitsConfig
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.service import children
from ckptsync.service.children import At, Done, End, Failed, Kind, Message, Order
from ckptsync.service.log import Line, configure, pairs
from ckptsync.service.watchdog import mark, worked
from ckptsync.stores import ending
from ckptsync.stores.opening import open_store

if TYPE_CHECKING:
    from ckptsync.head.clustered import Clustered
    from ckptsync.head.gc import Deed
    from ckptsync.head.sealing import Made
    from ckptsync.records.report import Report
    from ckptsync.stores.contract import Store

BEAT = 1.0  # seconds between two looks at whether it has got on
NICER = 5  # than the head, which decides what is to be done
OOM_FIRST = 200
BUDGET = 600.0  # seconds after which retention begins with no other location: it is killed after 900, and what it has done counts
LEAST_MEMORY = 16 << 20  # bytes: two parts of an upload
WINDOW = 6 << 20
"""Bytes that a merge has in flight for each of its threads: of several at work beside the head, each is to be small."""
_PR_SET_PDEATHSIG = 1

Tell = Callable[[int, int], None]
"""How far the work is: bytes done, of how many."""

log = logging.getLogger(__name__)


class Ended(BaseException):
    """SIGTERM: the work is left as it is, which is as it would be after SIGKILL, but for drafts that can be removed."""


def main() -> int:
    """Exit status 0 if there is an answer, also if it is a failure."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        brief = children.brief(sys.stdin.buffer.readline())
        die_with(brief.parent)
        signal.signal(signal.SIGTERM, _on_term)
        os.nice(NICER)
        _go_first()
        configure(brief.config.log)
        said = _Said(out)
        said.say(_ended(brief.order, brief.config, said))
    os._exit(0)  # threads of a work that has failed may wait for a store yet


def die_with(parent: int) -> None:
    """Where the system can: SIGKILL when the thread that started this process ends, however it does."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux: a head that is killed leaves its children to their ends
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _on_term(_number: int, _frame: object) -> NoReturn:
    ending.announce()
    raise Ended


def _go_first() -> None:
    """Where memory runs out, the system takes this process, and not the head."""
    with contextlib.suppress(OSError, ValueError):  # no Linux, or a system that lets nobody say so
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + OOM_FIRST)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory holds the store's keys


def _ended(order: Order, config: Config, said: _Said) -> End:
    try:
        with said.beating():
            return carry_out(order, config, said.at)
    except CkptsyncError as e:
        return children.failure(e)
    except MemoryError:
        return Failed("it wanted more memory than a child process of the head may have", is_ours=True)
    except Ended:
        return Failed("the service is stopping", passes=True)
    except Exception as e:
        log.critical("%s %s", order.kind, order.subject, exc_info=e)
        return Failed(f"{type(e).__name__}: {e}", "this is a bug: the log has the traceback", is_ours=True)


class _Said:
    """Lines to the head, of several threads."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock, self._at = out, threading.Lock(), At()

    def say(self, message: Message) -> None:
        with self._lock:
            self._out.write(children.encode(message))
            self._out.flush()

    def at(self, done: int, total: int) -> None:
        """How far the work says that it is."""
        self._at = At(done, total)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Within the block, what has been got done is told; nothing while nothing is."""
        over = threading.Event()
        threading.Thread(target=self._beat, args=(over.wait,), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _beat(self, is_over: Callable[[float], bool]) -> None:
        before, told = mark(()), self._at
        while not is_over(BEAT):
            now, at = mark(()), self._at
            if at != told or worked(before, now):
                self.say(at)
                before, told = now, at


def carry_out(order: Order, config: Config, tell: Tell) -> Done:
    """Do it; raises CkptsyncError."""
    return _WORK[order.kind](_opened(config), order, config, tell)


def _opened(config: Config) -> Store:
    url = config.store.url
    try:
        return open_store(url, options_for(url, config.store.options), limits_of(shared(config)))
    except ConfigError as e:  # the head has it open, so it has gone meanwhile, and will be back
        raise StoreError(str(e), hint=e.hint) from e


def shared(config: Config) -> LimitsConfig:
    """What transfers may take, where merges, a verification and the head share it."""
    told, jobs = config.limits, config.head.jobs
    table = told.bandwidth
    rates = tuple(rate and rate / jobs for rate in table.rates) if table else ()
    memory = max(min(told.memory, LEAST_MEMORY), told.memory // (jobs + 4))
    return replace(told, bandwidth=replace(table, rates=rates) if table else None, memory=memory)


def _consolidate(store: Store, order: Order, config: Config, tell: Tell) -> Done:
    from ckptsync.head.consolidate import HeadOptions, one  # noqa: PLC0415
    from ckptsync.merge.copying import Work  # noqa: PLC0415
    from ckptsync.merge.plan import Options  # noqa: PLC0415

    engine = _cluster(config) if config.head.engine == "ray" else None
    head = config.head
    merge = Options(head.dtype, head.max_shard_size, allow_code=head.allow_code)
    options = HeadOptions(merge, head.config_from, engine)
    made = one(store, order.run, order.location, options, progress=tell, work=Work(config.head.threads, window=WINDOW))
    return Done(tuple(map(made_line, made)), changed=bool(made))


def _cluster(config: Config) -> Clustered:
    """The one that Ray's own variable names, or that this machine is in."""
    from ckptsync.head.clustered import Clustered  # noqa: PLC0415

    url = config.store.url
    return Clustered(os.environ.get("RAY_ADDRESS", "auto"), url, options_for(url, config.store.options), limits_of(config.limits))


def _verify(store: Store, order: Order, config: Config, tell: Tell) -> Done:
    from ckptsync.verify.location import verify_and_report  # noqa: PLC0415

    read = 0

    def told(size: int) -> None:
        nonlocal read
        read += size or 1  # of a process of its own, which has its own limits, a sign of life
        tell(read, order.size)

    result = verify_and_report(store, order.run, order.location, order.level or config.verify.level, order.now, told=told)
    report = result.report
    if report is None:
        return Done()
    errors = (f"{report.run}/{report.location}: damaged",) if report.verdict == "damaged" else ()
    return Done(tuple(report_lines(report, result.written)), errors, changed=True)


def _retain(store: Store, _order: Order, config: Config, tell: Tell) -> Done:
    from ckptsync.catalogue import kept  # noqa: PLC0415
    from ckptsync.head.gc import Asked, Memory, tick  # noqa: PLC0415

    gone, began = 0, time.monotonic()
    memory = Memory(kept.load(store.url))

    def told(size: int) -> None:
        nonlocal gone
        gone += size
        tell(gone, 0)

    def is_over() -> bool:
        return time.monotonic() - began > BUDGET

    try:
        swept = tick(store, Asked(config.retention.of, config.retention.grace), memory, told, is_over)
    finally:
        kept.save(store.url, memory.cache)  # also when this process is told to end: the next one goes on there
    errors = tuple(f"{f.run}/{f.location}: {f.error}" if f.location else f"{f.run}: {f.error}" for f in swept.failed)
    return Done(tuple(map(deed_line, swept.done)), errors, changed=bool(swept.done))


_WORK: dict[Kind, Callable[[Store, Order, Config, Tell], Done]] = {
    "consolidate": _consolidate,
    "verify": _verify,
    "retain": _retain,
}


def made_line(one: Made) -> Line:
    """Say that a model was made, mended or completed."""
    counts = {"files": len(one.files), "bytes": one.size}
    text = pairs(phase="consolidated", run=one.run, location=one.location, **counts, notes="; ".join(one.notes))
    return Line(f"made {one.model_record} {len(one.files)}", text)


def report_lines(report: Report, name: str) -> Iterator[Line]:
    """Say what a report says, and each of its findings that is damage."""
    is_damaged = report.verdict == "damaged"
    key = f"report {report.run}/{report.location} {name}"
    text = pairs(
        phase="proved", run=report.run, location=report.location, level=report.level, verdict=report.verdict, read=report.read
    )
    yield Line(key, text, is_error=is_damaged)
    for f in report.findings if is_damaged else ():
        found = pairs(phase="found", run=report.run, kind=f.kind, file=f.name, detail=f.detail, tensors=",".join(f.tensors))
        yield Line(f"{key} {f}", found, is_error=True)


def deed_line(deed: Deed) -> Line:
    """Say what retention did about a location."""
    phase = deed.outcome.replace(" ", "-")
    text = pairs(
        phase=phase, run=deed.run, location=deed.location, scope=deed.scope, files=deed.files, bytes=deed.size, reason=deed.reason
    )
    return Line(f"{phase} {deed.run}/{deed.location}", text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ended:  # before the work began, or after it has ended
        os._exit(128 + signal.SIGTERM)
