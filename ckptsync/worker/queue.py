"""Upload queues: what waits to be sent, in the operator's order, until a thread of a queue sends it.

A large save may take hours, and a small one that is finished meanwhile is to be on its way within a moment.  So there are two queues: a wide
one for whatever is next, and a narrow one for what is small, which nothing large ever occupies.  Neither overtakes: of one run
nothing begins before what goes before it by the operator's order; what has begun may end later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ckptsync.stores.limits import Limits
from ckptsync.worker.options import Order, Superseded
from ckptsync.worker.upload import small_at_once

T = TypeVar("T")
SMALL = 256 << 20  # bytes of a save that the narrow queue takes: some seconds of most networks

Name = tuple[str, str]
"""Of a run, and of a checkpoint in it: what is said in the store of a node that sends one is said once, so nobody sends two saves of one name."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a queue may take: ``most`` bytes of a save (``None``: any), ``threads`` large files at once, ``small`` files that cost a round trip each."""

    most: int | None
    threads: int
    small: int


@dataclass(frozen=True, slots=True)
class Job:
    """One save to send.  ``save`` tells it from others.  ``work`` keeps for itself what an operator can act on, and raises nothing else than bugs."""

    save: object
    name: Name
    size: int
    work: Callable[[Share], None]


def following(
    lines: Mapping[object, Sequence[Job]], in_hand: Collection[Name], most: int | None, least: int = 0
) -> tuple[object, Job] | None:
    """The first that may begin of at most ``most`` bytes, and more than ``least``: they are another queue's, which is free.  Pure.

    Of each run only the first: none begins before one that goes before it, whatever that one waits for.
    """
    for line, jobs in lines.items():
        for job in _heads(jobs):
            if job.name not in in_hand and (most is None or job.size <= most) and not (least and job.size <= least):
                return line, job
    return None


def _heads(jobs: Iterable[Job]) -> Iterable[Job]:
    """The first of each run."""
    found: dict[str, Job] = {}
    for job in jobs:
        found.setdefault(job.name[0], job)
    return found.values()


def whole(threads: int) -> Share:
    """For all that is sent at once; who asks for one file at a time gets that."""
    return Share(None, threads, small_at_once(threads))


def shares(threads: int) -> tuple[Share, ...]:
    """Of ``threads`` large files at once; those of the narrow queue's saves are mostly none.  Pure."""
    if threads <= 1:
        return (whole(threads),)
    small = small_at_once(threads)
    return (Share(None, threads - 1, small - small // threads), Share(SMALL, 1, small // threads))


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """A finished save that is not stored.  ``age``: when it was first seen, then (all are new to a worker that begins) its step and its pin's number.

    ``written``: the mtime of its last file (ns).  ``is_begun``: part of it is in the store, from this node or another.
    """

    save: T
    run: str
    age: tuple[float, int, int]
    written: int
    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class Ordered(Generic[T]):
    """``first`` to last; ``dropped`` are those that a newer one has overtaken."""

    first: tuple[T, ...]
    dropped: tuple[T, ...] = ()


def ordered(turns: Iterable[Turn[T]], order: Order, superseded: Superseded) -> Ordered[T]:
    """Oldest or newest first, but before these what is begun, which is never dropped: other nodes may have sent their parts.

    Dropped is what is older than another finished save of its run, by its age and by its files: a clock that was set back drops nothing.
    """
    waiting = sorted(turns, key=lambda t: t.age, reverse=order == "newest")
    dropped = [t for t in waiting if superseded == "drop" and not t.is_begun and _is_overtaken(t, waiting)]
    going = sorted((t for t in waiting if t not in dropped), key=lambda t: not t.is_begun)
    return Ordered(tuple(t.save for t in going), tuple(t.save for t in dropped))


def _is_overtaken(turn: Turn[T], others: Sequence[Turn[T]]) -> bool:
    return any(o.run == turn.run and o.age > turn.age and o.written > turn.written for o in others)


class Carrier(Protocol):
    """Sends the saves that are posted.  ``line``: the saves of one output directory, which wait in order."""

    def withdraw(self, line: object) -> Collection[Job]:
        """Begin nothing of a line that was posted before; return the jobs that are being sent, of every line."""
        ...

    def post(self, line: object, jobs: Sequence[Job]) -> None:
        """Send these, in this order."""
        ...


class AtOnce:
    """A carrier that sends all that is posted, one after the other, before `post` returns."""

    def __init__(self, threads: int) -> None:
        self._share = whole(threads)

    def withdraw(self, _: object) -> Collection[Job]:
        """Nothing waits, and nothing is in hand."""
        return ()

    def post(self, _: object, jobs: Sequence[Job]) -> None:
        """Send them now."""
        for job in jobs:
            job.work(self._share)


class UploadQueue:
    """`carry` is for one thread; ``wake`` is called, by any thread, when there may be something to carry.

    ``ended`` is told when something was carried.
    """

    def __init__(self, queues: UploadQueues, share: Share) -> None:
        self._queues, self._share = queues, share
        self.wake: Callable[[], None] = lambda: None

    def carry(self) -> None:
        """Send one save, if one waits that this queue may take."""
        job = self._queues.take(self._share)
        if job is None:
            return
        try:
            job.work(self._share)
        finally:
            self._queues.end(self._share, job)


class UploadQueues:
    """As many as ``threads`` allow, which they share: two, or one where files are to be sent one at a time."""

    def __init__(self, threads: int = Limits().threads) -> None:
        self.queues = tuple(UploadQueue(self, share) for share in shares(threads))
        self.ended: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[Job, ...]] = {}
        self._in_hand: dict[Share, Job] = {}

    def withdraw(self, line: object) -> Collection[Job]:
        """See `Carrier.withdraw`."""
        with self._lock:
            if line in self._waiting:
                self._waiting[line] = ()
            return tuple(self._in_hand.values())

    def post(self, line: object, jobs: Sequence[Job]) -> None:
        """See `Carrier.post`; a line that is new comes after those that wait."""
        with self._lock:
            self._waiting[line] = tuple(jobs)
        self._wake()

    def retain(self, lines: Collection[object]) -> None:
        """Drop what waits of other lines, which have gone."""
        with self._lock:
            self._waiting = {line: jobs for line, jobs in self._waiting.items() if line in lines}

    @property
    def is_drained(self) -> bool:
        """Whether nothing waits."""
        with self._lock:
            return not any(self._waiting.values())

    def take(self, share: Share) -> Job | None:
        """What is next for a queue of this share, which is in hand from now on; the line it comes from is the last then."""
        with self._lock:
            others = [queue._share for queue in self.queues if queue._share not in (share, *self._in_hand)]  # noqa: SLF001 - its own queues
            least = max((s.most or 0 for s in others), default=0) if share.most is None else 0
            found = following(self._waiting, {job.name for job in self._in_hand.values()}, share.most, least)
            if found is None:
                return None
            line, job = found
            self._waiting[line] = tuple(j for j in self._waiting.pop(line) if j is not job)
            self._in_hand[share] = job
        self._wake()  # what waited behind it may be for another queue
        return job

    def end(self, share: Share, job: Job) -> None:
        """It is sent, or could not be."""
        with self._lock:
            assert self._in_hand.pop(share) is job
        self._wake()
        self.ended()

    def _wake(self) -> None:
        for queue in self.queues:
            queue.wake()
