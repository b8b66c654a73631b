"""Pins of this node beside the trainer's checkpoints: how they follow what lies there, and which give way when the spool is full.

`follow` and `give_up` decide; `Pinner` carries it out, quickly, and safe to repeat at any moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError
from ckptsync.scan import Found, Spot
from ckptsync.spool import links
from ckptsync.spool import pins as spool
from ckptsync.spool.pins import Pin, compare
from ckptsync.walk import Stat
from ckptsync.worker import remembering
from ckptsync.worker.copying import Copies
from ckptsync.worker.options import RunDir
from ckptsync.worker.result import Failure, failure
from ckptsync.worker.snapshot import Seen, hold

# How pins follow their source.


@dataclass(frozen=True, slots=True)
class PinChanges:
    """What to do: ``drop`` pins, ``open`` pin number k with all that lies in the source, ``trim`` and ``grow`` the newest pin by these names."""

    drop: tuple[Pin, ...] = ()
    open: int | None = None
    trim: tuple[str, ...] = ()
    grow: tuple[str, ...] = ()


def follow(found: Found | None, pins: Iterable[Pin], node: str) -> PinChanges:
    """Return how this node's pins of one checkpoint follow its source.  Pure.

    A pin holds one save.  Where a name stands for another file than before, the trainer is saving again: a save that was found finished stays, one
    that was not is given up half way, and goes.  Where no file at all is the same, the directory was removed and made again, and the old pin may
    well be a whole save that rotation was quicker with.

    What the hook committed is whole: it neither grows nor shrinks, and what this node pinned of the same save on the way goes.
    """
    ours = sorted(pins, key=lambda p: p.k)
    overtaken = tuple(p for p in ours if p.node == node and _is_overtaken(p, ours))
    newest = ours[-1] if ours else None
    if found is None or not found.files or (newest and newest.node != node):
        return PinChanges(drop=overtaken)
    if newest is None:
        return PinChanges(open=0)
    relation = compare(newest.files, found.files)
    if newest.files and not relation.same:
        return PinChanges(overtaken, open=newest.k + 1)
    if newest.is_committed:
        return PinChanges(overtaken, open=newest.k + 1 if relation.changed or relation.new else None)
    if relation.changed:
        return PinChanges((*overtaken, *(() if newest.took.finished else (newest,))), open=newest.k + 1)
    # rotation only removes: where something new stands, the trainer took the rest back (ZeRO-3's placeholder of the weights)
    return PinChanges(overtaken, trim=relation.vanished if relation.new else (), grow=relation.new)


def _is_overtaken(pin: Pin, pins: Iterable[Pin]) -> bool:
    """Return whether a later pin of the hook's has a file of this one: then this pin was made while that save was being written.

    Left alone it would stand for a save of its own, a torn one.  One that was found finished, and has other files too, is another save.
    """
    if pin.is_committed:
        return False
    for commit in (p for p in pins if p.k > pin.k and p.is_committed):
        relation = compare(pin.files, commit.files)
        is_part = not relation.changed and not relation.vanished
        if relation.same and (is_part or not pin.took.finished):
            return True
    return False


# Which pins give way.  A pin takes no room while the trainer has its own names of the files; it holds bytes from rotation on.  So only pins of
# checkpoints that rotation took can make room.


@dataclass(frozen=True, slots=True)
class SpoolRule:
    """``budget``: bytes that pins may hold; 0: as many as leave room for the trainer's next save.

    ``full``: ``oldest`` gives up the oldest first; ``every:N`` the oldest of those that are not each Nth save; ``wait`` none, and pins nothing new.
    """

    budget: int = 0
    full: str = "oldest"

    @property
    def every(self) -> int:
        """N of ``every:N``; else 0."""
        return int(self.full.removeprefix("every:")) if self.full.startswith("every:") else 0


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: ``held`` by pins alone, ``free`` where they lie, and of the trainer's ``next`` save, as large as the largest so far."""

    held: int
    free: int
    next: int

    def lacking(self, rule: SpoolRule) -> int:
        """Return the bytes that have to be freed, if they can be."""
        return max(self.held - rule.budget if rule.budget else 0, self.next - self.free, 0)


@dataclass(frozen=True, slots=True)
class PinCost:
    """A pin, and what dropping it frees.  ``is_gone``: the trainer has removed its checkpoint."""

    pin: Pin
    alone: int
    is_gone: bool
    is_verified: bool
    step: int


@dataclass(frozen=True, slots=True)
class Relief:
    """``drop``: pins that go; ``given_up``: in words, those of them that the store does not have; ``full``: why there is too little room all the same."""

    drop: tuple[Pin, ...] = ()
    given_up: tuple[str, ...] = ()
    full: str = ""


def held(pins: Iterable[Pin]) -> int:
    """Return the bytes of files that have no names but our pins', each counted once however many pins have it."""
    files = [f for p in pins for f in p.files]
    names = Counter((f.device, f.inode) for f in files)
    return sum({(f.device, f.inode): f.size for f in files if f.links <= names[f.device, f.inode]}.values())


def give_up(pins: Sequence[PinCost], room: Room, rule: SpoolRule) -> Relief:
    """Return which pins to drop so that ``room`` is enough; as few as possible.  Pure.

    What the store has goes first.  What it has not is given up by the operator's rule alone, never the newest and never the one that has been on
    its way for longest, and not where it would be in vain.
    """
    lacking = room.lacking(rule)
    able = [p for p in pins if p.is_gone and p.alone]
    stored = sorted((p for p in able if p.pin.stored), key=lambda p: (not p.is_verified, *_age(p)))
    drop = _enough(stored, lacking)
    lacking -= sum(p.alone for p in drop)
    unsent = [] if rule.full == "wait" or lacking <= 0 else _expendable(pins, able, rule.every)
    is_vain = room.next - room.free > sum(p.alone for p in (*drop, *unsent))  # the disk is full of something else
    over = room.held - rule.budget - sum(p.alone for p in drop) if rule.budget else 0
    given = _enough(unsent, over if is_vain else lacking)
    lacking -= sum(p.alone for p in given)
    why = _why(room, rule)
    words = tuple(f"{p.pin.checkpoint}: given up before it was stored, for {_size(p.alone)} ({why})" for p in given)
    then = "nothing new is pinned" if rule.full == "wait" else "nothing more can be given up"
    return Relief(tuple(p.pin for p in (*drop, *given)), words, f"{why}; {then} until something is stored" if lacking > 0 else "")


def _expendable(pins: Sequence[PinCost], able: Sequence[PinCost], every: int) -> list[PinCost]:
    """Return what the store has not, in the order in which it may be given up."""
    newest = max(pins, key=_age, default=None)
    sending = min((p for p in pins if p.pin.took.sending and not p.pin.stored), key=_age, default=None)
    unsent = sorted((p for p in able if not p.pin.stored and p is not newest and p is not sending), key=_age)
    if not every:
        return unsent
    apart = math.gcd(*(p.step for p in pins)) or 1  # steps between two saves
    return sorted(unsent, key=lambda p: p.step // apart % every == 0)  # each Nth stays as long as that is enough


def _enough(pins: Iterable[PinCost], lacking: int) -> list[PinCost]:
    chosen = []
    for pin in pins:
        if lacking <= 0:
            break
        chosen.append(pin)
        lacking -= pin.alone
    return chosen


def by_step(checkpoint: str) -> tuple[int, str]:
    """Return what sorts checkpoints by their step, those without one first."""
    return Spot(checkpoint, "trainer", Path()).step or 0, checkpoint


def _age(cost: PinCost) -> tuple[int, str, int]:
    return (cost.step, cost.pin.checkpoint, cost.pin.k)


def _why(room: Room, rule: SpoolRule) -> str:
    if rule.budget and room.held > rule.budget:
        return f"spool full: {_size(room.held)} held, spool_budget {_size(rule.budget)}, spool_full: {rule.full}"
    return f"disk full: {_size(room.free)} free, the next save may want {_size(room.next)}, spool_full: {rule.full}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# Carrying it out.


@dataclass(frozen=True, slots=True)
class Pinner:
    """Pins for ``node``.  ``is_proven``: whether the store has these files of a run's checkpoint, VERIFIED: then they need no pin.

    ``lost``: in words, the last saves that were lost, for as long as this worker lives.  ``copies``: what no link can hold, on its way into pins.
    """

    node: str
    is_proven: Callable[[str, str, tuple[Stat, ...]], bool]
    rule: SpoolRule = field(default_factory=SpoolRule)
    lost: deque[str] = field(default_factory=lambda: deque(maxlen=5), compare=False)
    copies: Copies = field(default_factory=Copies, compare=False)

    def make_room(self, run: RunDir, here: Collection[str], pins: Sequence[Pin], failures: list[Failure]) -> Relief:
        """Drop pins until there is room for the trainer's next save, and the operator's budget is kept.  ``here``: names of checkpoints."""
        room = self._room(run, pins)
        if room.lacking(self.rule) and remembering.give_way(run.path):
            room = self._room(run, pins)
        if not room.lacking(self.rule):
            return Relief()
        newest = {p.checkpoint: p.k for p in pins}  # they come in order
        costs = [
            PinCost(
                pin,
                held([pin]),
                pin.checkpoint not in here or pin.k != newest[pin.checkpoint],
                self.is_proven(run.name, pin.checkpoint, pin.files),
                by_step(pin.checkpoint)[0],
            )
            for pin in pins
            if pin.node in ("", self.node)
        ]
        relief = give_up(costs, room, self.rule)
        self.lost.extend(relief.given_up)
        try:
            for pin in relief.drop:
                spool.drop(pin)
        except CkptsyncError as e:
            failures.append(failure(run.name, "", e))
        return relief

    def _room(self, run: RunDir, pins: Sequence[Pin]) -> Room:
        kept = remembering.size(run.path) if self.rule.budget else 0
        largest = max((sum(f.size for f in p.files) for p in pins), default=0)
        return Room(held(pins) + kept, spool.free_bytes(run.path), largest)

    def pin(self, run: RunDir, spot: Spot, pins: list[Pin], failures: list[Failure], *, is_full: bool = False) -> list[Seen]:
        """Pin what has appeared of one checkpoint, and return its saves.  ``is_full``: pin nothing new.  Raises as `ckptsync.scan.found`."""
        found = scan.found(spot)
        if pins and not found.files and not any(p.commit for p in pins):
            # the hook's pin comes before rotation, and rotation may have come since these were listed
            pins = self._listed(run, spot)
        ours = self._adopted(run, pins, failures)
        changes = follow(found, ours, self.node)
        if not ours and self.is_proven(run.name, spot.name, found.files):
            changes = PinChanges()
        if is_full:  # the operator would rather have the old ones whole
            changes = replace(changes, open=None)
        refused: tuple[str, ...] = ()
        try:
            refused = self._change(run, spot, found, ours, changes)
        except CkptsyncError as e:  # a full disk, another user's files: what cannot be pinned can be sent from where it lies
            failures.append(failure(run.name, spot.name, e))
        if changes != PinChanges():
            ours = self._adopted(run, self._listed(run, spot), [])
        for pin in ours:
            if pin.node == self.node:
                spool.pulse(pin)
                is_newest = pin is ours[-1]
                self.copies.attend(pin, spot.path, found.files if is_newest else (), refused if is_newest else ())
        lost = (pin for pin in changes.drop if pin.commit)
        self.lost.extend(f"{pin.checkpoint}: was written again in place before it was sent; that save is lost" for pin in lost)
        return self._saves(run, spot, found, ours)

    def _listed(self, run: RunDir, spot: Spot) -> list[Pin]:
        return list(spool.pins(run.path, lambda name: name == spot.name))

    def _adopted(self, run: RunDir, pins: Iterable[Pin], failures: list[Failure]) -> list[Pin]:
        """A pin that the hook made becomes the first worker's that sees it; which one was first, the next look tells."""
        ours: list[Pin] = []
        for pin in pins:
            try:
                ours.append(pin if pin.node else spool.adopt(pin, self.node) or pin)
            except CkptsyncError as e:  # a full disk keeps us from saying that it is ours, not from sending it  # noqa: PERF203
                failures.append(failure(run.name, pin.checkpoint, e))
                ours.append(replace(pin, node=self.node))
        return ours

    def _change(self, run: RunDir, spot: Spot, found: Found, pins: Sequence[Pin], changes: PinChanges) -> tuple[str, ...]:
        """Return the names that this file system cannot link."""
        refused: tuple[str, ...] = ()
        overtaken = [pin for pin in changes.drop if not (changes.open is not None and pin is pins[-1])]
        for pin in overtaken:
            spool.drop(pin)
        if changes.open is not None:
            fresh = spool.open_pin(run.path, spot.name, changes.open, self.node)
            # there is none if another node on this directory was first
            refused = links.grow(fresh, spot.path, [f.path for f in found.files]) if fresh is not None else ()
        if changes.trim:
            links.trim(pins[-1], changes.trim)
        if changes.grow:
            refused = links.grow(pins[-1], spot.path, changes.grow)
        for pin in changes.drop:
            if pin not in overtaken:  # only when its successor is there
                spool.drop(pin)
        return refused

    def _saves(self, run: RunDir, spot: Spot, found: Found, pins: Sequence[Pin]) -> list[Seen]:
        """The newest pin goes with its source; older ones, and all of them once the source is gone, stand for themselves.

        A pin whose files rotation took before they were copied is whole when they are, and is left out until then.
        """
        newest = pins[-1] if pins else None
        there = [Seen(run.name, spot, hold(None, p, spot.family, spot.name), p) for p in pins[:-1]]
        if newest is not None or found.files or found.partial:
            there.append(Seen(run.name, spot, hold(found, newest, spot.family, spot.name), newest))
        return [s for s in there if s.pin is None or not self.copies.pending(s.pin)]
