"""Looking at all runs, again and again, while a send may be under way in another thread: what is here, since when, and is it finished?

Nothing here asks the store, so nothing here waits for it: while it is away, what the trainer writes is pinned and judged all the same.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Took, took_of
from ckptsync.walk import Stat
from ckptsync.worker import order_of_writing
from ckptsync.worker.aside import Aside
from ckptsync.worker.facts import Facts, gathered, renewed
from ckptsync.worker.hooked import Hooked, read_hooked
from ckptsync.worker.likeness import is_like_another
from ckptsync.worker.looking import Look, Seat, Seen, look, look_at
from ckptsync.worker.options import RunDir
from ckptsync.worker.order_of_writing import Beside, is_later
from ckptsync.worker.resting import at_rest
from ckptsync.worker.result import Failure, failure
from ckptsync.worker.settle import Evidence, Rule, Sighting, Verdict, alone, is_hopeless, judge, observe, proof

DEAD_AFTER = 600.0  # seconds without a pulse, on our clock, after which another node's pin on a shared disk is taken over

CROWD = 1000  # files of a checkpoint at which to look takes longer than a small one may live
CROWD_SHARE = 0.3  # of the time
SELDOM = 0.1  # of the time for which files have stayed the same, they are not asked again whether they are whole

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Watched:
    """One save as the last look saw it.  ``first``: when it was first seen.  ``evidence`` is ``None`` of what needs none (`Asked.is_done`).

    ``sighting``: since when nothing has changed.  ``found``: whether it is settled, by what is known of the store without asking it.
    ``save``: the id that a hook's marks give it, where its pin says none.  ``asked``: when its files were asked last.
    """

    seen: Seen
    first: float
    sighting: Sighting
    evidence: Evidence | None
    found: Verdict
    save: str = ""
    asked: float = 0.0

    @property
    def key(self) -> Key:
        """One save of a checkpoint on this node."""
        return key_of(self.seen)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the look asks of those who send, and who may not ask the store: is a save stored or given up, is another node's part, is one like it?"""

    is_done: Callable[[Seen], bool]
    has_mate: Callable[[Seen], bool]
    is_like_stored: Callable[[Seen], bool] = lambda _: False


class Lookout:
    """What the last look saw.  `look` may be called from any thread, one at a time looks; the rest may be called meanwhile.

    ``lock`` is held while pins change, and never while the bytes of a checkpoint, or the store, are waited for.
    """

    def __init__(self, runs: Sequence[RunDir], seat: Seat, rule: Rule, asked: Asked) -> None:
        self.lock = threading.Lock()
        self._runs, self._seat, self._rule, self._asked = tuple(runs), seat, rule, asked
        self._watched: dict[Key, Watched] = {}
        self._looked = 0.0
        self._pulses: dict[tuple[object, int], float] = {}
        self._tried: dict[Key, float] = {}
        self._looked_at: set[str] = set()
        self._aside: dict[str, Aside[list[Watched]]] = {}

    def look(self, now: float) -> Look:
        """Look once at every run.  ``now`` in seconds on a clock that only grows."""
        with self.lock:
            now = max(now, self._looked)  # whoever had to wait for the other's look knew the time before that
            looks = [self._look_at(run, now) for run in self._runs]
            self._watched, self._looked = {w.key: w for watched, _ in looks for w in watched}, now
            self._tried = {key: since for key, since in self._tried.items() if key in self._watched}
            pulses = {_pulse(w.seen) for w in self._watched.values()}
            self._pulses = {key: since for key, since in self._pulses.items() if key in pulses}
        seen = tuple(w.seen for w in self._watched.values())
        failures = tuple(f for _, found in looks for f in found.failures)
        return Look(seen, failures, self.due(now), (*(note for _, found in looks for note in found.notes), *self._refused(now)))

    def watched(self) -> tuple[Watched, ...]:
        """Of every run, oldest first."""
        return tuple(self._watched.values())

    def latest(self, key: Key) -> Watched | None:
        """One save as it was seen last; ``None`` if it is not here any more."""
        return self._watched.get(key)

    def tried(self, watched: Watched) -> None:
        """To send it was tried, or could not be: it is due no more, unless it changes."""
        self._tried[watched.key] = watched.sighting.since

    def due(self, now: float) -> float | None:
        """Seconds until a save can be sent that nobody has tried to send yet; ``None``: none will be without a change."""
        waits = (self._left(w, now) for w in self.watched() if w.evidence is not None)
        return min((left for left in waits if left is not None), default=None)

    def judged(self, one: Watched, now: float) -> Verdict:
        """Whether it is settled, by what was seen and by what is known of the store by now."""
        if one.evidence is None:
            return one.found
        return judge(replace(one.evidence, mates=self._asked.has_mate(one.seen)), one.sighting, max(now, self._looked), self._rule)

    def judged_again(self, one: Watched, now: float) -> Verdict:
        """Whether it is still settled, by its files as they are now.  Raises Incomplete if they vanish meanwhile."""
        run = next(run for run in self._runs if run.name == one.seen.run)
        hooked = read_hooked(run.path, (one.seen.spot.name,))
        before = one.evidence or Evidence(one.seen.spot.family, None, ())
        facts = Facts(before.later, self._asked.has_mate(one.seen), before.fresh, before.awaited, hooked)
        evidence = replace(gathered(one.seen, facts), alike=before.alike)
        return judge(evidence, one.sighting, max(now, self._looked), self._rule)

    def _refused(self, now: float) -> Iterator[str]:
        """What no waiting makes good, and nobody writes to: the trainer was killed, or somebody has to say that this is all."""
        for one in self.watched():
            is_still = now - one.sighting.since >= self._rule.unmarked
            if is_still and one.evidence and one.evidence.files and one.found.left is None and not is_hopeless(one.evidence):
                yield f"{one.seen.run}/{one.seen.spot.name}: not taken: {one.found.reason}"

    def _left(self, watched: Watched, now: float) -> float | None:
        if watched.found.settled:
            return None if self._tried.get(watched.key) == watched.sighting.since else 0.0
        left = watched.found.left
        if left is None:  # what is refused now may be whole soon; what a crash has left never is
            left = max(self._rule.quiet, (self._looked - watched.sighting.since) * SELDOM)
        return max(0.0, left - (now - self._looked))

    def _look_at(self, run: RunDir, now: float) -> tuple[list[Watched], Look]:
        crowds = [w for w in self._watched.values() if w.seen.run == run.name and len(w.seen.hold.held) > CROWD]
        try:
            found = look(run, self._seat, {w.seen.spot.name for w in crowds})
        except CkptsyncError as e:
            return [], Look(failures=(failure(run.name, "", e),))
        watched, wrong = self._watch_all(run, found.seen, [w.seen for w in crowds], now)
        if crowds:
            watched = sorted(
                [*watched, *self._look_aside(run, crowds, found.seen, now)], key=lambda w: (w.seen.spot.step or 0, *w.key)
            )
        self._looked_at.add(run.name)
        return watched, replace(found, failures=(*found.failures, *wrong))

    def _look_aside(self, run: RunDir, crowds: Sequence[Watched], others: Sequence[Seen], now: float) -> Sequence[Watched]:
        """Checkpoints of so many files that small ones would be missed meanwhile, as they were seen last: another thread looks at them."""
        aside = self._aside.setdefault(run.name, Aside(CROWD_SHARE))
        latest = aside.take()
        names = {w.seen.spot.name for w in crowds}
        aside.begin(lambda: [w for name in sorted(names) for w in self._watch_one(run, name, others, now)])
        return crowds if latest is None else [w for w in latest if w.seen.spot.name in names]

    def _watch_one(self, run: RunDir, name: str, others: Sequence[Seen], now: float) -> list[Watched]:
        with contextlib.suppress(
            CkptsyncError
        ):  # as it was seen last, until it can be seen: then a look that has the time says why
            return self._watch_all(run, look_at(run, self._seat, name).seen, others, now)[0]
        return [w for w in self._watched.values() if w.seen.run == run.name and w.seen.spot.name == name]

    def _watch_all(
        self, run: RunDir, seen: Sequence[Seen], others: Sequence[Seen], now: float
    ) -> tuple[list[Watched], list[Failure]]:
        watched: list[Watched] = []
        wrong: list[Failure] = []
        pins = [one.pin for one in seen if one.pin is not None]
        hooked = read_hooked(run.path, {p.checkpoint for p in pins if not (p.stored or p.is_committed)})  # of the rest nobody asks
        together = order_of_writing.beside((*seen, *others), hooked)
        for one in seen:
            try:
                watched.append(self._watch(self._claimed(one, now), together, now, wrong))
            except CkptsyncError as e:  # noqa: PERF203 - one checkpoint's failure never keeps another back
                wrong.append(failure(run.name, one.spot.name, e))
        return watched, wrong

    def _watch(self, one: Seen, beside: Beside, now: float, wrong: list[Failure]) -> Watched:
        before = self._watched.get(key_of(one))
        first = before.first if before else now
        sighting = observe(before.sighting if before else None, _shown(one), now)
        if self._asked.is_done(one):
            return Watched(one, first, sighting, None, Verdict(settled=False, reason="stored, or another's", left=None))
        fresh = self._is_fresh(one, before, sighting)
        facts = Facts(is_later(one, beside.spans), self._asked.has_mate(one), fresh, beside.awaited, beside.hooked)
        try:
            evidence, found, asked = self._judged(one, before, sighting, (facts, beside.seen), now)
        except Incomplete as e:  # it changes under our hands
            return Watched(one, first, sighting, None, Verdict(settled=False, reason=str(e), left=None))
        stable = at_rest(evidence, sighting, now, self._rule)
        return Watched(
            self._noted(one, stable, found, wrong), first, sighting, evidence, found, _marked(evidence, beside.hooked, one), asked
        )

    def _is_fresh(self, one: Seen, before: Watched | None, sighting: Sighting) -> bool:
        """Whether nothing of it was there at an earlier look, and it has not been written over since it had an end, or had been cut short."""
        if before is None:
            return one.k == 0 and one.run in self._looked_at
        if before.evidence is None or not before.evidence.fresh or before.sighting == sighting:
            return before.evidence is not None and before.evidence.fresh
        has_rested = sighting.since - before.sighting.since >= self._rule.unmarked
        return not (before.found.settled or has_rested or _is_over(before.evidence, one))

    def _judged(
        self, one: Seen, before: Watched | None, sighting: Sighting, told: tuple[Facts, Sequence[Seen]], now: float
    ) -> tuple[Evidence, Verdict, float]:
        """Files are asked anew until they have been seen at rest, ever more seldom while they stay the same, and before they are called settled."""
        facts, beside = told
        if before and before.evidence and before.sighting == sighting and _needs_no_asking(before, now):
            evidence = self._compared(renewed(before.evidence, one, facts), one, beside)
            found = judge(evidence, sighting, now, self._rule)
            if before.found.settled or not found.settled:
                return evidence, found, before.asked
        evidence = self._compared(gathered(one, facts), one, beside)
        return evidence, judge(evidence, sighting, now, self._rule), now

    def _compared(self, evidence: Evidence, one: Seen, others: Sequence[Seen]) -> Evidence:
        """With the checkpoints beside it, where that counts."""
        if not alone(evidence, self._rule):
            return evidence
        return replace(evidence, alike=is_like_another(one, others) or self._asked.is_like_stored(one))

    def _noted(self, one: Seen, stable: int, found: Verdict, wrong: list[Failure]) -> Seen:
        """What was seen is kept beside the pin: for when rotation has taken the rest, and since the manifest says when it was settled."""
        took = one.pin.took if one.pin else Took()
        new = Took(stable=stable, settled=time.time_ns() if found.settled and not took.settled else 0)
        if one.pin is None or (new.stable in (0, took.stable) and not new.settled):
            return one
        try:
            return recorded(one, new)
        except StoreError as e:  # a full disk: it is sent all the same, and its manifest says less
            wrong.append(failure(one.run, one.spot.name, e))
            return one

    def _claimed(self, one: Seen, now: float) -> Seen:
        """A pin on a shared disk whose owner has shown no pulse for long becomes ours."""
        if one.pin is None or one.pin.node in ("", self._seat.node):
            return one
        since = self._pulses.setdefault(_pulse(one), now)
        mine = spool.claim(one.pin, self._seat.node) if now - since > DEAD_AFTER else None
        return one if mine is None else Seen(one.run, one.spot, one.hold, mine)


def key_of(seen: Seen) -> Key:
    """What names a save on this node."""
    return (seen.run, seen.spot.name, seen.k)


def recorded(one: Seen, took: Took) -> Seen:
    """The same save, with what is known of it by now written beside its pin.  Raises Incomplete if the pin has gone."""
    assert one.pin is not None
    spool.record(one.pin, took)
    return replace(one, pin=replace(one.pin, took=took_of(one.pin.path)))


def _needs_no_asking(before: Watched, now: float) -> bool:
    if before.found.settled or (before.evidence is not None and before.evidence.stable):
        return True
    return now - before.asked < SELDOM * (now - before.sighting.since)


def _is_over(before: Evidence, one: Seen) -> bool:
    """Whether something proved that it was finished, and a file of it has been written again since."""
    now = {f.path: (f.size, f.mtime) for f in one.hold.stats}
    return bool(proof(before)) and any(now.get(f.path, (f.size, f.mtime)) != (f.size, f.mtime) for f in before.files)


def _marked(evidence: Evidence, hooked: Hooked, one: Seen) -> str:
    """The save id that all ranks here gave to what nobody pinned for them."""
    marks = hooked.marks.get(one.spot.name, ()) if evidence.hook == "marked" else ()
    return max(marks, key=lambda m: m.at).save if marks else ""


def _pulse(one: Seen) -> tuple[object, int]:
    return (one.pin.path, one.pin.pulse) if one.pin else (None, 0)


def _shown(one: Seen) -> tuple[Stat, ...]:
    """What a change of is a change of the save.  A pinned file is ours to replace, by a reflink of it: its inode says nothing."""
    stats = ((h.stat, h.is_pinned) for h in one.hold.held.values())
    return (*(Stat(s.path, s.size, s.mtime, 0, 0) if is_pinned else s for s, is_pinned in stats), *one.hold.partial)
