"""What this process does now, and its heartbeat, which tells that to the store.

`Roles` has all tasks of the process.  `Heart` writes heartbeats and the node's facts, and finds a
second worker of its name.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import platform
import resource
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsync import __version__
from ckptsync.errors import ConfigError, StoreError
from ckptsync.mounts import mount_of
from ckptsync.service.log import pairs, shown
from ckptsync.service.process_control import Stopping
from ckptsync.service.tasks import HUNG, Outcome, Task, Watchdog
from ckptsync.spool import markers
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import Disk, Facts, Heartbeat, Train
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import urgent
from ckptsync.walk import SPOOL
from ckptsync.worker.node_identity import Clock, umask

if TYPE_CHECKING:
    from ckptsync.service.head_roles import HeadRoles
    from ckptsync.service.worker_role import WorkerRole

MOST = 1000  # entries of each list in a heartbeat
SOON, LATER = 1.0, 5.0  # seconds between two heartbeats, at least, because the queue has changed
RATE_OVER = 60.0  # seconds

log = logging.getLogger(__name__)


class Roles:
    """Tasks, in the order of their beginning: ``local`` ones at once, the others with the store.

    ``periodic`` ones are those that APScheduler repeats.
    """

    def __init__(self, local: Iterable[Task] = (), tasks: Iterable[Task] = ()) -> None:
        self.local, self.tasks = list(local), list(tasks)
        self.periodic: list[Task] = []
        self.worker: WorkerRole | None = None
        self.head: HeadRoles | None = None
        self.verifies = 0.0
        """Seconds between verifications, for heartbeats; 0: this process verifies nothing."""
        self.spool_budget = 0
        self.disks: tuple[Disk, ...] = ()
        """Of the last heartbeat."""
        self.watchdog = Watchdog(HUNG)
        self.sent_bytes: Callable[[], int] = progress_signs.sent_bytes

    @property
    def all(self) -> tuple[Task, ...]:
        """All tasks."""
        return (*self.local, *self.tasks, *self.periodic)

    def outcome(self) -> Outcome:
        """Return what the last runs of all tasks have seen and done, as one."""
        tasks = self.all
        seen = [task.outcome for task in tasks]
        return Outcome(
            queue=tuple(dict.fromkeys(item for o in seen for item in o.queue)),
            errors=tuple(dict.fromkeys(error for task in tasks for error in task.errors())),
            notes=tuple(dict.fromkeys(note for o in seen for note in o.notes)),
            oldest=min((o.oldest for o in seen if o.oldest is not None), default=None),
            watch={path: mode for o in seen for path, mode in o.watch.items()},
            lacks={record: names for o in seen for record, names in o.lacks.items()},
            blocked={name: why for o in seen for name, why in o.blocked.items()},
        )

    def status(self) -> str:
        """Return the present state, on one line."""
        states = [
            f"{task.name} {'at work' if task.is_running else 'waits'}"
            for task in (*self.tasks, *self.periodic)
        ]
        jobs = self.head.jobs.running() if self.head else ()
        states += [f"{job.kind} {job.subject}" for job in jobs]
        now = self.outcome()
        return "; ".join([*states, f"{len(now.queue)} to upload", f"{len(now.errors)} errors"])


class Heart:
    """Writes heartbeats until another worker with the same node id is found."""

    def __init__(self, store: Store, mine: Heartbeat, roles: Roles, stop: Stopping) -> None:
        self._store, self._mine, self._roles, self._stop = store, mine, roles, stop
        self._rate = Rate()
        self._beaten = float("-inf")
        self._facts: Facts | None = None
        self._clock = Clock(store, mine.node)
        self._offset: int | None = None

    def beat(self) -> None:
        """Write a heartbeat, and the node's facts where they have changed.

        Asks for a stop with exit code 2 if another live worker of this name was there first.
        """
        with urgent():
            self._beat()

    def _beat(self) -> None:
        self._beaten = now = time.monotonic()
        try:
            self._mine = heartbeat.beat(self._store, self._current(now))
        except heartbeat.Rival as e:
            log.critical("%s", pairs(phase="refused", error=e, hint=e.hint))
            self._stop.ask(e.exit_code)
            return
        self._clock.notice(now)
        with contextlib.suppress(StoreError):  # the write that follows reports it
            self._offset = self._clock.measure()
        runs = self._roles.worker.runs() if self._roles.worker else {}
        found = survey(self._mine.node, runs, self._offset)
        if found != self._facts:
            heartbeat.write_facts(self._store, replace(found, at=time.time()), self._mine.roles)
            self._facts = found

    def is_outdated(self) -> bool:
        """Return whether the upload queue is another than the last heartbeat says, for a while.

        What was empty is so at once; else a queue that moves fast would beat without end.
        """
        since = time.monotonic() - self._beaten
        if since < (SOON if not self._mine.queue else LATER):
            return False
        return self._roles.outcome().queue[:MOST] != self._mine.queue

    def farewell(self) -> None:
        """Write that this process has stopped, unless the name is another's."""
        if self._stop.code == ConfigError.exit_code:
            return
        last = replace(self._mine, lacks=_lacks(self._roles.outcome()))  # found since the last beat
        failed = heartbeat.farewell(self._store, last)
        if failed:
            log.warning("%s", pairs(phase="stopped", error=failed))

    def _current(self, now: float) -> Heartbeat:
        roles, sent, outcome = self._roles, self._roles.sent_bytes(), self._roles.outcome()
        roles.disks = tuple(disks(roles.worker.held() if roles.worker else [], roles.spool_budget))
        return replace(
            self._mine,
            written=time.time(),
            queue=outcome.queue[:MOST],
            errors=tuple(map(shown, outcome.errors)),
            oldest=outcome.waited(now),
            sent_bytes=sent,
            rate=self._rate.read(now, sent),
            disk=roles.disks,
            watch=outcome.watch,
            blocked={
                shown(name): (shown(why), shown(todo))
                for name, (why, todo) in list(outcome.blocked.items())[:MOST]
            },
            lacks=_lacks(outcome),
            jobs=roles.head.jobs.running() if roles.head else (),
            verifies=roles.verifies,
            notes=tuple(map(shown, outcome.notes[:MOST])),
        )


def _lacks(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    return dict(list(outcome.lacks.items())[:MOST])


class Rate:
    """Bytes a second over the last minute, from readings of a counter that only grows."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now: float, count: int) -> float:
        """Return the rate since the reading nearest to a minute ago; 0 at the first one."""
        self._readings.append((now, count))
        while len(self._readings) > 2 and now - self._readings[1][0] >= RATE_OVER:
            self._readings.popleft()
        then, before = self._readings[0]
        return (count - before) / (now - then) if now > then else 0.0


def disks(held: Iterable[tuple[Path, int]], budget: int) -> Iterator[Disk]:
    """Yield how full each output directory's file system is, and what only pins hold there."""
    for path, spool in held:
        with contextlib.suppress(OSError):  # the scan reports what is wrong with it
            there = shutil.disk_usage(path)
            yield Disk(shown(path), there.free, there.total, spool, budget)


def survey(node: str, runs: Mapping[str, Path], clock_offset: int | None = None) -> Facts:
    """Return the facts of this node.

    ``runs``: the output directories by the names of their runs.
    """
    limits = {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    for name in ("max_user_instances", "max_user_watches", "max_queued_events"):
        text = _text(Path("/proc/sys/fs/inotify") / name).strip()
        limits |= {name: int(text)} if text.isdigit() else {}
    nvidia = Path("/proc/driver/nvidia")
    cards = [_text(path) for path in sorted(nvidia.glob("gpus/*/information"))]
    lines = [line for text in cards for line in text.splitlines() if line.startswith("Model:")]
    models = [line.partition(":")[2].strip() for line in lines]
    driver = _text(nvidia / "version").partition("\n")[0].strip()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        user = str(os.getuid())
    return Facts(
        node=node,
        host=socket.gethostname(),
        machine=markers.boot(),
        user=user,
        umask=umask(),
        ckptsync=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        limits=limits,
        file_systems={shown(path): mount_of(str(path)).kind for path in runs.values()},
        gpus=(*models, *([driver] if driver else [])),
        trains={name: train for name, path in runs.items() if (train := _train(path / SPOOL))},
        clock_offset=clock_offset,
    )


def _train(spool: Path) -> Train | None:
    """Return the newest training that a hook announced, in the words of its first rank here."""
    begun = markers.begun(spool)
    newest = [b for b in begun if b.train == begun[-1].train]
    if not newest:
        return None
    # processes of another container cannot be asked: those run until they say that they have ended
    runs = any(markers.is_training(b) is not False for b in newest if not b.ended)
    state = "ended" if all(b.ended for b in newest) else "runs" if runs else "gone"
    first = min(newest, key=lambda b: b.rank)
    local_world = max(b.local_world for b in newest)
    return Train(first.trainer, first.world, local_world, first.at, dict(first.facts), state)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # this system does not say
