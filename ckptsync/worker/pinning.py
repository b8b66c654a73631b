"""What to do about pins.  Pure: from what lies there to what is to be done."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptsync.scan import Found
from ckptsync.spool.pins import Pin, compare


@dataclass(frozen=True, slots=True)
class Open:
    """Begin pin number ``k`` with everything that lies in the source."""

    k: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Add what has appeared."""

    pin: Pin
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trim:
    """Let go of names that the trainer took back."""

    pin: Pin
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of a pin."""

    pin: Pin


Action = Open | Grow | Trim | Drop


def follow(found: Found | None, pins: Iterable[Pin], node: str, taken: Collection[int]) -> tuple[Action, ...]:
    """How this node's pins of one checkpoint follow its source.  ``taken``: numbers of pins whose save was found whole.

    A pin holds one save.  Where a name stands for another file than before, the trainer is saving again: what was taken stays,
    what was not is a save given up half way, and goes.  Where no file at all is the same, the directory was removed and made
    again, and the old pin may well be a whole save that rotation was quicker with.

    What the hook committed is whole: it neither grows nor shrinks, and what this node pinned of the same save on the way goes.
    """
    ours = sorted(pins, key=lambda p: p.k)
    overtaken = tuple(Drop(p) for p in ours if p.node == node and _is_overtaken(p, ours, taken))
    if found is None or not found.files or (ours and ours[-1].node != node):
        return overtaken
    return (*overtaken, *_grown(found, ours[-1] if ours else None, taken))


def _grown(found: Found, newest: Pin | None, taken: Collection[int]) -> tuple[Action, ...]:
    if newest is None:
        return (Open(0),)
    relation = compare(newest.files, found.files)
    if newest.files and not relation.same:
        return (Open(newest.k + 1),)
    if newest.is_committed:
        return (Open(newest.k + 1),) if relation.changed or relation.new else ()
    if relation.changed:
        return (Open(newest.k + 1), *(() if newest.k in taken else (Drop(newest),)))
    # rotation only takes: where something new stands, the missing was taken back (ZeRO-3's placeholder of the weights)
    trimmed = (Trim(newest, relation.vanished),) if relation.vanished and relation.new else ()
    return (*trimmed, *((Grow(newest, relation.new),) if relation.new else ()))


def _is_overtaken(pin: Pin, pins: Iterable[Pin], taken: Collection[int]) -> bool:
    """Whether a later pin of the hook's has a file of it: then it was a look at that save while it was being written.

    Left alone it would stand for a save of its own, a torn one.  One that was found whole, and has other files too, is another save.
    """
    if pin.is_committed:
        return False
    for commit in (p for p in pins if p.k > pin.k and p.is_committed):
        relation = compare(pin.files, commit.files)
        is_part = not relation.changed and not relation.vanished
        if relation.same and (is_part or not (pin.k in taken or pin.took.finished)):
            return True
    return False


def spare(proven: Iterable[Pin], keep: int) -> tuple[Pin, ...]:
    """Of pins whose checkpoints are VERIFIED, oldest first, all but the newest ``keep`` may go."""
    ordered = tuple(proven)
    return ordered[: max(0, len(ordered) - keep)]
