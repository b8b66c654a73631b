"""One tick of sending: of all that was seen, what needs nothing, what has to wait, and the rest in the operator's order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Took
from ckptsync.worker import rivals
from ckptsync.worker.clock import Clock
from ckptsync.worker.knowledge import Knowledge
from ckptsync.worker.known import Known
from ckptsync.worker.looking import Seen
from ckptsync.worker.lookout import Key, Lookout, Watched, recorded
from ckptsync.worker.options import WorkerOptions
from ckptsync.worker.ordering import Turn, queue
from ckptsync.worker.remembering import remembered
from ckptsync.worker.restoring import restore
from ckptsync.worker.result import Failure, Phase, Progress, failure
from ckptsync.worker.saving import Desk, Memory, begun, known_already, save
from ckptsync.worker.send import Road
from ckptsync.worker.settle import is_hopeless

NOTES = 10  # of saves that were missed; the log has them all


class Sending:
    """``notes``: what an operator should see though it is over."""

    def __init__(self, options: WorkerOptions, knowledge: Knowledge, lookout: Lookout, clock: Clock, memory: Memory) -> None:
        self._options, self._knowledge, self._lookout = options, knowledge, lookout
        self._clock, self._memory = clock, memory
        self._is_fresh = False
        self.notes: tuple[str, ...] = ()

    def send(self, watched: Sequence[Watched], now: float) -> tuple[list[Progress], list[Failure]]:
        """What became of each of them, in their order.  What was known of the store was read just before."""
        self._is_fresh = True
        told: dict[Key, Progress | None] = {w.key: None for w in watched}
        wrong: list[Failure] = []
        for one in watched:
            told[one.key] = self._guarded(one, wrong, partial(self._met, one, now))
        going = queue([self._turn(w) for w in watched if told[w.key] is None], self._options.order, self._options.superseded)
        for one in going.dropped:
            told[one.key] = self._guarded(one, wrong, partial(self._superseded, one))
        for one in going.first:
            if self._is_overtaken(told):
                told[one.key] = _told(one, "waiting", "a newer one goes first")
                continue
            self._lookout.tried(one)
            told[one.key] = self._guarded(one, wrong, partial(self._send, one, now))
        return [p for p in told.values() if p is not None], wrong

    def _guarded(self, one: Watched, wrong: list[Failure], work: Callable[[], Progress | None]) -> Progress | None:
        try:
            return work()
        except Incomplete as e:  # it changed, or others are at it: the next look may find it quiet
            return _told(one, "waiting", str(e))
        except CkptsyncError as e:
            wrong.append(failure(one.seen.run, one.seen.spot.name, e))
            return _told(one, "failed", str(e))

    def _met(self, one: Watched, now: float) -> Progress | None:
        """Why it need not, or cannot, be sent now; ``None`` if it is to be sent."""
        seen, desk = one.seen, self._desk(one, now)
        broken = desk.known.broken_place(seen.spot.name)
        if broken is not None and not restore(seen, desk, self._kept(seen)):
            raise broken
        if broken is not None:
            return _told(one, "waiting", "a damaged manifest of this node was written again")
        if seen.pin is not None and not seen.pin.node:
            return _told(one, "waiting", "its pin is nobody's yet")
        done = known_already(seen, desk)
        if done is not None:
            self._mark(one, done)
            return done
        if one.evidence is not None and is_hopeless(one.evidence) and seen.pin is not None:
            return self._missed(one)
        found = self._lookout.judged(one, now)
        return None if found.settled else _told(one, "waiting", found.reason)

    def _send(self, one: Watched, now: float) -> Progress:
        latest = self._lookout.latest(one.key)
        if latest is None or latest.sighting != one.sighting:
            return _told(one, "waiting", "it changed while others were sent")
        found = self._lookout.judged_again(latest, now)
        if not found.settled:
            return _told(one, "waiting", found.reason)
        sent = save(self._begun(latest), self._desk(latest, now))
        self._mark(latest, sent)
        return sent

    def _kept(self, seen: Seen) -> tuple[Took, ...]:
        return next((remembered(run.path, seen.spot.name) for run in self._options.runs if run.name == seen.run), ())

    def _begun(self, one: Watched) -> Seen:
        """With what its manifest will say written beside its pin first: whoever writes it again has to say the same."""
        seen = one.seen
        if seen.pin is None:
            return seen
        took = begun(seen, time.time_ns(), one.save)
        try:
            return seen if took == seen.pin.took else recorded(seen, took)
        except StoreError:  # a full disk: it is sent all the same, and its manifest says less
            return seen

    def _missed(self, one: Watched) -> Progress:
        assert one.seen.pin is not None
        spool.drop(one.seen.pin, self._lookout.lock)
        note = f"missed {one.seen.run}/{one.seen.spot.name}: the trainer removed it, or gave it up, before it was known whole"
        self.notes = (*self.notes, note)[-NOTES:]
        return _told(one, "missed", "given up or removed by the trainer before it was known whole")

    def _superseded(self, one: Watched) -> Progress:
        self._lookout.tried(one)
        if one.seen.pin is not None and one.seen.hold.gone:
            spool.drop(one.seen.pin, self._lookout.lock)
        return _told(one, "superseded", "a newer one was there before it was sent")

    def _mark(self, one: Watched, done: Progress) -> None:
        """Tell the hook, which may be waiting for it."""
        if one.seen.pin is not None and done.place and done.phase in ("sent", "stored", "elsewhere"):
            with contextlib.suppress(CkptsyncError):  # the next tick says it again
                spool.mark_stored(one.seen.pin)

    def _turn(self, one: Watched) -> Turn[Watched]:
        seen = one.seen
        written = max((s.mtime for s in seen.hold.stats), default=0)
        return Turn(one, seen.run, (one.first, seen.spot.step or 0, seen.k), written, self._knowledge.is_begun(seen))

    def _is_overtaken(self, told: Collection[Key]) -> bool:
        """Whether something was settled meanwhile that goes before the rest."""
        if self._options.order == "oldest":
            return False
        return any(w.found.settled and w.evidence is not None and w.key not in told for w in self._lookout.watched())

    def _desk(self, one: Watched, now: float) -> Desk:
        run, checkpoint = one.seen.run, one.seen.spot.name
        node = self._options.node
        road = Road(
            self._knowledge.store,
            node,
            lambda: self._known(run).manifests(checkpoint),
            lambda: rivals.is_contended(self._knowledge.read(run), node, run, checkpoint),
            threads=self._options.threads,
        )
        return Desk(node, road, self._knowledge.of(run), lambda: self._clock.offset(now), self._memory, self._knowledge.selection)

    def _known(self, run: str) -> Known:
        """As it is now: what was read a moment ago is, for the first who asks."""
        is_fresh, self._is_fresh = self._is_fresh, False
        return self._knowledge.of(run) if is_fresh else self._knowledge.read(run)


def _told(one: Watched, phase: Phase, detail: str) -> Progress:
    return Progress(one.seen.run, one.seen.spot.name, one.seen.k, phase, detail)
