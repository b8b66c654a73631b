"""The heartbeat: what this process is doing, for `ckptsync status`; the facts of its node; and the watch for a second worker."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import platform
import resource
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsync import __version__
from ckptsync.errors import ConfigError, StoreError
from ckptsync.fleet import facts, heartbeat
from ckptsync.fleet.facts import Facts, Train
from ckptsync.fleet.heartbeat import Disk, Heartbeat
from ckptsync.mounts import mount_of
from ckptsync.service.log import pairs, shown
from ckptsync.service.process import Stopping
from ckptsync.service.roles import Roles
from ckptsync.spool import marks
from ckptsync.spool.marks import Begun
from ckptsync.stores.contract import Store
from ckptsync.walk import OURS
from ckptsync.worker.clock import Clock
from ckptsync.worker.node import umask

MOST = 1000  # entries of the queue that a heartbeat tells
RATE_OVER = 60.0  # seconds

log = logging.getLogger(__name__)

_INOTIFY = Path("/proc/sys/fs/inotify")
_GPUS = Path("/proc/driver/nvidia")


class Heart:
    """Beats until it finds that it is the second one."""

    def __init__(self, store: Store, mine: Heartbeat, roles: Roles, stop: Stopping) -> None:
        self._store, self._mine, self._roles, self._stop = store, mine, roles, stop
        self._rate = Rate()
        self._facts: Facts | None = None
        self._clock = Clock(store, mine.node)
        self._offset: int | None = None

    def beat(self) -> None:
        """Write one; asks for a stop with exit code 2 if another live worker of this id was there first."""
        try:
            self._mine = heartbeat.beat(self._store, self._telling(time.monotonic()))
        except heartbeat.Rival as e:
            log.critical("%s", pairs(phase="refused", error=e, hint=e.hint))
            self._stop.ask(e.exit_code)
        else:
            self._tell_facts()

    def farewell(self) -> None:
        """Say that this process has stopped, unless the name is another's."""
        if self._stop.code == ConfigError.exit_code:
            return
        failed = heartbeat.farewell(self._store, self._mine)
        if failed:
            log.warning("%s", pairs(phase="stopped", error=failed))

    def _tell_facts(self) -> None:
        """Where something has changed since they were told last."""
        found = survey(self._mine.node, self._roles.runs(), self._measured(time.monotonic()))
        if found != self._facts:
            facts.write(self._store, replace(found, at=time.time()), self._mine.roles)
            self._facts = found

    def _measured(self, now: float) -> int | None:
        """How far the node's clock is from the store's; as it was last known where the store does not say now."""
        self._clock.notice(now)
        with contextlib.suppress(StoreError):  # the facts that follow tell that the store is away
            self._offset = self._clock.offset(now)
        return self._offset

    def _telling(self, now: float) -> Heartbeat:
        roles, handed, oldest = self._roles, self._roles.handed(), self._roles.oldest()
        roles.disks = tuple(disks(roles.held(), roles.spool_budget))
        return replace(
            self._mine,
            told=time.time(),
            queue=roles.queue()[:MOST],
            errors=tuple(map(shown, roles.errors())),
            oldest=0.0 if oldest is None else max(0.0, now - oldest),
            sent_bytes=handed,
            rate=self._rate.read(now, handed),
            disk=roles.disks,
            watch=roles.watch(),
            lacks=dict(list(roles.lacks().items())[:MOST]),
            jobs=roles.jobs_of_children(),
            verifies=roles.verifies,
            notes=tuple(map(shown, (*roles.clocks.notes, *roles.notes())[:MOST])),
        )


class Rate:
    """How fast bytes go to the store: readings of a counter that only grows, over the last minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now: float, count: int) -> float:
        """A second, since the reading that is nearest to a minute ago; 0 at the first one.  ``now`` only grows."""
        self._readings.append((now, count))
        while len(self._readings) > 2 and now - self._readings[1][0] >= RATE_OVER:
            self._readings.popleft()
        then, before = self._readings[0]
        return (count - before) / (now - then) if now > then else 0.0


def disks(held: Iterable[tuple[Path, int]], budget: int) -> Iterator[Disk]:
    """How full the file system of each output directory is that can be asked, with the bytes that only our pins hold there."""
    for path, spool in held:
        with contextlib.suppress(OSError):  # the look says what is wrong with it
            there = os.statvfs(path)
            yield Disk(shown(path), there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize, spool, budget)


def survey(node: str, runs: Mapping[str, Path], clock_offset: int | None = None) -> Facts:
    """The facts of this node, as far as the system tells them; ``runs``: the output directories by the names of their runs.

    ``clock_offset``: see `Facts`; the store alone can tell it.
    """
    return Facts(
        node=node,
        host=socket.gethostname(),
        machine=marks.boot(),
        user=_user(),
        umask=umask(),
        ckptsync=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        limits=_limits(),
        file_systems={shown(path): mount_of(str(path)).kind for path in runs.values()},
        gpus=_gpus(),
        trains={name: train for name, path in runs.items() if (train := _train(path / OURS))},
        clock_offset=clock_offset,
    )


def _train(spool: Path) -> Train | None:
    """The newest one: of several ranks here the first speaks for all, with the number that they counted last."""
    begun = marks.begun(spool)
    newest = [b for b in begun if b.train == begun[-1].train]
    if not newest:
        return None
    first = min(newest, key=lambda b: b.rank)
    return Train(first.trainer, first.world, max(b.local_world for b in newest), first.at, dict(first.facts), _state(newest))


def _state(train: Sequence[Begun]) -> str:
    """Processes of another container cannot be asked: those run until they say that they have ended."""
    if all(b.ended for b in train):
        return "ended"
    return "runs" if any(marks.is_running(b) is not False for b in train if not b.ended) else "gone"


def _limits() -> dict[str, int]:
    found = {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    for name in ("max_user_instances", "max_user_watches", "max_queued_events"):
        text = _text(_INOTIFY / name).strip()
        found |= {name: int(text)} if text.isdigit() else {}
    return found


def _gpus() -> tuple[str, ...]:
    told = [_text(path) for path in sorted(_GPUS.glob("gpus/*/information"))]
    models = [line.partition(":")[2].strip() for text in told for line in text.splitlines() if line.startswith("Model:")]
    driver = _text(_GPUS / "version").partition("\n")[0].strip()
    return (*models, *([driver] if driver else []))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.getuid())


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # the system does not tell
