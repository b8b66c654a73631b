"""The worker as a role: one public `tick` looks once, does what is due, and says what it saw and did."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.records import saves
from ckptsync.records.state import proof, seal_that_counts
from ckptsync.spool import pins as spool
from ckptsync.spool.pins import Pin
from ckptsync.stores.contract import Store
from ckptsync.walk import Stat
from ckptsync.worker import clock, deciding, repair, rivals
from ckptsync.worker.evidence import is_later
from ckptsync.worker.hold import Hold
from ckptsync.worker.known import Known, read_known
from ckptsync.worker.looking import Look, Seat, Seen, look
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options
from ckptsync.worker.pinning import give_way, spare
from ckptsync.worker.restoring import restore
from ckptsync.worker.result import Failure, Progress, Repaired, WorkerResult, failure
from ckptsync.worker.saving import Desk, Memory, known_already, save, verdict
from ckptsync.worker.send import Road
from ckptsync.worker.settle import Rule

LOOK_EVERY = 1.0  # seconds between looks while something long is read or sent: rotation does not wait for us
CLOCK_EVERY = 3600.0
DEAD_AFTER = 600.0  # seconds without a pulse, on our clock, after which another node's pin on a shared disk is taken over
DOUBTFUL = 10  # times `unmarked`


class Worker:
    """Finds, pins, settles, digests and sends; and sends again what a report calls damaged.

    It may be killed at any moment and keeps nothing that it needs: what it remembers saves time.  Not safe for two threads.
    Raises ConfigError where a run and the store lie in each other.
    """

    def __init__(self, options: WorkerOptions, store: Store) -> None:
        self._options, self._store = checked_options(options, store.url), store
        self._rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
        self._memory = Memory()
        self._known: dict[str, Known] = {}
        self._served: set[tuple[str, str]] = set()
        self._pulses: dict[tuple[object, int], float] = {}
        self._offset: tuple[int, float] | None = None
        self._looked = 0.0
        for run in options.runs:
            spool.sweep(run.path, options.node)

    def tick(self, now: float) -> WorkerResult:
        """``now`` in seconds on any clock that only grows.  Errors are in the result: one checkpoint's never keep another back."""
        results = [self._tick_run(run, now) for run in self._options.runs]
        return WorkerResult(
            self._options.node,
            tuple(p for r in results for p in r.progress),
            tuple(p for r in results for p in r.repairs),
            tuple(f for r in results for f in r.failures),
        )

    def _tick_run(self, run: RunDir, now: float) -> WorkerResult:
        try:
            found = self._look(run)  # first: pinning needs no store
            self._known[run.name] = read_known(self._store, run.name, self._known.get(run.name, Known()))
        except CkptsyncError as e:
            return WorkerResult(self._options.node, failures=(failure(run.name, "", e),))
        seen, failures = found.seen, found.failures
        progress, more = self._send(run, seen, now)
        self._forget(run, seen)
        repairs, broken = self._repair(run, seen)
        return WorkerResult(self._options.node, progress, repairs, (*failures, *more, *broken, *self._spare(run, seen)))

    def _look(self, run: RunDir) -> Look:
        self._looked = time.monotonic()
        return look(run, Seat(self._options.node, self._taken, self._is_proven))

    def _taken(self, run: str, checkpoint: str) -> set[int]:
        return {k for r, name, k in self._memory.taken if (r, name) == (run, checkpoint)}

    def _send(self, run: RunDir, seen: Sequence[Seen], now: float) -> tuple[tuple[Progress, ...], tuple[Failure, ...]]:
        outcomes = [self._attempt(run, one, seen, now) for one in seen]
        return tuple(p for p, _ in outcomes), tuple(f for _, f in outcomes if f is not None)

    def _attempt(self, run: RunDir, one: Seen, seen: Sequence[Seen], now: float) -> tuple[Progress, Failure | None]:
        try:
            return self._send_one(run, one, seen, now), None
        except Incomplete as e:  # it changed, or others are at it: the next look may find it quiet
            return _waiting(one, str(e)), None
        except CkptsyncError as e:
            return Progress(run.name, one.spot.name, one.k, "failed", str(e)), failure(run.name, one.spot.name, e)

    def _send_one(self, run: RunDir, one: Seen, seen: Sequence[Seen], now: float) -> Progress:
        known = self._known[run.name]
        desk = self._desk(run, one, known, now)
        broken = known.broken_place(one.spot.name)
        if broken is not None and not restore(one, desk):
            raise broken
        if broken is not None:
            return _waiting(one, "a damaged manifest of this node was written again")
        one = self._claimed(one, now)
        settled = known_already(one, desk)
        if settled is not None:
            return settled
        later = any(_is_after(one, other) for other in seen)
        found, hopeless = verdict(one, desk, later=later, now=now)
        if hopeless and one.pin is not None:
            spool.drop(one.pin)
            return _waiting(one, "given up by the trainer before it was finished")
        return save(one, desk) if found.settled else _waiting(one, found.reason)

    def _desk(self, run: RunDir, one: Seen, known: Known, now: float) -> Desk:
        road = Road(
            self._store,
            self._options.node,
            lambda: self._read_again(run).manifests(one.spot.name),
            lambda: rivals.is_contended(self._read_again(run), self._options.node, run.name, one.spot.name),
            self._passed,
            self._options.threads,
        )
        return Desk(self._options.node, road, known, self._rule, lambda: self._clock(now), self._memory)

    def _read_again(self, run: RunDir) -> Known:
        self._known[run.name] = read_known(self._store, run.name, self._known[run.name])
        return self._known[run.name]

    def _passed(self, _: int) -> None:
        """Between chunks: pin what has appeared, lest rotation takes it before this long work is done."""
        if time.monotonic() - self._looked > LOOK_EVERY:
            # the next tick looks again, and says what is wrong
            with contextlib.suppress(CkptsyncError):
                for run in self._options.runs:
                    self._look(run)

    def _claimed(self, one: Seen, now: float) -> Seen:
        """A pin on a shared disk whose owner has shown no pulse for long becomes ours."""
        if one.pin is None or one.pin.node == self._options.node:
            return one
        since = self._pulses.setdefault((one.pin.path, one.pin.pulse), now)
        mine = spool.claim(one.pin, self._options.node) if now - since > DEAD_AFTER else None
        return one if mine is None else Seen(one.run, one.spot, one.hold, mine)

    def _clock(self, now: float) -> int:
        if self._offset is None or not 0 <= now - self._offset[1] < CLOCK_EVERY:
            self._offset = clock.measure(self._store, self._options.node), now
        return self._offset[0]

    def _is_proven(self, run: str, checkpoint: str, stats: tuple[Stat, ...]) -> bool:
        """Whether the store has these very files, VERIFIED or given up: then they need no pin."""
        known = self._known.get(run, Known())
        live = saves.live(known.manifests(checkpoint))
        mine = deciding.holder(stats, [k.manifest for k in live if k.manifest.node == self._options.node])
        return mine is not None and _is_safe(known, mine.place, live)

    def _spare(self, run: RunDir, seen: Sequence[Seen]) -> tuple[Failure, ...]:
        """Let go of pins that nobody needs any more, and of more if the disk would not take the trainer's next save."""
        try:
            for pin in self._needless(run, seen):
                spool.drop(pin)
        except CkptsyncError as e:
            return (failure(run.name, "", e),)
        return ()

    def _needless(self, run: RunDir, seen: Sequence[Seen]) -> tuple[Pin, ...]:
        ours = [s for s in seen if s.pin is not None and s.pin.node == self._options.node]
        proven = [s.pin for s in ours if s.pin and self._is_proven(run.name, s.spot.name, s.hold.stats)]
        spared = spare(proven, self._options.keep_pins)
        stored = [(s.pin, _bytes(s)) for s in ours if s.pin and s.hold.gone and s.pin not in spared and self._is_stored(run, s)]
        need = max((_bytes(s) for s in seen), default=0)
        return (*spared, *give_way(stored, spool.free_bytes(run.path) if stored else 0, need))

    def _is_stored(self, run: RunDir, one: Seen) -> bool:
        live = saves.live(self._known[run.name].manifests(one.spot.name))
        return deciding.holder(one.hold.stats, [k.manifest for k in live if k.manifest.node == self._options.node]) is not None

    def _forget(self, run: RunDir, seen: Iterable[Seen]) -> None:
        here = {(s.run, s.spot.name, s.k) for s in seen}
        memory = self._memory
        memory.sightings = {k: v for k, v in memory.sightings.items() if k in here or k[0] != run.name}
        memory.taken = {k: v for k, v in memory.taken.items() if k in here or k[0] != run.name}
        memory.tidied = {k: v for k, v in memory.tidied.items() if k in here or k[0] != run.name}

    def _repair(self, run: RunDir, seen: Sequence[Seen]) -> tuple[tuple[Repaired, ...], tuple[Failure, ...]]:
        known = self._known[run.name]
        repairs: list[Repaired] = []
        failures: list[Failure] = []
        for place in known.damaged():
            checkpoint = place.partition("~")[0]
            holds = [s.hold for s in seen if s.spot.name == checkpoint]
            for request in repair.wanted(known.place(place), self._options.node, place, known.manifests(checkpoint)):
                if (request.report, request.finding) not in self._served:
                    outcome = self._serve(run, checkpoint, request, holds)
                    (repairs if isinstance(outcome, Repaired) else failures).append(outcome)  # type: ignore[arg-type]
        return tuple(repairs), tuple(failures)

    def _serve(self, run: RunDir, checkpoint: str, request: repair.Request, holds: Iterable[Hold]) -> Repaired | Failure:
        try:
            reason = repair.serve(request, holds, Road(self._store, self._options.node, tuple, passed=self._passed))
        except CkptsyncError as e:  # not served: the next tick tries again
            return failure(run.name, checkpoint, e)
        self._served.add((request.report, request.finding))
        return Repaired(run.name, request.report, request.finding, reason)


def _waiting(one: Seen, reason: str) -> Progress:
    return Progress(one.run, one.spot.name, one.k, "waiting", reason)


def _bytes(one: Seen) -> int:
    return sum(s.size for s in one.hold.stats)


def _is_after(one: Seen, other: Seen) -> bool:
    if one.spot.family != other.spot.family or one.spot.step is None or other.spot.step is None:
        return False
    return other.spot.step > one.spot.step and is_later(one.hold.stats, other.hold.stats)


def _is_safe(known: Known, place: str, live: Sequence[saves.Known]) -> bool:
    here = [k for k in live if k.manifest.place == place]
    records = known.place(place)
    seal, _ = seal_that_counts(records.seals, here)
    names = {k.name for k in here}
    retired = any(not names.isdisjoint(t.manifests) for t in records.tombstones.values())
    return retired or (bool(seal) and proof(records.reports, names, seal).holds)
