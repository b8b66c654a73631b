"""What the service and the heartbeat ask of the roles together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync.config.schema import Config
from ckptsync.daemon.phases import Line, changed
from ckptsync.daemon.tick import Tick
from ckptsync.fleet.heartbeat import Disk, Job
from ckptsync.fleet.overview import Overview
from ckptsync.stores.contract import Store


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one tick of a role has seen and done: ``lines`` to log where they are new, the rest for `ckptsync status`.

    ``oldest``: since when the first of the ``queue`` waits, in seconds of the monotonic clock.  ``watch``: how each output directory is watched.
    ``is_held_up``: something failed that may succeed in a moment.  ``lacks``: what reports want of this node, and it has no more.
    """

    lines: tuple[Line, ...] = ()
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    oldest: float | None = None
    watch: Mapping[str, str] = field(default_factory=dict)
    is_held_up: bool = False
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Role:
    """A role and its tick: what it said last time is remembered, so that only changes are logged."""

    def __init__(self, name: str, every: float, look: Callable[[], Outcome], fatal: Callable[[BaseException], None]) -> None:
        self.tick = Tick(name, every, self._run, fatal)
        self.outcome = Outcome()
        self._look = look
        self._log = logging.getLogger(f"ckptsync.{name}")
        self._said: dict[str, str] = {}

    def errors(self) -> tuple[str, ...]:
        """What the last tick said, and what it failed with."""
        return (*([f"{self.tick.name}: {self.tick.error}"] if self.tick.error else []), *self.outcome.errors)

    def _run(self) -> None:
        self.outcome = self._look()
        lines, self._said = changed(self._said, self.outcome.lines)
        for line in lines:
            self._log.log(logging.ERROR if line.is_error else logging.INFO, "%s", line.text)


@dataclass(frozen=True, slots=True)
class Posted:
    """One channel of alerts: messages (each of any number of alarms) that were taken, and tries that failed, since the start."""

    channel: str
    delivered: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Ground:
    """``runs``: the output directories by the names of their runs; ``disks``: how full their disks are.

    ``children``: what child processes do at this moment; ``end_children`` asks them to end; ``are_watched``: whether each of them would be ended if it
    hung.  ``verifies``: as in a heartbeat.  ``seen``: what a head last saw of all of the store; ``posted``: what its alerts have come to.
    """

    runs: Callable[[], Mapping[str, Path]]
    disks: Callable[[], tuple[Disk, ...]]
    children: Callable[[], tuple[Job, ...]] = tuple
    verifies: float = 0.0
    end_children: Callable[[], None] = lambda: None
    are_watched: Callable[[], bool] = lambda: True
    seen: Callable[[], Overview | None] = lambda: None
    posted: Callable[[], tuple[Posted, ...]] = tuple


class Vitals:
    """What the service knows of its process, whatever its roles are."""

    def __init__(self) -> None:
        self.advanced = time.monotonic()
        """When it last got anywhere, as the watchdog has it."""
        self.handed: Callable[[], int] = lambda: 0
        self.beat: Tick | None = None
        self.disks: tuple[Disk, ...] = ()
        """As the last heartbeat told."""

    def advance(self) -> None:
        """It got somewhere."""
        self.advanced = time.monotonic()


NOWHERE = Ground(dict, tuple)


class Working:
    """All roles of this process.

    ``looks`` begin with the process, ``loops`` when the store is there, and both count monotonic time; ``jobs`` are the scheduler's.
    ``ground``: the output directories that it works on.
    """

    def __init__(
        self,
        loops: Sequence[Role] = (),
        jobs: Sequence[Role] = (),
        looks: Sequence[Role] = (),
        ground: Ground = NOWHERE,
    ) -> None:
        self._roles = (*looks, *loops, *jobs)
        self.looks, self.loops, self.jobs = (tuple(role.tick for role in roles) for roles in (looks, loops, jobs))
        self.ground = ground
        self.vitals = Vitals()

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """All of them."""
        return (*self.looks, *self.loops, *self.jobs)

    def queue(self) -> tuple[str, ...]:
        """What is on its way."""
        return tuple(dict.fromkeys(item for role in self._roles for item in role.outcome.queue))

    def errors(self) -> tuple[str, ...]:
        """What the last ticks said."""
        return tuple(dict.fromkeys(error for role in self._roles for error in role.errors()))

    def notes(self) -> tuple[str, ...]:
        """What is no error, and an operator should know."""
        return tuple(dict.fromkeys(note for role in self._roles for note in role.outcome.notes))

    def lacks(self) -> dict[str, tuple[str, ...]]:
        """By report what of it this node cannot send again."""
        return {record: names for role in self._roles for record, names in role.outcome.lacks.items()}

    def oldest(self) -> float | None:
        """Since when the first of what is on its way waits, in seconds of the monotonic clock."""
        return min((role.outcome.oldest for role in self._roles if role.outcome.oldest is not None), default=None)

    def watch(self) -> dict[str, str]:
        """How each output directory is watched."""
        return {path: mode for role in self._roles for path, mode in role.outcome.watch.items()}

    def status(self) -> str:
        """The present tense, on one line."""
        states = [f"{tick.name} {'at work' if tick.is_running else 'waits'}" for tick in (*self.loops, *self.jobs)]
        children = [f"{job.kind} {job.subject}" for job in self.ground.children()]
        return "; ".join([*states, *children, f"{len(self.queue())} on the way", f"{len(self.errors())} errors"])


Roles = Callable[[Config, str, Store, Callable[[BaseException], None]], contextlib.AbstractContextManager[Working]]
"""From a configuration, a node id, a store and whom to tell of a fault, to the roles at work."""
