"""Decides which pins are dropped when the spool is full.  Pure.

A pin needs no room while the trainer has its own names of the files; from rotation on it holds
their bytes.  So only pins of checkpoints that rotation has removed can make room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptsync.records.save_order import SaveDates, oldest_first
from ckptsync.spool.pins import Pin
from ckptsync.walk import SAME_MOMENT


@dataclass(frozen=True, slots=True)
class SpoolRule:
    """``budget``: bytes that pins may hold; 0: as many as leave room for the trainer's next save.

    ``full``: ``oldest`` gives up the oldest first; ``every:N`` the oldest of those that are not
    each Nth save; ``wait`` none, and pins nothing new.
    """

    budget: int = 0
    full: str = "oldest"

    @property
    def every(self) -> int:
        """Return the N of ``every:N``; otherwise 0."""
        return int(self.full.removeprefix("every:")) if self.full.startswith("every:") else 0


@dataclass(frozen=True, slots=True)
class SpoolRoom:
    """Bytes in the spool.

    ``held``: by pins alone.  ``free``: on their disk.  ``next_save``: the trainer's next save,
    taken to be as large as the largest so far.
    """

    held: int
    free: int
    next_save: int

    def lacking(self, rule: SpoolRule) -> int:
        """Return the bytes that have to be freed: 0 if there is room for the next save."""
        return max(self.held - rule.budget if rule.budget else 0, self.next_save - self.free, 0)


@dataclass(frozen=True, slots=True)
class PinCost:
    """A pin, and the bytes ``alone`` that dropping it frees.

    ``is_gone``: the trainer has removed its checkpoint.
    """

    pin: Pin
    alone: int
    is_gone: bool
    is_verified: bool
    step: int


@dataclass(frozen=True, slots=True)
class Relief:
    """How a full spool gets room.

    ``drop``: pins to drop.  ``given_up``: those of them that the store does not have, in words.
    ``full``: why there is too little room all the same.
    """

    drop: tuple[Pin, ...] = ()
    given_up: tuple[str, ...] = ()
    full: str = ""


def held_bytes(pins: Iterable[Pin]) -> int:
    """Return the bytes of files that have no names but these pins', each counted once."""
    files = [f for p in pins for f in p.files]
    names = Counter((f.device, f.inode) for f in files)
    return sum(
        {(f.device, f.inode): f.size for f in files if f.links <= names[f.device, f.inode]}.values()
    )


def pins_by_age(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    """Return the pins of an output directory, oldest first."""

    def dates(pin: Pin) -> SaveDates:
        """Return the dates of a pin's save."""
        newest = max((f.mtime for f in pin.files), default=0)
        return local_dates(pin.checkpoint, newest, pin.notes.finished, pin.k)

    return oldest_first(pins, dates)


def local_dates(checkpoint: str, newest: int, finished: int, k: int = 0) -> SaveDates:
    """Return the dates of a save on this node, by which saves are ordered.

    ``newest``: the mtime of its newest file, which counts as ``finished`` if it is later.
    ``finished``: when a worker saw it finished, which counts as its arrival; 0 if none has.  Both
    in ns.
    """
    written, arrived = newest / 1e9, finished / 1e9 if finished else math.inf
    is_ahead = written > arrived + SAME_MOMENT
    return SaveDates(checkpoint, min(written, arrived), arrived, is_ahead, k)


def choose_to_give_up(pins: Sequence[PinCost], room: SpoolRoom, rule: SpoolRule) -> Relief:
    """Return which pins to drop so that there is room, as few as possible.  Pure.

    Only pins whose checkpoint the trainer has removed can go.  Those that the store has go first,
    VERIFIED ones before others.  Others go only by the operator's rule, but never the newest pin,
    nor the oldest that is being sent; where the disk would stay too full, only for the budget.
    """
    bytes_lacking = room.lacking(rule)
    droppable = [p for p in pins if p.is_gone and p.alone]
    positions = {
        (p.checkpoint, p.k): position for position, p in enumerate(pins_by_age(c.pin for c in pins))
    }

    def position_of(cost: PinCost) -> int:
        """Return a pin's position among all pins, from the oldest on."""
        return positions[cost.pin.checkpoint, cost.pin.k]

    stored = sorted(
        (p for p in droppable if p.pin.stored), key=lambda p: (not p.is_verified, position_of(p))
    )
    drop = _take_enough(stored, bytes_lacking)
    bytes_lacking -= sum(p.alone for p in drop)
    newest = max(pins, key=position_of, default=None)
    sending = min(
        (p for p in pins if p.pin.notes.sending and not p.pin.stored), key=position_of, default=None
    )
    unsent = sorted(
        (p for p in droppable if not p.pin.stored and p is not newest and p is not sending),
        key=position_of,
    )
    if rule.full == "wait" or bytes_lacking <= 0:
        unsent = []
    if rule.every:  # each Nth stays as long as that is enough
        steps_apart = math.gcd(*(p.step for p in pins)) or 1  # steps between two saves
        unsent.sort(key=lambda p: p.step // steps_apart % rule.every == 0)
    # the disk is full of something else
    is_too_little = room.next_save - room.free > sum(p.alone for p in (*drop, *unsent))
    over_budget = room.held - rule.budget - sum(p.alone for p in drop) if rule.budget else 0
    unstored = _take_enough(unsent, over_budget if is_too_little else bytes_lacking)
    bytes_lacking -= sum(p.alone for p in unstored)
    why = (
        f"disk full: {_size(room.free)} free, the next save may need {_size(room.next_save)},"
        f" spool_full: {rule.full}"
    )
    if rule.budget and room.held > rule.budget:
        why = (
            f"spool full: {_size(room.held)} held, spool_budget {_size(rule.budget)}, spool_full:"
            f" {rule.full}"
        )
    words = tuple(
        f"{p.pin.checkpoint}: dropped before it was uploaded, to free {_size(p.alone)} ({why})"
        for p in unstored
    )
    consequence = "nothing new is pinned" if rule.full == "wait" else "nothing more can be dropped"
    return Relief(
        tuple(p.pin for p in (*drop, *unstored)),
        words,
        f"{why}; {consequence} until an upload is finished" if bytes_lacking > 0 else "",
    )


def _take_enough(pins: Iterable[PinCost], lacking: int) -> list[PinCost]:
    """Return the first pins that together free ``lacking`` bytes, or all of them."""
    chosen = []
    for pin in pins:
        if lacking <= 0:
            break
        chosen.append(pin)
        lacking -= pin.alone
    return chosen


def _size(count: int) -> str:
    """Return a number of bytes in MiB, as text."""
    return f"{count / 2**20:.1f} MiB"
