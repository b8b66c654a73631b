"""What gives way when the spool is full.  Pure: from what pins hold, and what room there is, to which of them go.

A pin takes no room while the trainer has its own names of the files; it holds bytes from rotation on.  So only pins of what rotation took
can make room, and only they go.  What the store has goes first.  What it has not is given up by the operator's rule alone
(``worker.spool_full``), never the newest and never the one that has been on its way for longest, and not where it would be in vain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptsync.spool.pins import Pin


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
        """Bytes that have to be let go of, if they can."""
        return max(self.held - rule.budget if rule.budget else 0, self.next - self.free, 0)


@dataclass(frozen=True, slots=True)
class PinCost:
    """A pin, and what letting go of it frees.  ``is_gone``: the trainer has removed its checkpoint."""

    pin: Pin
    alone: int
    is_gone: bool
    is_verified: bool
    step: int


@dataclass(frozen=True, slots=True)
class Relief:
    """``words``: what was given up that the store does not have, for people.  ``standing``: what is true as long as there is too little room."""

    drop: tuple[Pin, ...] = ()
    words: tuple[str, ...] = ()
    standing: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether there is too little room all the same."""
        return bool(self.standing)


def held(pins: Iterable[Pin]) -> int:
    """Bytes of files that have no names but ours, each counted once however many pins have it."""
    names = Counter((f.device, f.inode) for p in pins for f in p.files)
    return sum({(f.device, f.inode): f.size for p in pins for f in p.files if f.links <= names[f.device, f.inode]}.values())


def alone(pin: Pin) -> int:
    """Bytes that letting go of this pin frees at once."""
    names = Counter((f.device, f.inode) for f in pin.files)
    return sum({(f.device, f.inode): f.size for f in pin.files if f.links <= names[f.device, f.inode]}.values())


def give_up(pins: Sequence[PinCost], room: Room, rule: SpoolRule) -> Relief:
    """Which pins to let go of, so that ``room`` is enough; as few as possible."""
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
    words = tuple(f"{_name(p)}: given up before it was stored, for {_size(p.alone)} ({_why(room, rule)})" for p in given)
    standing = (_full(room, rule),) if lacking > 0 else ()
    return Relief(tuple(p.pin for p in (*drop, *given)), words, standing)


def _expendable(pins: Sequence[PinCost], able: Sequence[PinCost], every: int) -> list[PinCost]:
    """What the store has not, in the order in which it may be given up."""
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


def _age(cost: PinCost) -> tuple[int, str, int]:
    return (cost.step, cost.pin.checkpoint, cost.pin.k)


def _name(cost: PinCost) -> str:
    return cost.pin.checkpoint


def _why(room: Room, rule: SpoolRule) -> str:
    if rule.budget and room.held > rule.budget:
        return f"spool full: {_size(room.held)} held, spool_budget {_size(rule.budget)}, spool_full: {rule.full}"
    return f"disk full: {_size(room.free)} free, the next save may want {_size(room.next)}, spool_full: {rule.full}"


def _full(room: Room, rule: SpoolRule) -> str:
    """What an operator has to know while it lasts."""
    then = "nothing new is pinned" if rule.full == "wait" else "nothing more can be given up"
    return f"{_why(room, rule)}; {then} until something is stored"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
