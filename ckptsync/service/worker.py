"""The worker role: it looks at the output directories that are there now, and sends what is finished.

A look pins and judges, every second where anything moved, and asks no store; a send plans what goes, when a look says that something is due and
every `scan_every` besides; a loop of each lane carries it.  So what is sent for an hour, or waits for its store, keeps nothing from being pinned, and
nothing small from being sent.

Of a thousand output directories most belong to trainings that are over, and must cost next to nothing beside the one that trains: `Directories` says
which are looked at: where something moved, where a save is on its way, and now and then the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from ckptsync.config.runs import OutputDirectories, output_directories, places, unmatched
from ckptsync.config.schema import Config, WorkerConfig
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.service.log import Line, pairs, shown
from ckptsync.service.periodic import Outcome, Periodic, backoff
from ckptsync.service.process import Locks
from ckptsync.service.store import remember
from ckptsync.service.watchdog import LANE
from ckptsync.stores import signs
from ckptsync.stores.contract import Store
from ckptsync.walk import OURS, UnsafeSpool
from ckptsync.watch import Watch, watch
from ckptsync.worker.glance import aims, glance
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.queue import UploadQueue, UploadQueues
from ckptsync.worker.result import Progress, WorkerResult
from ckptsync.worker.scanner import Scan
from ckptsync.worker.worker import NOTES, Worker

GLANCE_EVERY = 1.0
TELL_EVERY = 1.0  # seconds between two words on what has ended, while more is to be sent
IDLE_LOOKS, IDLE_SENDS = 2, 4  # times `scan_every`, at least, while nothing is on its way, nothing moves and the kernel tells of it
UNSETTLED_EVERY = 0.5  # seconds between looks while a checkpoint is being written: its files grow, and no directory changes by that
PATIENCE = 20  # part of the time since anything moved that the next look may wait: what a crash left half written is not to be asked for ever
STILL = 600.0  # seconds without a change after which a directory is glanced at in turn with others like it
SLACK = 0.05  # seconds by which a tick may come too early
IN_TURN = 100  # directories, about, that a glance has for those: some 0.6 ms
FIRST, LONGEST = 2.0, 15.0
"""Seconds until a store that went away is asked again; its own tries come before, and take `limits.patience`."""
SHARE = 0.0003  # of a core that looking in vain may take
LONGEST_REST = 600.0


def rest_after(cost: float, least: float) -> float:
    """Seconds until what took ``cost`` seconds of CPU, and found nothing to do, is done again: looking at many checkpoints costs more than at few."""
    return max(least, min(LONGEST_REST, cost / SHARE))


def pause(tries: int) -> float:
    """Seconds until a store is asked again that was away so many times: drawn by chance, since nodes that failed together are not to come back together."""
    return backoff(tries, FIRST, LONGEST) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class WorkerRole:
    """A `Worker` for each output directory that is there, so that one may come and go while another is being sent."""

    def __init__(self, config: Config, node: str, store: Store, fatal: Callable[[BaseException], None]) -> None:
        self._config, self._node, self._store = config, node, store
        self._locks = Locks(node)
        self._watch: Watch | None = None
        self._workers: Mapping[RunDir, Worker] = {}
        self._problems: tuple[str, ...] = ()
        self._unmatched: tuple[str, ...] = ()
        self._unsafe: tuple[str, ...] = ()
        self._directories = Directories()
        self._locations: tuple[str, ...] = ()
        self._glimpse: object = None
        self._next = self._moved = self._renewed = 0.0
        self._outcome = self._sent = Outcome()
        self._is_idle = self._is_told = self._was_told = False
        self._next_send = self._look_cost = 0.0
        self._due, self._planned = float("inf"), float("-inf")
        self._outages, self._asked_again = 0, float("-inf")  # plans in succession that found the store away, and the last of them
        self._unsent: list[str] = []
        self._parting: dict[RunDir, Worker] = {}  # of output directories that were removed: they may have something to say
        self._lost: tuple[str, ...] = ()
        self._lanes = UploadQueues(config.limits.threads)
        self._lanes.ended = self._ended
        self.looking = Periodic("look", GLANCE_EVERY, self.look, fatal)
        self.sending = Periodic("worker", config.worker.scan_every, self.send, fatal)
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
        self._directories.hint(path)
        self.looking.hint()

    def look(self) -> Outcome:
        """One tick: a glance, and a look where it says so, or nobody has looked for long."""
        now, every = time.monotonic(), self._config.worker.scan_every
        has_come = glance(self._locations) != self._glimpse
        has_moved = self._directories.stir(now) or has_come
        if not has_moved and now < self._next:
            return self._outcome
        if has_moved:
            self._moved, self._is_idle = now, False
        if has_come or now - self._renewed >= every:
            self._renew()
        for one in [one for one in self._directories if one.is_due(now, every)]:
            one.look(now)
        self._look_cost = sum(one.cost for one in self._directories)
        looks = [one.told(now) for one in self._directories]
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
            self._release(is_told=False)
            return self._sent
        self._sent = self._sent_now()
        self._again_in_time()
        self._release(is_told=is_told)
        return self._sent

    def _release(self, *, is_told: bool) -> None:
        """When all is sent, and at the tick after that: who has just told so may still have held a buffer."""
        if (is_told or self._was_told) and not self._sent.queue:
            give_back_memory()
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
        lines = (*_left_out(problems), *(line for result in results for line in worker_lines(result)))
        is_held_up = any(failure.may_pass for result in results for failure in result.failures)
        lacks = {record: names for result in results for record, names in result.lacks.items()}
        return Outcome(lines, queue, errors, oldest=min(since, default=None), is_held_up=is_held_up, lacks=lacks)

    def _again_in_time(self) -> None:
        """A store that went away is asked again soon; else all is planned anew every `scan_every`."""
        now = time.monotonic()
        if not self._sent.is_held_up:
            self._outages = 0
        elif self._asked_again != self._planned:
            self._outages, self._asked_again = self._outages + 1, self._planned
            self._due = min(self._due, now + pause(self._outages))
        rest = self._next_send if self._is_idle else self._planned + self._config.worker.scan_every
        self.sending.at(max(0.0, min(self._due, rest) - now))

    def _ended(self) -> None:
        """A lane has ended one: it is told at once when nothing is left, and else with others."""
        self._is_told = True
        self.sending.at(0.0 if self._lanes.is_drained else TELL_EVERY)

    def runs(self) -> Mapping[str, Path]:
        """The output directories by the names of their runs."""
        return {run.name: run.path for run in self._workers}

    def held(self) -> list[tuple[Path, int]]:
        """The output directories, each with the bytes that only our pins still hold there."""
        return [(run.path, worker.held()) for run, worker in self._workers.items()]

    def close(self) -> None:
        """Give back watches and locks."""
        if self._watch:
            self._watch.close()
        self._locks.close()

    def _arrange(self, now: float, looks: list[Scan]) -> None:
        """When to look again, and when to send."""
        due = min((look.due for look in looks if look.due is not None), default=None)
        rest = self._config.worker.scan_every
        if due is None:
            rest = rest_after(self._look_cost, IDLE_LOOKS * rest) if self._is_idle and self._is_heard() else rest
        else:
            self._is_idle = False
            self._due = min(self._due, now + due)
            rest = min(rest, max(UNSETTLED_EVERY, min(due, (now - self._moved) / PATIENCE)))
            self.sending.at(due)
            self.looking.at(rest)
        self._next = now + rest

    def _is_heard(self) -> bool:
        """Whether the kernel tells of every change that no glance sees."""
        return self._watch is not None and set(self._watch.modes().values()) <= {"events"}

    def _seen(self, looks: list[Scan]) -> Outcome:
        failures = tuple(failure for look in looks for failure in look.failures)
        lost = self._watch.notes() if self._watch else ()
        notes = tuple(dict.fromkeys((*lost, *self._lost, *(note for look in looks for note in look.notes))))
        modes = {shown(path): mode for path, mode in self._watch.modes().items()} if self._watch else {}
        result = WorkerResult(self._node, failures=failures, notes=notes)
        return Outcome(
            (*_left_out(self._problems), *worker_lines(result)),
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
        self._directories.retain(workers)

    def _rewatch(self, workers: Mapping[RunDir, Worker]) -> None:
        if self._watch:
            self._watch.close()
        self._watch = watch([str(run.path) for run in workers], self.hint)


def carrying(lane: UploadQueue, number: int, every: float, fatal: Callable[[BaseException], None]) -> Periodic:
    """The work of a lane: it says nothing itself, the plan does."""
    name = f"{LANE}{number}"

    def carry() -> Outcome:
        with signs.of(name):
            lane.carry()
        return Outcome()

    work = Periodic(name, every, carry, fatal)
    lane.wake = partial(work.at, 0.0)
    return work


def worker_options(config: Config, node: str, runs: tuple[RunDir, ...]) -> WorkerOptions:
    """What a worker is told of a configuration: every key of ``worker`` that is not about finding runs, and how many threads."""
    keys = {f.name for f in fields(WorkerOptions)} & {f.name for f in fields(WorkerConfig)} - {"runs"}
    return WorkerOptions(node, runs, threads=config.limits.threads, **{key: getattr(config.worker, key) for key in keys})


def _left_out(problems: tuple[str, ...] | list[str]) -> list[Line]:
    return [Line(f"problem {text}", pairs(phase="left-out", error=text), is_error=True) for text in problems]


def give_back_memory() -> None:
    """Give memory back to the system that nobody uses any more: glibc keeps what threads have freed, some 20 MB after a large save."""
    with contextlib.suppress(OSError, AttributeError):  # musl has no such call, and keeps less
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True)
class Directory:
    """One output directory.  ``found``: by the last look, which was ``at`` and took ``cost`` seconds of CPU; ``moved``: when anything did."""

    run: RunDir
    worker: Worker
    aims: tuple[str, ...] = ()
    glimpse: object = ()
    found: Scan = field(default_factory=Scan)
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

    def told(self, now: float) -> Scan:
        """What the last look saw, as of now."""
        due = self.found.due
        return self.found if due is None else replace(self.found, due=max(0.0, due - (now - self.at)))


class Directories:
    """All of them.  `hint` is for any thread, the rest for one."""

    def __init__(self) -> None:
        self._found: dict[RunDir, Directory] = {}
        self._hinted: set[str] = set()
        self._lock = threading.Lock()
        self._turn = 0

    def __iter__(self) -> Iterator[Directory]:
        return iter(self._found.values())

    def hint(self, path: str) -> None:
        """Something was written below it; "": nobody knows where."""
        with self._lock:
            self._hinted.add(path)

    def retain(self, workers: Mapping[RunDir, Worker]) -> None:
        """Those, as they are now."""
        self._found = {run: self._of(run, worker) for run, worker in workers.items()}

    def stir(self, now: float) -> bool:
        """Whether anything has moved since each was looked at, or one never was; which, they know."""
        with self._lock:
            hinted, self._hinted = self._hinted, set()
        glanced = set(map(id, self._glanced(now)))
        for one in self:
            if hinted & {"", str(one.run.path)} or (id(one) in glanced and glance(one.aims) != one.glimpse):
                one.moved, one.at = now, float("-inf")
        return bool(hinted) or any(one.at == float("-inf") for one in self)

    def _of(self, run: RunDir, worker: Worker) -> Directory:
        before = self._found.get(run)
        return before if before is not None and before.worker is worker else Directory(run, worker)

    def _glanced(self, now: float) -> list[Directory]:
        """Those in which something moved of late, and some of the others, in turn."""
        lively = [one for one in self if now - one.moved < STILL]
        still = [one for one in self if now - one.moved >= STILL]
        turned = still[self._turn :] + still[: self._turn]
        count = room = 0
        while count < len(turned) and room < IN_TURN:
            room += 1 + len(turned[count].aims)
            count += 1
        self._turn = (self._turn + count) % max(1, len(still))
        return lively + turned[:count]


def worker_lines(result: WorkerResult) -> Iterator[Line]:
    """Phases of checkpoints, repairs, failures."""
    for progress in result.progress:
        if progress.phase != "stored":  # `sent` has said so, or it was before this process began
            yield _progress(progress)
    for repair in result.repairs:
        phase = "not-repaired" if repair.reason else "repaired"
        text = pairs(phase=phase, run=repair.run, file=repair.name, report=repair.report, reason=repair.reason)
        yield Line(f"repair {repair.report} {repair.name}", text)
    yield from (Line(f"note {note}", pairs(phase="note", detail=note)) for note in result.notes)
    for failure in result.failures:
        text = pairs(phase="failed", run=failure.run, checkpoint=failure.checkpoint, error=failure.text, hint=_steady(failure.hint))
        yield Line(f"failure {failure.run} {failure.checkpoint}", text, is_error=True)


def _steady(hint: str) -> str:
    """How often it was tried differs each time, and is no news."""
    return re.sub(r"(; )?given up after [0-9]+ tries in [0-9]+ s$", "", hint)


def _progress(p: Progress) -> Line:
    detail = "" if p.phase in ("waiting", "failed", "sent") else p.detail  # waiting counts seconds; a failure has its own line
    counts = {"files": p.files, "bytes": p.size} if p.phase == "sent" else {}
    text = pairs(
        phase=p.phase, run=p.run, checkpoint=p.checkpoint, location=p.location, **counts, detail=detail, notes="; ".join(p.notes)
    )
    return Line(f"checkpoint {p.run}/{p.checkpoint} {p.k}", text, is_error=p.phase in ("missed", "lost"))
