"""One look at an output directory: what lies there, pinned as far as it can be.  Quick, and safe to do again at any moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptsync import scan
from ckptsync.errors import CkptsyncError
from ckptsync.scan import Found, Spot
from ckptsync.spool import links
from ckptsync.spool import pins as spool
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat
from ckptsync.worker.hold import Hold, hold
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Drop, Grow, Open, Trim, follow
from ckptsync.worker.result import Failure, failure


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
    """Who looks, and what it remembers: numbers of pins that were taken, and whether files are safe in the store already."""

    node: str
    taken: Callable[[str, str], Collection[int]]
    is_proven: Callable[[str, str, tuple[Stat, ...]], bool]


@dataclass(frozen=True, slots=True)
class Look:
    """All that one look saw, by run and step.  ``due``: seconds until the first save settles if nothing changes; ``None``: nobody knows.

    ``notes``: what an operator should know, in words, such as a save that was given up to make room.
    """

    seen: tuple[Seen, ...] = ()
    failures: tuple[Failure, ...] = ()
    due: float | None = None
    notes: tuple[str, ...] = ()


def look(run: RunDir, seat: Seat) -> Look:
    """Pin what has appeared; every save that is here, oldest first.  Raises ConfigError or StoreError if nothing can be seen at all."""
    spots = {s.name: s for s in scan.spots(run.path)}
    pins = spool.pins(run.path)
    seen: list[Seen] = []
    failures: list[Failure] = []
    notes: list[str] = []
    for name in sorted({*spots, *(p.checkpoint for p in pins)}, key=_by_step):
        spot = spots.get(name) or Spot(name, scan.family_of(name), run.path / name)
        try:
            there, told = _look_at(run, spot, [p for p in pins if p.checkpoint == name], seat)
        except CkptsyncError as e:
            failures.append(failure(run.name, name, e))
        else:
            seen += there
            notes += told
    return Look(tuple(seen), tuple(failures), notes=tuple(notes))


def _look_at(run: RunDir, spot: Spot, pins: Iterable[Pin], seat: Seat) -> tuple[list[Seen], list[str]]:
    found = scan.found(spot)
    ours = [_adopted(p, seat.node) for p in pins]
    actions = follow(found, ours, seat.node, seat.taken(run.name, spot.name))
    if not ours and seat.is_proven(run.name, spot.name, found.files):
        actions = ()
    for action in actions:
        _do(action, run.path, spot, found, seat.node)
    if actions:
        ours = [_adopted(p, seat.node) for p in spool.pins(run.path) if p.checkpoint == spot.name]
    for pin in ours:
        if pin.node == seat.node:
            spool.pulse(pin)
    return _seen(run.name, spot, found, ours), [_spoiled(a.pin) for a in actions if isinstance(a, Drop) and a.pin.commit]


def _adopted(pin: Pin, node: str) -> Pin:
    """A pin that the hook made is the first worker's that sees it; whoever was quicker, the next look tells."""
    return pin if pin.node else spool.adopt(pin, node) or pin


def _spoiled(pin: Pin) -> str:
    return f"{pin.checkpoint}: was written again in place before it was sent; that save is lost"


def _seen(run: str, spot: Spot, found: Found, pins: Iterable[Pin]) -> list[Seen]:
    """The newest pin goes with its source; older ones, and all of them once the source is gone, stand for themselves."""
    ordered = list(pins)
    newest = ordered[-1] if ordered else None
    older = ordered[:-1]
    closed = [Seen(run, spot, hold(None, p, spot.family, spot.name), p) for p in older]
    if newest is None and not (found.files or found.partial):
        return closed
    return [*closed, Seen(run, spot, hold(found, newest, spot.family, spot.name), newest)]


def _do(action: Open | Grow | Trim | Drop, output_dir: Path, spot: Spot, found: Found, node: str) -> None:
    if isinstance(action, Open):
        pin = spool.open_pin(output_dir, spot.name, action.k, node)
        if pin is not None:  # else another node on this directory was first
            links.grow(pin, spot.path, [f.path for f in found.files])
    elif isinstance(action, Grow):
        links.grow(action.pin, spot.path, action.names)
    elif isinstance(action, Trim):
        links.trim(action.pin, action.names)
    else:
        spool.drop(action.pin)


def _by_step(name: str) -> tuple[int, str]:
    return Spot(name, "trainer", Path()).step or 0, name
