"""Looking at all runs, again and again, while a send may be under way in another thread: what is here, since when, and is it finished?

Nothing here asks the store, so nothing here waits for it: while it is away, what the trainer writes is pinned and judged all the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import CkptsyncError
from ckptsync.spool import pins as spool
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS
from ckptsync.worker import order_of_writing
from ckptsync.worker.aside import Aside
from ckptsync.worker.facts import Facts, gathered
from ckptsync.worker.hooked import read_hooked
from ckptsync.worker.looking import BeingRemoved, Look, Seat, Seen, look, look_at
from ckptsync.worker.observed import Evidence, Rule, Verdict
from ckptsync.worker.options import RunDir
from ckptsync.worker.result import Failure, failure
from ckptsync.worker.settle import is_hopeless, judge
from ckptsync.worker.watched import SELDOM, Asked, Glimpse, Key, Watched, glimpsed, key_of

DEAD_AFTER = 600.0  # seconds without a pulse, on our clock, after which another node's pin on a shared disk is taken over

ALONE = 10.0  # seconds without a change after which an output directory that somebody was removing is served again

CROWD = 1000  # files of a checkpoint at which to look takes longer than a small one may live
CROWD_SHARE = 0.3  # of the time


@dataclass(frozen=True, slots=True)
class _Last:
    """Which checkpoints the last look at a run found, and in which directory: another one may have been mounted, or moved, to its location."""

    directory: tuple[int, int]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Removal:
    """Of an output directory, by somebody else, as far as it is seen.  ``until``: when it counts as over if ``listed``, what lies there, stays the same."""

    until: float
    listed: object


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
        self._last: dict[str, _Last] = {}
        self._aside: dict[str, Aside[list[Watched]]] = {}
        self._removals: dict[str, _Removal] = {}

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
        waits = [self._left(w, now) for w in self.watched() if w.evidence is not None]
        waits += [max(0.0, removal.until - now) for removal in tuple(self._removals.values())]
        return min((left for left in waits if left is not None), default=None)

    def judged(self, one: Watched, now: float) -> Verdict:
        """Whether it is finished, by what was seen and by what is known of the store by now."""
        if one.evidence is None:
            return one.found
        return judge(replace(one.evidence, mates=self._asked.has_mate(one.seen)), one.sighting, max(now, self._looked), self._rule)

    def judged_again(self, one: Watched, now: float) -> Verdict:
        """Whether it is still finished, by its files as they are now.  Raises Incomplete if they vanish meanwhile."""
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
        if watched.found.finished:
            return None if self._tried.get(watched.key) == watched.sighting.since else 0.0
        left = watched.found.left
        if left is None:  # what is refused now may be whole soon; what a crash has left never is
            left = max(self._rule.quiet, (self._looked - watched.sighting.since) * SELDOM)
        return max(0.0, left - (now - self._looked))

    def _look_at(self, run: RunDir, now: float) -> tuple[list[Watched], Look]:
        crowds = [w for w in self._watched.values() if w.seen.run == run.name and len(w.seen.hold.held) > CROWD]
        aside = {w.seen.spot.name for w in crowds}
        directory, last = _identity(run.path), self._last.pop(run.name, None)
        is_over = run.name in self._removals
        if self._is_being_removed(run, now):
            return self._left_alone(run)
        try:
            found = look(run, self._seat, aside, () if is_over else self._pins(run.name))
        except BeingRemoved:
            self._removals[run.name] = _Removal(now + ALONE, _listed(run.path))
            return self._left_alone(run)
        except CkptsyncError as e:
            return [], Look(failures=(failure(run.name, "", e),))
        known = last.names if last and last.directory == directory else None
        watched, wrong = self._watch_all(run, found.seen, [w.seen for w in crowds], known, now)
        if crowds:
            watched = sorted(
                [*watched, *self._look_aside(run, crowds, found.seen, now)], key=lambda w: (w.seen.spot.step or 0, *w.key)
            )
        if directory:
            names = {s.spot.name for s in found.seen} | {f.checkpoint for f in found.failures} | aside
            self._last[run.name] = _Last(directory, frozenset(names))
        return watched, replace(found, failures=(*found.failures, *wrong))

    def _is_being_removed(self, run: RunDir, now: float) -> bool:
        """Whether somebody was taking away our pins a moment ago, and may still do so."""
        before = self._removals.get(run.name)
        if before is None:
            return False
        listed = _listed(run.path)
        if before.listed != listed:
            self._removals[run.name] = _Removal(now + ALONE, listed)
        elif now >= before.until:
            del self._removals[run.name]
        return run.name in self._removals

    def _left_alone(self, run: RunDir) -> tuple[list[Watched], Look]:
        note = f"{run.name}: somebody is removing {run.path / OURS}: it is left alone until nothing has changed for {ALONE:.0f} s"
        return [w for w in self._watched.values() if w.seen.run == run.name], Look(notes=(note,))

    def _pins(self, run: str, name: str = "") -> list[Pin]:
        """As they were seen last, of a checkpoint or of all."""
        seen = (w.seen for w in self._watched.values() if w.seen.run == run and name in ("", w.seen.spot.name))
        return [one.pin for one in seen if one.pin is not None]

    def _look_aside(self, run: RunDir, crowds: Sequence[Watched], others: Sequence[Seen], now: float) -> Sequence[Watched]:
        """Checkpoints of so many files that small ones would be missed meanwhile, as they were seen last: another thread looks at them."""
        aside = self._aside.setdefault(run.name, Aside(CROWD_SHARE))
        latest = aside.take()
        names = {w.seen.spot.name for w in crowds}
        aside.begin(lambda: [w for name in sorted(names) for w in self._watch_one(run, name, others, now)])
        return crowds if latest is None else [w for w in latest if w.seen.spot.name in names]

    def _watch_one(self, run: RunDir, name: str, others: Sequence[Seen], now: float) -> list[Watched]:
        # as it was seen last, until it can be seen: then a look that has the time says why
        with contextlib.suppress(CkptsyncError):
            return self._watch_all(run, look_at(run, self._seat, name, self._pins(run.name, name)).seen, others, None, now)[0]
        return [w for w in self._watched.values() if w.seen.run == run.name and w.seen.spot.name == name]

    def _watch_all(
        self, run: RunDir, seen: Sequence[Seen], others: Sequence[Seen], known: Collection[str] | None, now: float
    ) -> tuple[list[Watched], list[Failure]]:
        """``known``: the checkpoints that were there before; ``None``: nobody knows."""
        found: list[Watched] = []
        wrong: list[Failure] = []
        pins = [one.pin for one in seen if one.pin is not None]
        hooked = read_hooked(run.path, {p.checkpoint for p in pins if not (p.stored or p.is_committed)})  # of the rest nobody asks
        together = order_of_writing.beside((*seen, *others), hooked)
        for one in seen:
            is_new = known is not None and one.spot.name not in known
            try:
                mine = self._claimed(one, now)
                glimpse = Glimpse(mine, self._watched.get(key_of(mine)), is_new, together, now, wrong)
                found.append(glimpsed(glimpse, self._asked, self._rule))
            except CkptsyncError as e:
                wrong.append(failure(run.name, one.spot.name, e))
        return found, wrong

    def _claimed(self, one: Seen, now: float) -> Seen:
        """A pin on a shared disk whose owner has shown no pulse for long becomes ours."""
        if one.pin is None or one.pin.node in ("", self._seat.node):
            return one
        since = self._pulses.setdefault(_pulse(one), now)
        mine = spool.claim(one.pin, self._seat.node) if now - since > DEAD_AFTER else None
        return one if mine is None else Seen(one.run, one.spot, one.hold, mine)


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        info = directory.stat()
    except OSError:  # not there, or not to be seen: a look says so
        return None
    return info.st_dev, info.st_ino


def _listed(directory: Path) -> object:
    """What lies there, and when each directory there was changed last."""
    try:
        with os.scandir(directory) as entries:
            return sorted((entry.name, entry.stat(follow_symlinks=False).st_ctime_ns) for entry in entries)
    except FileNotFoundError:  # in this moment
        return None


def _pulse(one: Seen) -> tuple[object, int]:
    return (one.pin.path, one.pin.pulse) if one.pin else (None, 0)
