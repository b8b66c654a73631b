"""Upload queues: saves wait in the operator's order until a thread of a queue sends them.

A large save may take hours, and a small one that is finished meanwhile should be sent within
moments.  So there are two queues: a wide one for whatever is next, and a narrow one for small saves
only.  Of one run, saves begin in the operator's order; they may end in another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptsync.stores.limits import Limits
from ckptsync.worker.options import Order, Superseded
from ckptsync.worker.upload import small_at_once

T = TypeVar("T")
SMALL_SAVE = 256 << 20  # bytes of a save that the narrow queue takes: some seconds of most networks
SCAN_FIRST = 1.0  # seconds for which a chunk waits for a scan: a file system may not answer it

Name = tuple[str, str]
"""A run, and a checkpoint in it.

A node announces that it sends a checkpoint by its name, so nobody sends two saves of one name at
once.
"""


@dataclass(frozen=True, slots=True)
class QueueCapacity:
    """What a queue may take.

    ``most``: bytes of a save (None: any).  ``threads``: large files sent at once.  ``small``: files
    sent at once that cost a round trip rather than bandwidth.
    """

    most: int | None
    threads: int
    small: int


@dataclass(frozen=True, slots=True)
class UploadJob:
    """One save to send, or the damaged files of one location to send again.

    ``save``: identifies the job.  ``work``: does it, reports to its own caller, and raises only
    bugs.
    """

    save: object
    name: Name
    size: int
    work: Callable[[QueueCapacity], None]


def split_threads(threads: int) -> tuple[QueueCapacity, ...]:
    """Return how the queues share ``threads`` large files at once.  Pure.

    There are two queues, but only one if files are sent one at a time.
    """
    small = small_at_once(threads)
    if threads <= 1:
        return (QueueCapacity(None, threads, small),)
    return (
        QueueCapacity(None, threads - 1, small - small // threads),
        QueueCapacity(SMALL_SAVE, 1, small // threads),
    )


def pick_next(
    waiting: Mapping[object, Sequence[UploadJob]], in_hand: Collection[Name], most: int | None
) -> tuple[object, UploadJob] | None:
    """Return the first job of at most ``most`` bytes that may begin, and its key; None without one.

    Only the first job of each run under a key may begin, even if it is too large or its name is in
    hand, so that it waits.  Pure.
    """
    for key, jobs in waiting.items():
        first: dict[str, UploadJob] = {}
        for job in jobs:
            first.setdefault(job.name[0], job)
        for job in first.values():
            if job.name not in in_hand and (most is None or job.size <= most):
                return key, job
    return None


@dataclass(frozen=True, slots=True)
class PendingSave(Generic[T]):
    """A finished save that is not stored.

    ``age``: when it was first seen, then its step and its pin's number, since a worker that starts
    sees all saves at once.  ``written``: the mtime of its last file (ns).  ``is_begun``: part of it
    is in the store, from this node or another.
    """

    save: T
    run: str
    age: tuple[float, int, int]
    written: int
    is_begun: bool = False


def order_saves(
    pending_saves: Iterable[PendingSave[T]], order: Order, superseded: Superseded
) -> tuple[list[T], list[T]]:
    """Return the saves in the order of uploading, and those that a newer save makes needless.

    Saves that are begun come first and are never dropped: other nodes may have sent their parts.
    Then oldest or newest first.  With ``superseded`` ``drop``, a save is dropped if another
    finished save of its run is newer both by age and by its files: a clock that was set back drops
    nothing.
    """
    by_age = sorted(pending_saves, key=lambda p: p.age, reverse=order == "newest")
    dropped = [
        pending
        for pending in by_age
        if superseded == "drop"
        and not pending.is_begun
        and any(
            newer.run == pending.run and newer.age > pending.age and newer.written > pending.written
            for newer in by_age
        )
    ]
    to_upload = sorted((p for p in by_age if p not in dropped), key=lambda p: not p.is_begun)
    return [p.save for p in to_upload], [p.save for p in dropped]


class UploadQueue:
    """One queue: one thread calls `run_next`; any thread calls ``wake`` when there may be a job."""

    def __init__(self, queues: UploadQueues, capacity: QueueCapacity) -> None:
        """Make a queue of ``queues``; its thread is the caller's."""
        self._queues, self._capacity = queues, capacity
        self.wake: Callable[[], None] = lambda: None

    def run_next(self) -> None:
        """Do the next job that this queue may take, if there is one; end it also if it raises."""
        job = self._queues.take(self._capacity)
        if job is None:
            return
        try:
            job.work(self._capacity)
        finally:
            self._queues.end(self._capacity, job)


class UploadQueues:
    """The queues that share ``threads``, and the jobs that wait for them.

    Jobs wait under keys, one for the uploads of each output directory; keys take turns.  ``ended``:
    called after each job.  ``scan_lock``: held by the task that scans output directories; uploads
    wait for it between chunks.
    """

    def __init__(self, threads: int = Limits().threads) -> None:
        """Make the queues for ``threads`` large files at once; start no thread."""
        self.queues = tuple(UploadQueue(self, capacity) for capacity in split_threads(threads))
        self.ended: Callable[[], None] = lambda: None
        self.scan_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[UploadJob, ...]] = {}
        self._in_hand: dict[QueueCapacity, UploadJob] = {}

    def withdraw(self, key: object) -> Collection[UploadJob]:
        """Remove the jobs that wait under a key.

        Return the jobs that are being done, of every key.
        """
        with self._lock:
            if key in self._waiting:
                self._waiting[key] = ()
            return tuple(self._in_hand.values())

    def post(self, key: object, jobs: Sequence[UploadJob]) -> None:
        """Replace the jobs that wait under a key; a new key comes after those that wait."""
        with self._lock:
            self._waiting[key] = tuple(jobs)
        self._wake()

    def retain(self, keys: Collection[object]) -> None:
        """Remove the jobs that wait under other keys than these."""
        with self._lock:
            self._waiting = {key: jobs for key, jobs in self._waiting.items() if key in keys}

    def take(self, capacity: QueueCapacity) -> UploadJob | None:
        """Remove and return the next job for a queue of this capacity; None without one.

        It is in hand until `end`.  Its key becomes the last one.
        """
        with self._lock:
            next_job = pick_next(
                self._waiting, {job.name for job in self._in_hand.values()}, capacity.most
            )
            if next_job is None:
                return None
            key, job = next_job
            self._waiting[key] = tuple(j for j in self._waiting.pop(key) if j is not job)
            self._in_hand[capacity] = job
        self._wake()  # what waited behind it may be for another queue
        return job

    def end(self, capacity: QueueCapacity, job: UploadJob) -> None:
        """Note that a job has ended, wake the queues, and call ``ended``."""
        with self._lock:
            assert self._in_hand.pop(capacity) is job
        self._wake()
        self.ended()

    def give_way(self, _count: int) -> None:
        """Wait until a running scan has ended, for at most a second; called between chunks.

        A scan is thousands of short system calls, and after each of them the threads that send
        small files would take Python's interpreter lock first: 0.3 s became 7 s, in which rotation
        deleted checkpoints that no scan had seen.
        """
        if self.scan_lock.acquire(timeout=SCAN_FIRST):
            self.scan_lock.release()

    def _wake(self) -> None:
        """Call every queue's ``wake``."""
        for queue in self.queues:
            queue.wake()
