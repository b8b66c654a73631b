"""Saves that are to be sent wait here, in the operator's order, until somebody carries them.

A large save may take hours, and a small one that settles meanwhile is to be on its way within a moment.  So there are two lanes: a wide one for
whatever is next, and a narrow one for what is small, which nothing large ever occupies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ckptsync.stores.limits import Limits
from ckptsync.worker.sharing import Job, Share, following, shares, whole


class Carrier(Protocol):
    """Whoever sends what is decided to be sent.  ``line``: those of one output directory, which wait in order."""

    def withdraw(self, line: object) -> Collection[Job]:
        """From now on nothing of a line is begun that was posted before; those that are in hand, of every line."""
        ...

    def post(self, line: object, jobs: Sequence[Job]) -> None:
        """These are to be sent, in this order."""
        ...


class AtOnce:
    """Sends all that is posted, one after the other, before `post` returns."""

    def __init__(self, threads: int) -> None:
        self._share = whole(threads)

    def withdraw(self, _: object) -> Collection[Job]:
        """Nothing waits, and nothing is in hand."""
        return ()

    def post(self, _: object, jobs: Sequence[Job]) -> None:
        """As the Protocol says."""
        for job in jobs:
            job.work(self._share)


class Lane:
    """`carry` is for one thread; ``wake`` is called, by any thread, when there may be something to carry.

    ``ended`` is told when something was carried.
    """

    def __init__(self, lanes: Lanes, share: Share) -> None:
        self._lanes, self._share = lanes, share
        self.wake: Callable[[], None] = lambda: None

    def carry(self) -> None:
        """One save, if one waits that may go here."""
        job = self._lanes.take(self._share)
        if job is None:
            return
        try:
            job.work(self._share)
        finally:
            self._lanes.end(self._share, job)


class Lanes:
    """As many as ``threads`` allow, which they share: two, or one where files are to be sent one at a time."""

    def __init__(self, threads: int = Limits().threads) -> None:
        self.lanes = tuple(Lane(self, share) for share in shares(threads))
        self.ended: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[Job, ...]] = {}
        self._in_hand: dict[Share, Job] = {}

    def withdraw(self, line: object) -> Collection[Job]:
        """As the Protocol says."""
        with self._lock:
            if line in self._waiting:
                self._waiting[line] = ()
            return tuple(self._in_hand.values())

    def post(self, line: object, jobs: Sequence[Job]) -> None:
        """As the Protocol says; a line that is new comes after those that wait."""
        with self._lock:
            self._waiting[line] = tuple(jobs)
        self._wake()

    def retain(self, lines: Collection[object]) -> None:
        """What waits of other lines is not sent: they have gone."""
        with self._lock:
            self._waiting = {line: jobs for line, jobs in self._waiting.items() if line in lines}

    @property
    def is_drained(self) -> bool:
        """Whether nothing waits."""
        with self._lock:
            return not any(self._waiting.values())

    def take(self, share: Share) -> Job | None:
        """What is next for a lane of this share, which is in hand from now on; the line it comes from is the last then."""
        with self._lock:
            others = [lane._share for lane in self.lanes if lane._share not in (share, *self._in_hand)]  # noqa: SLF001 - its own lanes
            least = max((s.most or 0 for s in others), default=0) if share.most is None else 0
            found = following(self._waiting, {job.name for job in self._in_hand.values()}, share.most, least)
            if found is None:
                return None
            line, job = found
            self._waiting[line] = tuple(j for j in self._waiting.pop(line) if j is not job)
            self._in_hand[share] = job
        self._wake()  # what waited behind it may be for another lane
        return job

    def end(self, share: Share, job: Job) -> None:
        """It is sent, or could not be."""
        with self._lock:
            assert self._in_hand.pop(share) is job
        self._wake()
        self.ended()

    def _wake(self) -> None:
        for lane in self.lanes:
            lane.wake()
