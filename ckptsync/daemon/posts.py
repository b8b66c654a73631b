"""Which output directories are looked at in a tick: where something moved, where a save is on its way, and now and then the rest.

Of a thousand of them most belong to trainings that are over, and they must cost next to nothing beside the one that trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptsync.worker.glance import aims, glance
from ckptsync.worker.looking import Look
from ckptsync.worker.options import RunDir
from ckptsync.worker.worker import Worker

UNSETTLED_EVERY = 0.5  # seconds between looks while a checkpoint is being written: its files grow, and no directory changes by that
PATIENCE = 20  # part of the time since anything moved that the next look may wait: what a crash left half written is not to be asked for ever
STILL = 600.0  # seconds without a change after which a directory is glanced at in turn with others like it
SLACK = 0.05  # seconds by which a tick may come too early
IN_TURN = 100  # directories, about, that a glance has for those: some 0.6 ms


@dataclass(slots=True)
class Post:
    """One output directory.  ``found``: by the last look, which was ``at`` and took ``cost`` seconds of CPU; ``moved``: when anything did."""

    run: RunDir
    worker: Worker
    aims: tuple[str, ...] = ()
    glimpse: object = ()
    found: Look = field(default_factory=Look)
    at: float = float("-inf")
    moved: float = float("-inf")
    cost: float = 0.0

    def look(self, now: float) -> None:
        """A whole look."""
        self.aims = aims(self.run.path)
        self.glimpse = glance(self.aims)  # before the look: what comes while it looks is seen by the next glance
        began = time.thread_time()
        self.found, self.at = self.worker.look(now), now
        self.cost = time.thread_time() - began

    def is_due(self, now: float, every: float) -> bool:
        """Whether it is to be looked at though nothing moved."""
        rest = every if self.found.due is None else min(every, self.found.due, (self.at - self.moved) / PATIENCE)
        return now - self.at >= max(UNSETTLED_EVERY, rest) - SLACK

    def told(self, now: float) -> Look:
        """What the last look saw, as of now."""
        due = self.found.due
        return self.found if due is None else replace(self.found, due=max(0.0, due - (now - self.at)))


class Posts:
    """All of them.  `hint` is for any thread, the rest for one."""

    def __init__(self) -> None:
        self._posts: dict[RunDir, Post] = {}
        self._hinted: set[str] = set()
        self._lock = threading.Lock()
        self._turn = 0

    def __iter__(self) -> Iterator[Post]:
        return iter(self._posts.values())

    def hint(self, path: str) -> None:
        """Something was written below it; "": nobody knows where."""
        with self._lock:
            self._hinted.add(path)

    def retain(self, workers: Mapping[RunDir, Worker]) -> None:
        """Those, as they are now."""
        self._posts = {run: self._of(run, worker) for run, worker in workers.items()}

    def stir(self, now: float) -> bool:
        """Whether anything has moved since each was looked at, or one never was; which, they know."""
        with self._lock:
            hinted, self._hinted = self._hinted, set()
        glanced = set(map(id, self._glanced(now)))
        for post in self:
            if hinted & {"", str(post.run.path)} or (id(post) in glanced and glance(post.aims) != post.glimpse):
                post.moved, post.at = now, float("-inf")
        return bool(hinted) or any(post.at == float("-inf") for post in self)

    def _of(self, run: RunDir, worker: Worker) -> Post:
        before = self._posts.get(run)
        return before if before is not None and before.worker is worker else Post(run, worker)

    def _glanced(self, now: float) -> list[Post]:
        """Those in which something moved of late, and some of the others, in turn."""
        lively = [post for post in self if now - post.moved < STILL]
        still = [post for post in self if now - post.moved >= STILL]
        turned = still[self._turn :] + still[: self._turn]
        count = room = 0
        while count < len(turned) and room < IN_TURN:
            room += 1 + len(turned[count].aims)
            count += 1
        self._turn = (self._turn + count) % max(1, len(still))
        return lively + turned[:count]
