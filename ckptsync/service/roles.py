"""All roles of this process at work, and what the service, the heartbeat and the metrics ask of them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsync.fleet.heartbeat import Disk, Job
from ckptsync.service.periodic import Clocks, Periodic
from ckptsync.spool.marks import began

if TYPE_CHECKING:
    from ckptsync.service.head import HeadRoles
    from ckptsync.service.worker import WorkerRole
SETTLES_WITHIN = 900.0  # seconds that what waits may wait without any change, once nobody writes any more


class Roles:
    """``looks`` begin with the process, ``loops`` when the store is there, and both count monotonic time; ``jobs`` are APScheduler's."""

    def __init__(self, loops: Sequence[Periodic] = (), jobs: Sequence[Periodic] = (), looks: Sequence[Periodic] = ()) -> None:
        self.looks, self.loops, self.jobs = list(looks), list(loops), list(jobs)
        self.worker: WorkerRole | None = None
        self.head: HeadRoles | None = None
        self.verifies = 0.0
        """As in a heartbeat."""
        self.spool_budget = 0
        self.beat: Periodic | None = None
        """The heartbeat, once it beats."""
        self.disks: tuple[Disk, ...] = ()
        """As the last heartbeat told."""
        self.clocks = Clocks()
        self.handed: Callable[[], int] = lambda: 0
        """How many bytes were handed to the store."""
        self.advanced = time.monotonic()
        """When anything last got anywhere, as the watchdog has it."""

    @property
    def works(self) -> tuple[Periodic, ...]:
        """All that is done again and again, but for the heartbeat."""
        return (*self.looks, *self.loops, *self.jobs)

    def advance(self) -> None:
        """Something got somewhere."""
        self.advanced = time.monotonic()

    def runs(self) -> Mapping[str, Path]:
        """The output directories by the names of their runs."""
        return self.worker.runs() if self.worker else {}

    def held(self) -> list[tuple[Path, int]]:
        """The output directories, each with the bytes that only our pins still hold there."""
        return self.worker.held() if self.worker else []

    def jobs_of_children(self) -> tuple[Job, ...]:
        """What child processes do at this moment."""
        return self.head.children.jobs() if self.head else ()

    def are_children_watched(self) -> bool:
        """Whether each child would be ended if it hung."""
        return self.head is None or self.head.children.are_watched()

    def end_children(self) -> None:
        """Ask all children to end."""
        if self.head:
            self.head.children.end()

    def queue(self) -> tuple[str, ...]:
        """What is on its way."""
        return tuple(dict.fromkeys(item for work in self.works for item in work.outcome.queue))

    def errors(self) -> tuple[str, ...]:
        """What the last runs said."""
        return tuple(dict.fromkeys(error for work in self.works for error in work.errors()))

    def notes(self) -> tuple[str, ...]:
        """What is no error, and an operator should know."""
        return tuple(dict.fromkeys(note for work in self.works for note in work.outcome.notes))

    def lacks(self) -> dict[str, tuple[str, ...]]:
        """By report what of it this node cannot send again."""
        return {record: names for work in self.works for record, names in work.outcome.lacks.items()}

    def oldest(self) -> float | None:
        """Since when the first of what is on its way waits, in seconds of the monotonic clock."""
        return min((work.outcome.oldest for work in self.works if work.outcome.oldest is not None), default=None)

    def watch(self) -> dict[str, str]:
        """How each output directory is watched."""
        return {path: mode for work in self.works for path, mode in work.outcome.watch.items()}

    def status(self) -> str:
        """The present tense, on one line."""
        states = [f"{work.name} {'at work' if work.is_running else 'waits'}" for work in (*self.loops, *self.jobs)]
        children = [f"{job.kind} {job.subject}" for job in self.jobs_of_children()]
        return "; ".join([*states, *children, f"{len(self.queue())} on the way", f"{len(self.errors())} errors"])


class UntilGone:
    """`ckptsync run --until-gone PID`, the worker that a training job brings along: it ends once that process has ended, and what it left is stored.

    What never settles is waited for no longer than `SETTLES_WITHIN`.  Without a process it never ends unasked.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid, self._began = pid, began(pid) if pid is not None else ""
        self._gone: tuple[int, ...] | None = None
        self._left: tuple[str, ...] = ()
        self._since = 0.0

    def is_due(self, roles: Roles) -> bool:
        """Whether it is to end now.  All work is to begin, and end, after the process: the last checkpoint may be younger than the last look."""
        if self._pid is None or began(self._pid) == self._began != "":
            return False
        if self._gone is None:
            self._since = time.monotonic()
            self._gone = tuple(work.finished + work.is_running for work in roles.works)
            for work in roles.works:
                work.hint()
        late = [work for work, before in zip(roles.works, self._gone, strict=True) if work.finished <= before]
        if any(work.is_running for work in late):
            self._since = time.monotonic()
        if late:  # or its store has never been there
            return time.monotonic() - self._since > SETTLES_WITHIN
        if any(work.is_running for work in roles.loops) and not roles.errors():
            self._since = time.monotonic()  # what is large may take longer than that
        left = roles.queue()
        if left != self._left:
            self._left, self._since = left, time.monotonic()
        return not left or time.monotonic() - self._since > SETTLES_WITHIN
