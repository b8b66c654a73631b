"""The worker as a role: `look` sees and pins what is there, `plan` has sent what is due, `told` says what was seen and done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckptsync.errors import CkptsyncError
from ckptsync.spool.sweeping import sweep
from ckptsync.stores.contract import Store
from ckptsync.worker import repair
from ckptsync.worker.budget import SpoolRule, held
from ckptsync.worker.clock import Clock
from ckptsync.worker.letting_go import Letting
from ckptsync.worker.looking import Look, Seat
from ckptsync.worker.lookout import Lookout
from ckptsync.worker.observed import Rule
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options
from ckptsync.worker.queue import AtOnce, Carrier
from ckptsync.worker.result import ON_THE_WAY, Failure, Progress, WorkerResult, failure
from ckptsync.worker.saving import Memory
from ckptsync.worker.selecting import chosen
from ckptsync.worker.sending import Sending
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.watched import Asked, Watched

DONE = ("stored", "elsewhere", "retired")
DOUBTFUL = 10  # times `unmarked`


@dataclass(slots=True)
class _Done:
    """What the last plan saw and did itself."""

    watched: Sequence[Watched] = ()
    gone: list[Progress] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, gone: Sequence[Progress], failures: Sequence[Failure]) -> None:
        self.gone += gone
        self.failures += failures


class Worker:
    """Finds, pins, settles, digests and sends; and sends again what a report calls damaged.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.  `look` is for any thread, and never asks the
    store; the rest is for one, and others may look meanwhile.  Raises ConfigError where a run and the store lie in each other.

    ``carrier``: who sends what is planned; without one, `plan` itself does.
    """

    def __init__(self, options: WorkerOptions, store: Store, carrier: Carrier | None = None) -> None:
        self._options, node = checked_options(options, store.url), options.node
        self._memory = Memory()
        self._clock = Clock(store, node)
        self._view = StoreView(store, node, chosen(options), lambda: self._clock.last)
        room = SpoolRule(options.spool_budget, options.spool_full)
        seat = Seat(node, self._taken, self._view.is_proven, room)
        rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
        self._lookout = Lookout(options.runs, seat, rule, Asked(self._view.is_done, self._view.has_mate, self._view.is_like_stored))
        sender = carrier or AtOnce(options.threads)
        self._sending = Sending(options, self._view, self._lookout, self._clock, self._memory, carrier=sender)
        self._letting = Letting(options, self._view, self._lookout)
        self._repairs = repair.Repairs(self._view, sender)
        self._broken: frozenset[str] = frozenset()
        self._unmendable: frozenset[str] = frozenset()
        self._done = _Done()
        for run in options.runs:
            sweep(run.path, node)
            self._view.recall(run)

    @property
    def lines(self) -> tuple[object, ...]:
        """What its saves, and what it mends, wait in, as its carrier is told."""
        return self._sending, self._repairs

    @property
    def has_gone(self) -> bool:
        """Whether it has nothing to send, nor to say of what it had."""
        return self._sending.has_gone

    def look(self, now: float) -> Look:
        """Pin what has appeared, and judge it.  ``now`` in seconds on any clock that only grows."""
        self._clock.notice(now)
        found = self._lookout.look(now)
        return replace(found, notes=(*found.notes, *self._clock.notes, *self._sending.notes))

    def held(self) -> int:
        """Bytes of files that had no names but our pins' at the last look."""
        return held([w.seen.pin for w in self._lookout.watched() if w.seen.pin is not None])

    def tick(self, now: float) -> WorkerResult:
        """Look, have sent what is finished, and say what became of it.  Errors are in the result: one checkpoint's never keep another back."""
        self.plan(now)
        return self.told(now)

    def plan(self, now: float) -> None:
        """Look, and have sent what is finished."""
        found = self.look(now)
        watched = self._lookout.watched()
        ready, unread = self._read()
        self._sending.plan(watched, now, {run.name for run in ready})
        for one in watched:
            if one.found.finished:  # what could not even be tried has to wait for the next tick, too
                self._lookout.tried(one)
        self._forget(watched)
        self._done = _Done(watched, failures=[*found.failures, *unread])
        seen = {run: [w.seen for w in watched if w.seen.run == run.name] for run in ready}
        self._repairs.plan(seen)
        for run in ready:
            here = {s.spot.name for s in seen[run]} | {f.checkpoint for f in found.failures if f.run == run.name}
            gone, stuck = self._letting.go(run, here)
            self._done.add(gone, stuck)
        self._unmendable = self._unmended()
        told = [*self._sending.told()[0], *self._done.gone]
        self._clock.measure_in_time(now, is_idle=bool(told) and all(p.phase in DONE for p in told))

    def told(self, now: float) -> WorkerResult:
        """What became by now of all that the last plan saw."""
        told, wrong = self._sending.told()
        repairs, unmended = self._repairs.told()
        told, done = [*told, *self._done.gone], self._done
        waiting = {(p.run, p.checkpoint) for p in told if p.phase in ON_THE_WAY}
        since = {f"{w.seen.run}/{w.seen.spot.name}": w.first for w in reversed(done.watched) if w.key[:2] in waiting}
        sent = sum(p.size for p in told if p.phase == "sent")
        notes = (*self._clock.notes, *self._sending.notes)
        failures = (*done.failures, *unmended, *wrong)
        lacks = repair.lacks(self._repairs.served, self._unmendable)
        return WorkerResult(
            self._options.node, tuple(told), tuple(repairs), failures, self._lookout.due(now), since, sent, notes, lacks
        )

    def _unmended(self) -> frozenset[str]:
        """Its manifests that are damaged, or gone, and were at the last tick, too: what could be written again, is."""
        known = [self._view.of(run.name) for run in self._options.runs]
        now = repair.broken_manifests(self._options.node, (name for k in known for name in (*k.broken, *k.lost)))
        before, self._broken = self._broken, now
        return now & before

    def _read(self) -> tuple[list[RunDir], list[Failure]]:
        """What the store says of each run; those that it said nothing of are failures."""
        ready: list[RunDir] = []
        wrong: list[Failure] = []
        for run in self._options.runs:
            try:
                self._view.refresh(run.name)
                ready.append(run)
            except CkptsyncError as e:  # noqa: PERF203 - a few runs, each for itself
                wrong.append(failure(run.name, "", e))
        return ready, wrong

    def _taken(self, run: str, checkpoint: str) -> set[int]:
        return {k for r, name, k in tuple(self._memory.taken) if (r, name) == (run, checkpoint)}

    def _forget(self, watched: Sequence[Watched]) -> None:
        """In location: others remember meanwhile."""
        here = {w.key for w in watched}
        for run in self._options.runs:
            read = self._view.of(run.name).read
            for name in [name for name in tuple(read) if not any(key[:2] == (run.name, name) for key in here)]:
                read.pop(name, None)
        for memory in (self._memory.taken, self._memory.settled):
            for key in [key for key in tuple(memory) if key not in here]:
                memory.pop(key, None)
