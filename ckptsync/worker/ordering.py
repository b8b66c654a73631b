"""Which of several finished saves goes first, and which need not go at all.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptsync.worker.options import Order, Superseded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """A finished save that is not stored.  ``age``: when it was first seen, then (all are new to a worker that begins) its step and its pin's number.

    ``written``: the mtime of its last file (ns).  ``is_begun``: part of it is in the store, from this node or another.
    """

    save: T
    run: str
    age: tuple[float, int, int]
    written: int
    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class Queue(Generic[T]):
    """``first`` to last; ``dropped`` are those that a newer one has overtaken."""

    first: tuple[T, ...]
    dropped: tuple[T, ...] = ()


def queue(turns: Iterable[Turn[T]], order: Order, superseded: Superseded) -> Queue[T]:
    """Oldest or newest first, but before these what is begun, which is never dropped: other nodes may have sent their parts.

    Dropped is what is older than another finished save of its run, by its age and by its files: a clock that was set back drops nothing.
    """
    ordered = sorted(turns, key=lambda t: t.age, reverse=order == "newest")
    dropped = [t for t in ordered if superseded == "drop" and not t.is_begun and _is_overtaken(t, ordered)]
    going = sorted((t for t in ordered if t not in dropped), key=lambda t: not t.is_begun)
    return Queue(tuple(t.save for t in going), tuple(t.save for t in dropped))


def _is_overtaken(turn: Turn[T], others: Sequence[Turn[T]]) -> bool:
    return any(o.run == turn.run and o.age > turn.age and o.written > turn.written for o in others)
