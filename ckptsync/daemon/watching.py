"""The worker role: ticks over the output directories that are there now.

``look`` pins and judges, every second where anything moved, and asks no store; ``worker`` plans what is sent, when a look says that something is due and
every `scan_every` besides; a tick of each lane sends.  So what is sent for an hour, or waits for its store, keeps nothing from being pinned, and nothing
small from being sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from ckptsync.config.runs import OutputDirectories, output_directories, places, unmatched
from ckptsync.config.schema import Config, WorkerConfig
from ckptsync.daemon import told
from ckptsync.daemon.disks import disks
from ckptsync.daemon.lock import Locks
from ckptsync.daemon.memory import give_back
from ckptsync.daemon.pauses import Pauses, rest_after
from ckptsync.daemon.phases import Line, pairs
from ckptsync.daemon.posts import PATIENCE, UNSETTLED_EVERY, Posts
from ckptsync.daemon.progress import LANE
from ckptsync.daemon.served import remember
from ckptsync.daemon.surveying import shown
from ckptsync.daemon.working import Outcome, Role
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.fleet.heartbeat import Disk
from ckptsync.stores import signs
from ckptsync.stores.contract import Store
from ckptsync.walk import OURS, UnsafeSpool
from ckptsync.watch import Watch, watch
from ckptsync.worker.glance import glance
from ckptsync.worker.looking import Look
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.queue import UploadQueue, UploadQueues
from ckptsync.worker.result import WorkerResult
from ckptsync.worker.worker import NOTES, Worker

GLANCE_EVERY = 1.0
TELL_EVERY = 1.0  # seconds between two words on what has ended, while more is to be sent
IDLE_LOOKS, IDLE_SENDS = 2, 4  # times `scan_every`, at least, while nothing is on its way, nothing moves and the kernel tells of it


class Watching:
    """A `Worker` for each output directory that is there, so that one may come and go while another is being sent."""

    def __init__(self, config: Config, node: str, store: Store, fatal: Callable[[BaseException], None]) -> None:
        self._config, self._node, self._store = config, node, store
        self._locks = Locks(node)
        self._watch: Watch | None = None
        self._workers: Mapping[RunDir, Worker] = {}
        self._problems: tuple[str, ...] = ()
        self._unmatched: tuple[str, ...] = ()
        self._unsafe: tuple[str, ...] = ()
        self._posts = Posts()
        self._locations: tuple[str, ...] = ()
        self._glimpse: object = None
        self._next = self._moved = self._renewed = 0.0
        self._outcome = self._sent = Outcome()
        self._is_idle = self._is_told = self._was_told = False
        self._next_send = self._look_cost = 0.0
        self._due, self._planned = float("inf"), float("-inf")
        self._pauses = Pauses()
        self._unsent: list[str] = []
        self._parting: dict[RunDir, Worker] = {}  # of output directories that were removed: they may have something to say
        self._lost: tuple[str, ...] = ()
        self._lanes = UploadQueues(config.limits.threads)
        self._lanes.ended = self._ended
        self.looking = Role("look", GLANCE_EVERY, self.look, fatal)
        self.sending = Role("worker", config.worker.scan_every, self.send, fatal)
        self.carrying = tuple(carrying(lane, n, config.worker.scan_every, fatal) for n, lane in enumerate(self._lanes.queues, 1))

    def begin(self) -> None:
        """Look which directories there are; raises ConfigError if one of them is another worker's, or none of them may be used."""
        for run in self._found().runs:
            # one that cannot be used is a problem of its own, which every look tells
            with contextlib.suppress(StoreError, UnsafeSpool):
                self._locks.hold(Path(run.path) / OURS)
        self._renew()
        mine = [problem for problem in self._problems if problem not in self._unsafe]  # else other users could end a service
        if mine and not self._workers:
            raise ConfigError("; ".join(mine), hint="see worker.runs in the configuration")

    def hint(self, path: str = "") -> None:
        """Something was written below an output directory; "": nobody knows below which."""
        self._posts.hint(path)
        self.looking.tick.hint()

    def look(self) -> Outcome:
        """One tick: a glance, and a look where it says so, or nobody has looked for long."""
        now, every = time.monotonic(), self._config.worker.scan_every
        has_come = glance(self._locations) != self._glimpse
        has_moved = self._posts.stir(now) or has_come
        if not has_moved and now < self._next:
            return self._outcome
        if has_moved:
            self._moved, self._is_idle = now, False
        if has_come or now - self._renewed >= every:
            self._renew()
        for post in [post for post in self._posts if post.is_due(now, every)]:
            post.look(now)
        self._look_cost = sum(post.cost for post in self._posts)
        looks = [post.told(now) for post in self._posts]
        self._arrange(now, looks)
        self._outcome = self._seen(looks)
        return self._outcome

    def send(self) -> Outcome:
        """One tick: what is due goes to the lanes, and now and then what only the store knows is looked for, such as damage to mend; what became of all."""
        now, is_told = time.monotonic(), self._is_told
        self._is_told = False
        if now >= self._due or not (self._is_at_rest(now) or (is_told and now < self._planned + self._config.worker.scan_every)):
            self._plan(now)
        elif not is_told:
            self._give_back(is_told=False)
            return self._sent
        self._sent = self._sent_now()
        self._again_in_time()
        self._give_back(is_told=is_told)
        return self._sent

    def _give_back(self, *, is_told: bool) -> None:
        """When all is sent, and at the tick after that: who has just told so may still have held a buffer."""
        if (is_told or self._was_told) and not self._sent.queue:
            give_back()
        self._was_told = is_told

    def _is_at_rest(self, now: float) -> bool:
        return self._is_idle and now < self._next_send

    def _plan(self, now: float) -> None:
        self._is_idle, self._next_send = True, 0.0  # unless something moves meanwhile
        self._due, self._planned = float("inf"), now
        self._unsent = []
        workers, began = self._workers, time.thread_time()
        self._lanes.retain({line for worker in workers.values() for line in worker.lines})
        for run, worker in workers.items():
            try:
                remember(run.path / OURS, self._store.url)
                worker.plan(time.monotonic())
            except (StoreError, UnsafeSpool) as e:  # noqa: PERF203 - one directory's failure keeps no other back
                self._unsent.append(str(e))
        for run, worker in list(self._parting.items()):
            worker.plan(time.monotonic())
            self._lost = tuple(dict.fromkeys((*self._lost, *worker.told(time.monotonic()).notes)))[-NOTES:]
            if worker.has_gone or run.path.is_dir():
                self._parting.pop(run, None)
        rest = rest_after(time.thread_time() - began, IDLE_SENDS * self._config.worker.scan_every)
        self._next_send = time.monotonic() + rest

    def _sent_now(self) -> Outcome:
        results = [replace(worker.told(time.monotonic()), notes=()) for worker in self._workers.values()]  # each look tells notes
        problems = self._unsent
        since = [at for result in results for at in result.pending_since.values()]
        queue = tuple(item for result in results for item in result.queue)
        errors = (*problems, *(error for result in results for error in result.errors))
        self._is_idle = self._is_idle and not (queue or errors or self._parting)
        lines = (*_left_out(problems), *(line for result in results for line in told.worker(result)))
        is_held_up = any(failure.may_pass for result in results for failure in result.failures)
        lacks = {record: names for result in results for record, names in result.lacks.items()}
        return Outcome(lines, queue, errors, oldest=min(since, default=None), is_held_up=is_held_up, lacks=lacks)

    def _again_in_time(self) -> None:
        """A store that went away is asked again soon; else all is planned anew every `scan_every`."""
        now = time.monotonic()
        if self._sent.is_held_up:
            self._due = min(self._due, now + self._pauses.after(self._planned))
        else:
            self._pauses.forget()
        rest = self._next_send if self._is_idle else self._planned + self._config.worker.scan_every
        self.sending.tick.at(max(0.0, min(self._due, rest) - now))

    def _ended(self) -> None:
        """A lane has ended one: it is told at once when nothing is left, and else with others."""
        self._is_told = True
        self.sending.tick.at(0.0 if self._lanes.is_drained else TELL_EVERY)

    def runs(self) -> Mapping[str, Path]:
        """The output directories by the names of their runs."""
        return {run.name: run.path for run in self._workers}

    def disks(self) -> tuple[Disk, ...]:
        """How full the disks of the output directories are."""
        return disks([(str(run.path), worker.held()) for run, worker in self._workers.items()], self._config.worker.spool_budget)

    def close(self) -> None:
        """Give back watches and locks."""
        if self._watch:
            self._watch.close()
        self._locks.close()

    def _arrange(self, now: float, looks: list[Look]) -> None:
        """When to look again, and when to send."""
        due = min((look.due for look in looks if look.due is not None), default=None)
        rest = self._config.worker.scan_every
        if due is None:
            rest = rest_after(self._look_cost, IDLE_LOOKS * rest) if self._is_idle and self._is_heard() else rest
        else:
            self._is_idle = False
            self._due = min(self._due, now + due)
            rest = min(rest, max(UNSETTLED_EVERY, min(due, (now - self._moved) / PATIENCE)))
            self.sending.tick.at(due)
            self.looking.tick.at(rest)
        self._next = now + rest

    def _is_heard(self) -> bool:
        """Whether the kernel tells of every change that no glance sees."""
        return self._watch is not None and set(self._watch.modes().values()) <= {"events"}

    def _seen(self, looks: list[Look]) -> Outcome:
        failures = tuple(failure for look in looks for failure in look.failures)
        lost = self._watch.notes() if self._watch else ()
        notes = tuple(dict.fromkeys((*lost, *self._lost, *(note for look in looks for note in look.notes))))
        modes = {shown(path): mode for path, mode in self._watch.modes().items()} if self._watch else {}
        result = WorkerResult(self._node, failures=failures, notes=notes)
        return Outcome(
            (*_left_out(self._problems), *told.worker(result)),
            errors=(*self._problems, *result.errors),
            notes=(*self._unmatched, *notes),
            watch=modes,
        )

    def _found(self) -> OutputDirectories:
        return output_directories(self._config.worker.runs, self._store.url)

    def _renew(self) -> None:
        """Take in directories that have appeared; one that cannot be had holds up no other."""
        self._locations, self._renewed = places(self._config.worker.runs), time.monotonic()
        self._glimpse = glance(self._locations)  # before it is looked which are there
        found = self._found()
        workers: dict[RunDir, Worker] = {}
        problems = [*found.problems, *found.unsafe]
        self._unsafe = found.unsafe
        for run in found.runs:
            at = RunDir(run.name, Path(run.path))
            try:
                self._locks.hold(at.path / OURS)
                workers[at] = self._workers.get(at) or Worker(
                    worker_options(self._config, self._node, (at,)), self._store, self._lanes
                )
            except CkptsyncError as e:
                problems.append(str(e))
        self._problems, self._unmatched = tuple(problems), unmatched(self._config.worker.runs)
        self._parting |= {at: gone for at, gone in self._workers.items() if at not in workers and not at.path.is_dir()}
        if list(workers) != list(self._workers) or self._watch is None:
            self._rewatch(workers)
        else:
            self._watch.refresh()
        self._workers = workers
        self._posts.retain(workers)

    def _rewatch(self, workers: Mapping[RunDir, Worker]) -> None:
        if self._watch:
            self._watch.close()
        self._watch = watch([str(run.path) for run in workers], self.hint)


def carrying(lane: UploadQueue, number: int, every: float, fatal: Callable[[BaseException], None]) -> Role:
    """The role of a lane: it says nothing itself, the plan does."""
    name = f"{LANE}{number}"

    def carry() -> Outcome:
        with signs.of(name):
            lane.carry()
        return Outcome()

    role = Role(name, every, carry, fatal)
    lane.wake = partial(role.tick.at, 0.0)
    return role


def worker_options(config: Config, node: str, runs: tuple[RunDir, ...]) -> WorkerOptions:
    """What a worker is told of a configuration: every key of ``worker`` that is not about finding runs, and how many threads."""
    keys = {f.name for f in fields(WorkerOptions)} & {f.name for f in fields(WorkerConfig)} - {"runs"}
    return WorkerOptions(node, runs, threads=config.limits.threads, **{key: getattr(config.worker, key) for key in keys})


def _left_out(problems: tuple[str, ...] | list[str]) -> list[Line]:
    return [Line(f"problem {text}", pairs(phase="left-out", error=text), is_error=True) for text in problems]
