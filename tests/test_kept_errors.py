"""What is kept of an error is its text: its frames would hold all that was read before it."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Transient, without_frames
from ckptsync.head.due_jobs import VerifyPolicy, head_jobs, verify_jobs_in_store
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.retention_rules import Rules
from ckptsync.service.head_roles import Catalogues, catalogue_lines
from ckptsync.service.monitor import Monitor, OverviewReader
from ckptsync.status.alarms import Patience
from ckptsync.status.metrics import Process, exposition
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import NoParent
from ckptsync.verifier.verification import InStore, VerifyOptions, verify
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.verified_stores import WHOLE, arrive
from tests.support.worker_in_process import tick

SIZE = 1 << 20
TIMES = 5
DATA = b'{"format":1,"x":"' + b"a" * SIZE + b'"}'


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What only the collector of cycles frees counts as kept; what was there before does not."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def store() -> MemoryStore:
    """A store with unreadable records of every kind, and an unreadable heartbeat."""
    filled = MemoryStore()
    arrive(filled, WHOLE)
    for kind in ("manifest-n1", "model", "report", "tombstone", "keep", "join"):
        for n, location in enumerate(("checkpoint-4", "checkpoint-9")):
            filled.write(f"run/.ckptsync/{location}/{kind}-{n}-{digest(DATA)[:16]}.json", [DATA])
    filled.write(".ckptsync/nodes/n1.json", [DATA])
    filled.write(".ckptsync/nodes/n1~facts.json", [DATA])
    return filled


def kept(work: Callable[[], object]) -> int:
    """Bytes that are allocated after ``work`` was done often, and were not after the second time.

    What it returns is kept, as its callers do.
    """
    results = [work(), work()]
    tracemalloc.start()
    try:
        for _ in range(TIMES):
            results[0] = work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def with_frames() -> list[BaseException]:
    return [
        e for e in gc.get_objects() if isinstance(e, CkptsyncError) and e.__traceback__ is not None
    ]


def by_worker(filled: MemoryStore, out: Path) -> Callable[[], object]:
    out.mkdir()
    worker = Worker(WorkerOptions("n1", RunDir("run", out)), filled)
    return lambda: tick(worker, time.monotonic())


def by_head(filled: MemoryStore, _: Path) -> Callable[[], object]:
    catalogues = Catalogues(filled)

    def work() -> object:
        found = catalogues.read()
        return found, tuple(head_jobs(found.summaries, lambda _: "")), [*catalogue_lines(found)]

    return work


def by_verifier(filled: MemoryStore, _: Path) -> Callable[[], object]:
    cache = Cache()

    def work() -> object:
        found = read_catalogue(filled, cache)
        due = tuple(verify_jobs_in_store(filled, found, VerifyPolicy(), time.time()))
        return found, due, [*verify(InStore(filled, "run", "checkpoint-4"), VerifyOptions("stat"))]

    return work


def by_monitor(filled: MemoryStore, _: Path) -> Callable[[], object]:
    cache = Cache()
    monitor = Monitor(OverviewReader(filled, lambda: read_catalogue(filled, cache), Patience()))

    def work() -> object:
        process = Process("n", "0", ("head",), is_healthy=True)
        return monitor.check(), exposition(process, monitor.overview)

    return work


def by_retention(filled: MemoryStore, _: Path) -> Callable[[], object]:
    cache = Cache()
    request = RetentionRequest(lambda _: Rules(keep_last=1))
    return lambda: apply_retention(filled, request, cache)


@pytest.mark.parametrize("by", [by_worker, by_head, by_verifier, by_monitor, by_retention])
def test_an_unreadable_record_that_is_read_again_and_again_takes_no_more_memory(
    by: Callable[[MemoryStore, Path], Callable[[], object]], tmp_path: Path
) -> None:
    work = by(store(), tmp_path / "out")
    assert kept(work) < SIZE
    assert with_frames() == []


def test_what_is_kept_and_raised_again_stays_as_it_is() -> None:
    (fault, *_) = read_state(store()).faults
    for error in (fault.error, Transient("x", hint="h", after=3.0), NoParent("url", "above")):
        copy = without_frames(error)
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        for _ in range(3):
            with pytest.raises(type(error)):
                raise without_frames(copy)
        assert copy.__traceback__ is None
