"""Scan all output directories, again and again, while saves may be sent in other threads: what is here, since when, and is it finished?

A scan pins what has appeared and judges it once; planning and sending use its verdict.  Nothing here asks the store, so nothing here waits for it:
while the store is away, what the trainer writes is pinned and judged all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.scan import Spot
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Took, said, took_of
from ckptsync.walk import OURS, Stat
from ckptsync.worker.observation import (
    Observation,
    Surroundings,
    fingerprint,
    is_like_another,
    observe,
    surroundings,
    with_surroundings,
)
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner, by_step
from ckptsync.worker.result import Failure, failure
from ckptsync.worker.settle import Rule, Verdict, is_at_rest, is_lost, judge, last_file, may_be_alone
from ckptsync.worker.snapshot import Seen

DEAD_AFTER = 600.0  # seconds without a pulse, on our clock, after which another node's pin on a shared disk is taken over
SELDOM = 0.1  # of the time for which files have stayed the same, their ends are not read again
_HOOK_LINES = 3

Key = tuple[str, str, int]
"""Run, checkpoint and number of the pin: one save on this node."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """One save as the last scan saw it.  ``first``: when it was first seen; ``since``: since when nothing has changed.

    ``state``: what a change of is a change of the save.  ``observation`` is ``None`` where its files were not read: they change, or nothing is left to do for it.  ``read``: when they were read last.
    """

    seen: Seen
    first: float
    since: float
    state: tuple[Stat, ...]
    verdict: Verdict
    observation: Observation | None = None
    read: float = 0.0

    @property
    def key(self) -> Key:
        """What names the save on this node."""
        return key_of(self.seen)

    @property
    def is_lost(self) -> bool:
        """Whether the trainer has removed it, and nobody can know any more that what is left is whole."""
        return self.observation is not None and is_lost(self.observation)


@dataclass(frozen=True, slots=True)
class Scan:
    """All that one scan found, by run and step.  ``due``: seconds until a save is finished if nothing changes; ``None``: nobody knows.

    ``notes``: what an operator should know, in words, such as a save that was given up to make room.
    """

    seen: tuple[Seen, ...] = ()
    failures: tuple[Failure, ...] = ()
    due: float | None = None
    notes: tuple[str, ...] = ()


def key_of(seen: Seen) -> Key:
    """Return what names a save on this node."""
    return (seen.run, seen.spot.name, seen.k)


def recorded(seen: Seen, took: Took) -> Seen:
    """Return the same save, with what is known of it by now written beside its pin.  Raises Incomplete if the pin has gone."""
    assert seen.pin is not None
    spool.record(seen.pin, took)
    return replace(seen, pin=replace(seen.pin, took=took_of(seen.pin.path)))


class Scanner:
    """What the last scan saw.  Any thread may call `scan`, one at a time scans; the rest may be called meanwhile.

    ``is_done``: whether the store has a save, or another node sends it; ``has_mate``: whether another node has stored its part of it.
    ``lock`` is held while pins change, and never while the bytes of a checkpoint, or the store, are waited for.
    """

    def __init__(
        self,
        runs: Sequence[RunDir],
        pinner: Pinner,
        rule: Rule,
        is_done: Callable[[Seen], bool] = lambda _: False,
        has_mate: Callable[[Seen], bool] = lambda _: False,
    ) -> None:
        self.lock = threading.Lock()
        self._runs, self._pinner, self._rule = tuple(runs), pinner, rule
        self._is_done, self._has_mate = is_done, has_mate
        self._saves: dict[Key, Scanned] = {}
        self._at = 0.0
        self._pulses: dict[tuple[Path, int], float] = {}
        self._tried: dict[Key, float] = {}
        self._names: dict[str, tuple[tuple[int, int], frozenset[str]]] = {}

    def scan(self, now: float) -> Scan:
        """Scan every run once.  ``now`` in seconds on a clock that only grows."""
        with self.lock:
            now = max(now, self._at)  # a thread that had to wait for another scan knew the time before that
            scans = [self._scan_run(run, now) for run in self._runs]
            self._saves, self._at = {one.key: one for found, _ in scans for one in found}, now
            self._tried = {key: since for key, since in self._tried.items() if key in self._saves}
            pulses = {(one.seen.pin.path, one.seen.pin.pulse) for one in self._saves.values() if one.seen.pin is not None}
            self._pulses = {key: since for key, since in self._pulses.items() if key in pulses}
        failures = tuple(f for _, found in scans for f in found.failures)
        notes = (*(note for _, found in scans for note in found.notes), *self._refused(now))
        return Scan(tuple(one.seen for one in self._saves.values()), failures, self.due(now), notes)

    def saves(self) -> tuple[Scanned, ...]:
        """Return the saves of every run, oldest first."""
        return tuple(self._saves.values())

    def latest(self, key: Key) -> Scanned | None:
        """Return one save as it was seen last; ``None`` if it is not here any more."""
        return self._saves.get(key)

    def mark_tried(self, one: Scanned) -> None:
        """Note that it was tried to send it, or could not be: it is due no more, unless it changes."""
        self._tried[one.key] = one.since

    def due(self, now: float) -> float | None:
        """Return the seconds until a save can be sent that nobody has tried to send yet; ``None``: none will be without a change."""
        waits = (self._left(one, now) for one in self.saves() if one.observation is not None)
        return min((left for left in waits if left is not None), default=None)

    def _left(self, one: Scanned, now: float) -> float | None:
        if one.verdict.finished:
            return None if self._tried.get(one.key) == one.since else 0.0
        left = one.verdict.left
        if left is None:  # what is refused now may be whole soon; what a crash has left never is
            left = max(self._rule.quiet, (self._at - one.since) * SELDOM)
        return max(0.0, left - (now - self._at))

    def _refused(self, now: float) -> Iterator[str]:
        """What no waiting makes good, and nobody writes to: the trainer was killed, or a user has to say that this is all."""
        for one in self.saves():
            is_refused = one.observation and one.observation.files and one.verdict.left is None and not one.is_lost
            if is_refused and now - one.since >= self._rule.unmarked:
                yield f"{one.seen.run}/{one.seen.spot.name}: not taken: {one.verdict.reason}"

    def _scan_run(self, run: RunDir, now: float) -> tuple[list[Scanned], Scan]:
        directory, last = _identity(run.path), self._names.pop(run.name, None)
        try:
            found = scan_run(run, self._pinner)
        except CkptsyncError as e:
            return [], Scan(failures=(failure(run.name, "", e),))
        # another directory may have been mounted, or moved, to its place: then nobody knows which checkpoints were there before
        known = last[1] if last and last[0] == directory else None
        wrong = list(found.failures)
        pins = [one.pin for one in found.seen if one.pin is not None]
        around = surroundings(run.path, found.seen, {p.checkpoint for p in pins if not (p.stored or p.is_committed)})
        scanned: list[Scanned] = []
        for one in found.seen:
            try:
                mine = self._claimed(one, now)
                is_new = known is not None and one.spot.name not in known
                scanned.append(self._look(mine, around, now, wrong, is_new=is_new))
            except CkptsyncError as e:  # noqa: PERF203 - one that cannot be read hides no other
                wrong.append(failure(run.name, one.spot.name, e))
        if directory:
            names = {s.spot.name for s in found.seen} | {f.checkpoint for f in wrong}
            self._names[run.name] = directory, frozenset(names)
        return scanned, replace(found, failures=tuple(wrong))

    def _claimed(self, seen: Seen, now: float) -> Seen:
        """A pin on a shared disk whose owner has shown no pulse for long becomes ours."""
        pin = seen.pin
        if pin is None or pin.node in ("", self._pinner.node):
            return seen
        since = self._pulses.setdefault((pin.path, pin.pulse), now)
        mine = spool.claim(pin, self._pinner.node) if now - since > DEAD_AFTER else None
        return seen if mine is None else replace(seen, pin=mine)

    def _look(self, seen: Seen, around: Surroundings, now: float, wrong: list[Failure], *, is_new: bool) -> Scanned:
        """Judge one save.  Raises as its files do, but for those that change meanwhile."""
        before = self._saves.get(key_of(seen))
        state = _state(seen)
        is_same = before is not None and before.state == state
        since = before.since if before is not None and is_same else now
        first = before.first if before is not None else now
        if self._is_done(seen):
            return Scanned(seen, first, since, state, Verdict(finished=False, reason="stored, or another's", left=None))
        fresh = self._is_fresh(seen, before, since, is_new=is_new)
        try:
            observation, verdict, read = self._judged(seen, before if is_same else None, around, now - since, now, fresh=fresh)
        except Incomplete as e:  # it changes meanwhile
            return Scanned(seen, first, since, state, Verdict(finished=False, reason=str(e), left=None))
        rests = is_at_rest(observation, now - since, self._rule, verdict)
        return Scanned(_noted(seen, verdict, wrong, is_at_rest=rests), first, since, state, verdict, observation, read)

    def _judged(
        self, seen: Seen, same: Scanned | None, around: Surroundings, still: float, now: float, *, fresh: bool
    ) -> tuple[Observation, Verdict, float]:
        """Files are read anew ever more seldom while they stay the same, and once more before they are called finished."""
        mates = self._has_mate(seen)
        if same and same.observation and (same.verdict.finished or now - same.read < SELDOM * still):
            observation = self._compared(with_surroundings(same.observation, seen, around, mates=mates), seen, around)
            verdict = judge(observation, still, self._rule)
            if same.verdict.finished or not verdict.finished:
                return observation, verdict, same.read
        observation = self._compared(observe(seen, around, mates=mates, fresh=fresh), seen, around)
        return observation, judge(observation, still, self._rule), now

    def _compared(self, observation: Observation, seen: Seen, around: Surroundings) -> Observation:
        if not may_be_alone(observation, self._rule):
            return observation
        return replace(observation, alike=is_like_another(seen, around.saves))

    def _is_fresh(self, seen: Seen, before: Scanned | None, since: float, *, is_new: bool) -> bool:
        """Whether nothing of it was there at an earlier scan, and it has not been written over since it had an end, or had been cut short."""
        if before is None:
            return is_new and seen.k == 0 and not _was_moved_in(seen)
        if before.observation is None or not before.observation.fresh or before.since == since:
            return before.observation is not None and before.observation.fresh
        has_rested = since - before.since >= self._rule.unmarked
        now = {f.path: (f.size, f.mtime) for f in seen.hold.stats}
        is_rewritten = any(now.get(f.path, (f.size, f.mtime)) != (f.size, f.mtime) for f in before.observation.files)
        had_end = is_rewritten and bool(last_file(before.observation))
        return not (before.verdict.finished or has_rested or had_end)


def scan_run(run: RunDir, pinner: Pinner) -> Scan:
    """Pin what has appeared in an output directory; return every save that is here, oldest first, not yet judged.

    Raises ConfigError or StoreError if nothing can be seen at all.
    """
    spots = {s.name: s for s in scan.spots(run.path)}
    pins = spool.pins(run.path)
    failures: list[Failure] = []
    relief = pinner.make_room(run, spots, pins, failures)
    is_full = bool(relief.full) and pinner.rule.full == "wait"
    seen: list[Seen] = []
    for name in sorted({*spots, *(p.checkpoint for p in pins)}, key=by_step):
        spot = spots.get(name) or Spot(name, scan.family_of(name), run.path / name)
        ours = [p for p in pins if p.checkpoint == name and p not in relief.drop]
        try:
            seen += pinner.pin(run, spot, ours, failures, is_full=is_full)
        except CkptsyncError as e:
            failures.append(failure(run.name, name, e))
    pinner.copies.retain()
    if not relief.full:
        pinner.copies.begin()
    notes = (*pinner.lost, *filter(None, [relief.full]), *pinner.copies.problems(), *said(run.path / OURS)[-_HOOK_LINES:])
    return Scan(tuple(seen), tuple(failures), notes=notes)


def _noted(seen: Seen, verdict: Verdict, wrong: list[Failure], *, is_at_rest: bool) -> Seen:
    """Write beside the pin that it was at rest, for when rotation has taken the rest, and when it was finished, for the manifest."""
    if seen.pin is None:
        return seen
    took = seen.pin.took
    stable = fingerprint(seen.hold.stats) if is_at_rest else 0
    finished = time.time_ns() if verdict.finished and not took.finished else 0
    if stable in (0, took.stable) and not finished:
        return seen
    try:
        return recorded(seen, Took(stable=stable, finished=finished))
    except StoreError as e:  # a full disk: it is sent all the same, and its manifest says less
        wrong.append(failure(seen.run, seen.spot.name, e))
        return seen


def _state(seen: Seen) -> tuple[Stat, ...]:
    """Return what a change of is a change of the save.  A pinned file is ours to replace, by a reflink of it: its inode says nothing."""
    stats = ((h.stat, h.is_pinned) for h in seen.hold.held.values())
    every = (Stat(s.path, s.size, s.mtime, 0, 0) if is_pinned else s for s, is_pinned in stats)
    return tuple(sorted((*every, *seen.hold.partial)))


def _was_moved_in(seen: Seen) -> bool:
    """Return whether its directory was renamed, with all that is in it: that changes its ctime alone, and a new name in it both times."""
    if seen.spot.only is not None:
        return False
    try:
        info = seen.spot.path.stat()
    except OSError:  # rotation: what was there came and went since the last scan
        return False
    return info.st_ctime_ns > info.st_mtime_ns


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        info = directory.stat()
    except OSError:  # not there, or not to be seen: the scan says why
        return None
    return info.st_dev, info.st_ino
