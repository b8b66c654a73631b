"""One look at an output directory: what lies there, pinned as far as it can be.  Quick, and safe to do again at any moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.scan import Found, Spot
from ckptsync.spool import links
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import said
from ckptsync.spool.pins import Pin, compare
from ckptsync.walk import OURS, Stat
from ckptsync.worker import remembering
from ckptsync.worker.budget import PinCost, Relief, Room, SpoolRule, alone, give_up, held
from ckptsync.worker.copying import Copies
from ckptsync.worker.hold import Hold, hold
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Drop, Grow, Open, Trim, follow
from ckptsync.worker.result import Failure, failure

_BY_THE_DISK = SpoolRule()
_SAID = 3  # lines of what hooks had to say


@dataclass(frozen=True, slots=True)
class Seen:
    """One save of a checkpoint: what can be read of it, and whose pin holds it (``None``: it is not pinned)."""

    run: str
    spot: Spot
    hold: Hold
    pin: Pin | None

    @property
    def k(self) -> int:
        """The pin's number; 0 without one."""
        return self.pin.k if self.pin else 0


@dataclass(frozen=True, slots=True)
class Seat:
    """Who looks, and what it remembers: numbers of pins that were taken, and whether files are safe in the store already.

    ``spool``: what gives way when the spool is full.  ``told``: the last saves that were lost, for as long as this worker lives.
    ``copies``: what no link can hold, on its way into pins.
    """

    node: str
    taken: Callable[[str, str], Collection[int]]
    is_proven: Callable[[str, str, tuple[Stat, ...]], bool]
    spool: SpoolRule = _BY_THE_DISK
    told: deque[str] = field(default_factory=lambda: deque(maxlen=5), compare=False)
    copies: Copies = field(default_factory=Copies, compare=False)


@dataclass(frozen=True, slots=True)
class Look:
    """All that one look saw, by run and step.  ``due``: seconds until the first save settles if nothing changes; ``None``: nobody knows.

    ``notes``: what an operator should know, in words, such as a save that was given up to make room.
    """

    seen: tuple[Seen, ...] = ()
    failures: tuple[Failure, ...] = ()
    due: float | None = None
    notes: tuple[str, ...] = ()


class BeingRemoved(Incomplete):
    """Somebody is removing an output directory: a pin that is made anew would keep the directory that it is in from being removed."""


def look(run: RunDir, seat: Seat, without: Collection[str] = (), before: Iterable[Pin] = ()) -> Look:
    """Pin what has appeared; every save that is here, oldest first, but of checkpoints that another looks at (`look_at`).

    ``before``: the pins of the last look.  Raises ConfigError or StoreError if nothing can be seen at all, BeingRemoved before anything is done.
    """
    spots = {s.name: s for s in scan.spots(run.path) if s.name not in without}
    pins = spool.pins(run.path, lambda name: name not in without)
    _refuse_removed(run, spots, pins, (p for p in before if p.checkpoint not in without), seat)
    relief, failures = _relieved(run, spots, pins, seat)
    seat.told.extend(relief.words)
    seen: list[Seen] = []
    for name in sorted({*spots, *(p.checkpoint for p in pins)}, key=_by_step):
        spot = spots.get(name) or Spot(name, scan.family_of(name), run.path / name)
        ours = [p for p in pins if p.checkpoint == name and p not in relief.drop]
        try:
            there = _look_at(run, spot, ours, seat, is_full=relief.is_full and seat.spool.full == "wait")
        except CkptsyncError as e:
            failures.append(failure(run.name, name, e))
            continue
        seen += there.seen
        failures += there.failures
        seat.told.extend(there.notes)
    seat.copies.retain()
    if not relief.is_full:
        seat.copies.begin()
    notes = (*seat.told, *relief.standing, *seat.copies.problems(), *said(run.path / OURS)[-_SAID:])
    return Look(tuple(seen), tuple(failures), notes=notes)


def look_at(run: RunDir, seat: Seat, name: str, before: Iterable[Pin] = ()) -> Look:
    """The same of one checkpoint, as far as it is here."""
    spots = (s for s in scan.spots(run.path) if s.name == name)
    spot = next(spots, Spot(name, scan.family_of(name), run.path / name))
    pins = spool.pins(run.path, lambda other: other == name)
    _refuse_removed(run, {name: spot}, pins, before, seat)
    found = _look_at(run, spot, pins, seat, is_full=False)
    seat.told.extend(found.notes)
    return found


def _refuse_removed(run: RunDir, spots: Mapping[str, Spot], pins: Iterable[Pin], before: Iterable[Pin], seat: Seat) -> None:
    """Raise BeingRemoved where somebody takes pins apart, or has taken away some whose files the trainer still has: neither rotation nor a worker does so."""
    now = {pin.path: pin for pin in pins}
    for pin in before:
        left = now.get(pin.path)
        if left is not None:
            is_removed = bool(pin.node and not left.node) or not {f.path for f in pin.files} <= {f.path for f in left.files}
        else:
            is_needed = pin.checkpoint in spots and not seat.is_proven(run.name, pin.checkpoint, pin.files)
            is_removed = is_needed and bool(compare(pin.files, scan.found(spots[pin.checkpoint]).files).same)
        if is_removed:
            raise BeingRemoved(f"{run.path / OURS}: somebody is removing it")


def _look_at(run: RunDir, spot: Spot, pins: Iterable[Pin], seat: Seat, *, is_full: bool) -> Look:
    found, pins = scan.found(spot), list(pins)
    if pins and not found.files and not any(p.commit for p in pins):
        # the hook's pin comes before rotation, and rotation may have come since these were listed
        pins = list(spool.pins(run.path, lambda name: name == spot.name))
    ours, failures = _adopted(run, pins, seat.node)
    actions = follow(found, ours, seat.node, seat.taken(run.name, spot.name))
    if not ours and seat.is_proven(run.name, spot.name, found.files):
        actions = ()
    if is_full:  # the operator would rather have the old ones whole
        actions = tuple(a for a in actions if not isinstance(a, Open))
    refused: list[str] = []
    try:
        for action in actions:
            refused += _do(action, run.path, spot, found, seat.node)
    except CkptsyncError as e:  # a full disk, another user's files: what cannot be pinned can be sent from where it lies
        failures.append(failure(run.name, spot.name, e))
    if actions:
        ours, _ = _adopted(run, spool.pins(run.path, lambda name: name == spot.name), seat.node)
    for pin in ours:
        if pin.node == seat.node:
            spool.pulse(pin)
            is_newest = pin is ours[-1]
            seat.copies.attend(pin, spot.path, found.files if is_newest else (), refused if is_newest else ())
    spoiled = tuple(_spoiled(a.pin) for a in actions if isinstance(a, Drop) and a.pin.commit)
    return Look(tuple(_seen(run.name, spot, found, ours, seat.copies)), tuple(failures), notes=spoiled)


def _relieved(run: RunDir, spots: Collection[str], pins: Sequence[Pin], seat: Seat) -> tuple[Relief, list[Failure]]:
    """Let go of pins until there is room for the trainer's next save, and the operator's budget is kept."""
    newest = {p.checkpoint: p.k for p in pins}  # they come in order
    room = _room(run, pins, seat)
    if not room.lacking(seat.spool):
        return Relief(), []
    if remembering.give_way(run.path):
        room = _room(run, pins, seat)
    costs = [
        PinCost(
            pin,
            alone(pin),
            pin.checkpoint not in spots or pin.k != newest[pin.checkpoint],
            seat.is_proven(run.name, pin.checkpoint, pin.files),
            _by_step(pin.checkpoint)[0],
        )
        for pin in pins
        if pin.node in ("", seat.node)
    ]
    relief = give_up(costs, room, seat.spool)
    try:
        for pin in relief.drop:
            spool.drop(pin)
    except CkptsyncError as e:
        return relief, [failure(run.name, "", e)]
    return relief, []


def _room(run: RunDir, pins: Sequence[Pin], seat: Seat) -> Room:
    kept = remembering.size(run.path) if seat.spool.budget else 0
    largest = max((sum(f.size for f in p.files) for p in pins), default=0)
    return Room(held(pins) + kept, spool.free_bytes(run.path), largest)


def _adopted(run: RunDir, pins: Iterable[Pin], node: str) -> tuple[list[Pin], list[Failure]]:
    """A pin that the hook made is the first worker's that sees it; whoever was quicker, the next look tells."""
    ours: list[Pin] = []
    failures: list[Failure] = []
    for pin in pins:
        try:
            ours.append(pin if pin.node else spool.adopt(pin, node) or pin)
        except CkptsyncError as e:  # a full disk keeps us from saying that it is ours, not from sending it  # noqa: PERF203 - a few pins
            failures.append(failure(run.name, pin.checkpoint, e))
            ours.append(replace(pin, node=node))
    return ours, failures


def _spoiled(pin: Pin) -> str:
    return f"{pin.checkpoint}: was written again in place before it was sent; that save is lost"


def _seen(run: str, spot: Spot, found: Found, pins: Iterable[Pin], copies: Copies) -> list[Seen]:
    """The newest pin goes with its source; older ones, and all of them once the source is gone, stand for themselves.

    One whose files rotation took before they were copied is whole when they are, and not to be seen until then.
    """
    ordered = list(pins)
    newest = ordered[-1] if ordered else None
    there = [Seen(run, spot, hold(None, p, spot.family, spot.name), p) for p in ordered[:-1]]
    if newest is not None or found.files or found.partial:
        there.append(Seen(run, spot, hold(found, newest, spot.family, spot.name), newest))
    return [s for s in there if s.pin is None or not copies.pending(s.pin)]


def _do(action: Open | Grow | Trim | Drop, output_dir: Path, spot: Spot, found: Found, node: str) -> tuple[str, ...]:
    """The names that this file system cannot link are returned."""
    if isinstance(action, Open):
        pin = spool.open_pin(output_dir, spot.name, action.k, node)
        # there is none if another node on this directory was first
        return links.grow(pin, spot.path, [f.path for f in found.files]) if pin is not None else ()
    if isinstance(action, Grow):
        return links.grow(action.pin, spot.path, action.names)
    if isinstance(action, Trim):
        links.trim(action.pin, action.names)
    else:
        spool.drop(action.pin)
    return ()


def _by_step(name: str) -> tuple[int, str]:
    return Spot(name, "trainer", Path()).step or 0, name
