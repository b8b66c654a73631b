"""The worker as a role: `look` sees and pins what is there, `tick` sends what is due, and says what it saw and did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptsync.errors import CkptsyncError
from ckptsync.spool import pins as spool
from ckptsync.stores.contract import Store
from ckptsync.worker import repair
from ckptsync.worker.budget import SpoolRule
from ckptsync.worker.clock import Clock
from ckptsync.worker.knowledge import Knowledge
from ckptsync.worker.letting_go import Letting
from ckptsync.worker.looking import Look, Seat
from ckptsync.worker.lookout import Asked, Lookout, Watched
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options
from ckptsync.worker.result import Failure, Progress, Repaired, WorkerResult, failure
from ckptsync.worker.saving import Memory
from ckptsync.worker.selecting import chosen
from ckptsync.worker.sending import Sending
from ckptsync.worker.settle import Rule

DONE = ("stored", "elsewhere", "retired")
DOUBTFUL = 10  # times `unmarked`


class Worker:
    """Finds, pins, settles, digests and sends; and sends again what a report calls damaged.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.  `look` is for any thread, and never asks the
    store; `tick` is for one, and others may look meanwhile.  Raises ConfigError where a run and the store lie in each other.
    """

    def __init__(self, options: WorkerOptions, store: Store) -> None:
        self._options, node = checked_options(options, store.url), options.node
        self._memory = Memory()
        self._clock = Clock(store, node)
        self._knowledge = Knowledge(store, node, chosen(options), lambda: self._clock.last)
        room = SpoolRule(options.spool_budget, options.spool_full)
        seat = Seat(node, self._taken, self._knowledge.is_proven, room)
        rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
        self._lookout = Lookout(options.runs, seat, rule, Asked(self._knowledge.is_done, self._knowledge.has_mate))
        self._sending = Sending(options, self._knowledge, self._lookout, self._clock, self._memory)
        self._letting = Letting(options, self._knowledge, self._lookout)
        self._served: set[tuple[str, str]] = set()
        for run in options.runs:
            spool.sweep(run.path, node)

    def look(self, now: float) -> Look:
        """Pin what has appeared, and judge it.  ``now`` in seconds on any clock that only grows."""
        self._clock.notice(now)
        found = self._lookout.look(now)
        return replace(found, notes=(*found.notes, *self._clock.notes, *self._sending.notes))

    def tick(self, now: float) -> WorkerResult:
        """Look, and send what is settled.  Errors are in the result: one checkpoint's never keep another back."""
        found = self.look(now)
        watched = self._lookout.watched()
        ready, unread = self._read()
        told, wrong = self._sending.send([w for w in watched if w.seen.run in {run.name for run in ready}], now)
        for one in watched:
            if one.found.settled:  # what could not even be tried has to wait for the next tick, too
                self._lookout.tried(one)
        self._forget(watched)
        repairs: list[Repaired] = []
        for run in ready:
            seen = [w.seen for w in watched if w.seen.run == run.name]
            served, broken = repair.answer(run.name, seen, self._knowledge, self._served)
            gone, stuck = self._letting.go(run)
            repairs, told, wrong = [*repairs, *served], [*told, *gone], [*wrong, *broken, *stuck]
        self._clock.measure_in_time(now, is_idle=bool(told) and all(p.phase in DONE for p in told))
        return self._result(watched, told, repairs, (*found.failures, *unread, *wrong), now)

    def _result(
        self,
        watched: Sequence[Watched],
        told: Sequence[Progress],
        repairs: Sequence[Repaired],
        wrong: Sequence[Failure],
        now: float,
    ) -> WorkerResult:
        waiting = {(p.run, p.checkpoint) for p in told if p.phase in ("waiting", "failed")}
        since = {f"{w.seen.run}/{w.seen.spot.name}": w.first for w in reversed(watched) if w.key[:2] in waiting}
        sent = sum(p.size for p in told if p.phase == "sent")
        notes = (*self._clock.notes, *self._sending.notes)
        return WorkerResult(
            self._options.node, tuple(told), tuple(repairs), tuple(wrong), self._lookout.due(now), since, sent, notes
        )

    def _read(self) -> tuple[list[RunDir], list[Failure]]:
        """What the store says of each run; those that it said nothing of are failures."""
        ready: list[RunDir] = []
        wrong: list[Failure] = []
        for run in self._options.runs:
            try:
                self._knowledge.read(run.name)
                ready.append(run)
            except CkptsyncError as e:  # noqa: PERF203 - a few runs, each for itself
                wrong.append(failure(run.name, "", e))
        return ready, wrong

    def _taken(self, run: str, checkpoint: str) -> set[int]:
        return {k for r, name, k in tuple(self._memory.taken) if (r, name) == (run, checkpoint)}

    def _forget(self, watched: Sequence[Watched]) -> None:
        here = {w.key for w in watched}
        memory = self._memory
        memory.taken = {k: v for k, v in memory.taken.items() if k in here}
        memory.tidied = {k: v for k, v in memory.tidied.items() if k in here}
