"""The state of this process, and its heartbeat, which publishes that state in the store.

Nodes never talk to each other, so the store must say what each of them does.  `Roles` collects the
tasks of this process and their outcomes.  `Heart` writes them as heartbeats, often while something
changes, with the node's facts, and stops the process if another worker has the same node id.
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
from ckptsync.records.progress import Progress
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
SOON, MOVING_EVERY = 1.0, 5.0
"""Seconds between two heartbeats, at least: because a state has changed, while bytes move."""
LOG_EVERY = 60.0  # seconds between two lines about what moves
RATE_OVER = 60.0  # seconds

log = logging.getLogger(__name__)


class Roles:
    """The roles and tasks of this process.

    ``local`` tasks begin at once, ``tasks`` and ``periodic`` ones once the store is open;
    APScheduler repeats the periodic ones.
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
        """The disks in the last heartbeat."""
        self.watchdog = Watchdog(HUNG)
        self.sent_bytes: Callable[[], int] = progress_signs.sent_bytes

    @property
    def all(self) -> tuple[Task, ...]:
        """Return all tasks."""
        return (*self.local, *self.tasks, *self.periodic)

    def outcome(self) -> Outcome:
        """Return the last outcomes of all tasks as one, without duplicates and without ``lines``.

        A task's own failure is among the errors.
        """
        tasks = self.all
        outcomes = [task.outcome for task in tasks]
        return Outcome(
            queue=tuple(dict.fromkeys(item for o in outcomes for item in o.queue)),
            errors=tuple(dict.fromkeys(error for task in tasks for error in task.errors())),
            notes=tuple(dict.fromkeys(note for o in outcomes for note in o.notes)),
            watch={path: mode for o in outcomes for path, mode in o.watch.items()},
            lacks={record: names for o in outcomes for record, names in o.lacks.items()},
        )

    def running(self) -> tuple[Progress, ...]:
        """Return the progress of all saves and jobs that run, wait or failed."""
        saves = self.worker.running() if self.worker else ()
        jobs = self.head.running() if self.head else ()
        return (*saves, *jobs)

    def status(self) -> str:
        """Return the present state of tasks, jobs and queues on one line, for systemd."""
        states = [
            f"{task.name} {'at work' if task.is_running else 'waits'}"
            for task in (*self.tasks, *self.periodic)
        ]
        jobs = self.head.jobs.running() if self.head else ()
        states += [f"{job.kind} {job.subject}" for job in jobs]
        now = self.outcome()
        return "; ".join([*states, f"{len(now.queue)} to upload", f"{len(now.errors)} errors"])


class Heart:
    """Writes the heartbeats of this process, and stops it if another worker has its node id."""

    def __init__(self, store: Store, first_beat: Heartbeat, roles: Roles, stop: Stopping) -> None:
        self._store, self._mine, self._roles, self._stop = store, first_beat, roles, stop
        self._rate = Rate()
        self._rates: dict[tuple[str, str], Rate] = {}
        self._logged: dict[tuple[str, str], float] = {}
        self._beaten = self._compared = float("-inf")
        self._facts: Facts | None = None
        self._clock = Clock(store, first_beat.node)
        self._offset: int | None = None

    def beat(self) -> None:
        """Write a heartbeat, and the node's facts if they have changed; ahead of uploads.

        If a worker that was started earlier has this node id, requests a stop (2) and writes
        nothing more.  Raises StoreError.
        """
        with urgent():
            self._beat()

    def _beat(self) -> None:
        """Do what `beat` says, without its priority over uploads.  Raises StoreError.

        Notes the time before it writes, also if that fails.  Measures the clock's offset where an
        hour has passed; if that fails, the facts have the last one.
        """
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
        facts = survey(self._mine.node, runs, self._offset)
        if facts != self._facts:
            heartbeat.write_facts(self._store, replace(facts, at=time.time()), self._mine.roles)
            self._facts = facts

    def compare_states(self) -> bool:
        """Compare states with the last heartbeat's; return True if a heartbeat must be written now.

        That is so if a state has changed, or if bytes are moving and the last heartbeat is
        `MOVING_EVERY` seconds old.  Notes the time: within `SOON` seconds of a comparison or a
        heartbeat, return False without comparing.
        """
        now = time.monotonic()
        since = now - self._beaten
        if now - max(self._beaten, self._compared) < SOON:
            return False
        self._compared = now
        running = self._running()
        if since >= MOVING_EVERY and any(p.is_moving for p in running):
            return True
        return _states(running) != _states(self._mine.running)

    def _running(self) -> tuple[Progress, ...]:
        """Return up to `MOST` entries of progress, moving ones first, with text for JSON."""
        running = sorted(self._roles.running(), key=lambda p: (not p.is_moving, p.since))
        return tuple(
            replace(
                p,
                run=shown(p.run),
                checkpoint=shown(p.checkpoint),
                location=shown(p.location),
                reason=shown(p.reason),
                hint=shown(p.hint),
            )
            for p in running[:MOST]
        )

    def _rated(self, now: float) -> tuple[Progress, ...]:
        """Return the entries of `_running` with rates in bytes/s; log moving ones once a minute.

        Rates of entries that move no more are dropped.  ``now`` is on the monotonic clock.
        """
        running = self._running()
        moving = {(p.kind, p.subject) for p in running if p.is_moving}
        self._rates = {key: self._rates.get(key) or Rate() for key in moving}
        self._logged = {key: self._logged.get(key, now) for key in moving}
        rated = []
        for p in running:
            key = (p.kind, p.subject)
            rate = self._rates[key].read(now, p.done) if key in moving else 0.0
            rated.append(replace(p, rate=max(0.0, rate)))
            if key in moving and now - self._logged[key] >= LOG_EVERY:
                self._logged[key] = now
                log.info("%s", _log_line(rated[-1]))
        return tuple(rated)

    def farewell(self) -> None:
        """Write that this process has stopped, unless that is because of another worker (code 2).

        A failure is only logged.
        """
        if self._stop.code == ConfigError.exit_code:
            return
        last = replace(self._mine, lacks=_lacks(self._roles.outcome()))  # found since the last beat
        failed = heartbeat.farewell(self._store, last)
        if failed:
            log.warning("%s", pairs(phase="stopped", error=failed))

    def _current(self, now: float) -> Heartbeat:
        """Return the heartbeat at ``now`` (monotonic clock); examine the disks.

        Sets ``disks`` of the roles, and logs as `_rated` does.
        """
        roles, sent_bytes, outcome = self._roles, self._roles.sent_bytes(), self._roles.outcome()
        roles.disks = tuple(
            disks(roles.worker.pinned_bytes() if roles.worker else [], roles.spool_budget)
        )
        return replace(
            self._mine,
            written=time.time(),
            running=self._rated(now),
            errors=tuple(map(shown, outcome.errors)),
            sent_bytes=sent_bytes,
            rate=self._rate.read(now, sent_bytes),
            disk=roles.disks,
            watch=outcome.watch,
            lacks=_lacks(outcome),
            verifies=roles.verifies,
            notes=tuple(map(shown, outcome.notes[:MOST])),
        )


def _states(running: Iterable[Progress]) -> set[tuple[str, str, str, str]]:
    """Return kind, subject, state and reason of each entry: a change of these needs a heartbeat."""
    return {(p.kind, p.subject, p.state, p.reason) for p in running}


def _log_line(entry: Progress) -> str:
    """Return the log line of a moving upload or job."""
    seconds_left = (
        (entry.total - entry.done) / entry.rate if entry.total and entry.rate >= 1 else None
    )
    return pairs(
        phase=entry.kind if entry.state == "running" else entry.state,
        run=entry.run,
        checkpoint=entry.location or entry.checkpoint,
        done=entry.done,
        total=entry.total or "",
        rate=round(entry.rate),
        left=None if seconds_left is None else round(seconds_left),
    )


def _lacks(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    """Return the first `MOST` records whose damaged files this node lacks."""
    return dict(list(outcome.lacks.items())[:MOST])


class Rate:
    """Bytes a second over the last minute, from readings of a counter that only grows."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now: float, count: int) -> float:
        """Store a reading; return the bytes/s since the one about `RATE_OVER` seconds ago.

        0 at the first reading.  ``now`` is on the monotonic clock.
        """
        self._readings.append((now, count))
        while len(self._readings) > 2 and now - self._readings[1][0] >= RATE_OVER:
            self._readings.popleft()
        first_time, first_count = self._readings[0]
        return (count - first_count) / (now - first_time) if now > first_time else 0.0


def disks(pinned_bytes: Iterable[tuple[Path, int]], budget: int) -> Iterator[Disk]:
    """Yield how full each output directory's file system is; skip one that cannot be read.

    ``pinned_bytes``: the directories, each with the bytes of files that only pins still have.
    ``budget``: the configured limit of those bytes, for each `Disk`.
    """
    for path, spool in pinned_bytes:
        with contextlib.suppress(OSError):  # the scan reports what is wrong with it
            usage = shutil.disk_usage(path)
            yield Disk(shown(path), usage.free, usage.total, spool, budget)


def survey(node: str, runs: Mapping[str, Path], clock_offset: int | None = None) -> Facts:
    """Return the facts of this node: identity, versions, limits, GPUs, file systems, trainings.

    What the system does not say is left out or empty.  ``runs``: the output directories by the
    names of their runs.  ``clock_offset``: ns by which this clock is ahead of the store's.
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
        machine=markers.boot_id(),
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
    """Return the newest training that a hook announced in a spool; None if there is none.

    Its facts and time are those of its lowest rank on this node; its state of all ranks here.
    """
    processes = markers.list_training_processes(spool)
    newest = [b for b in processes if b.train == processes[-1].train]
    if not newest:
        return None
    # processes of another container cannot be asked: those run until they say that they have ended
    runs = any(markers.is_training(b) is not False for b in newest if not b.ended)
    state = "ended" if all(b.ended for b in newest) else "runs" if runs else "gone"
    first = min(newest, key=lambda b: b.rank)
    local_world = max(b.local_world for b in newest)
    return Train(first.trainer, first.world, local_world, first.at, dict(first.facts), state)


def _text(path: Path) -> str:
    """Return a file's text, or "" if it cannot be read."""
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # this system does not say
