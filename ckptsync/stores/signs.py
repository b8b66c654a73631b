"""Signs of life of transfers: what tells a slow network, or a store that is tried again, from a thread that hangs for ever.

The kernel counts no bytes of sockets for a process, and under a small bandwidth few move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

R = TypeVar("R")

LEAST = 64 << 10  # bytes of an ask that is one: a heartbeat's few hundred are none, as it beats while all else hangs
_lock = threading.Lock()
_given: dict[str, int] = {}
_whose: ContextVar[str] = ContextVar("whose", default="")


def give() -> None:
    """Say that something moved, or failed and is tried again."""
    with _lock:
        _given[_whose.get()] = _given.get(_whose.get(), 0) + 1


def given() -> int:
    """How many there have been."""
    with _lock:
        return sum(_given.values())


def given_by(whose: str) -> int:
    """How many of them within `of`."""
    with _lock:
        return _given.get(whose, 0)


@contextmanager
def of(whose: str) -> Iterator[None]:
    """What is given within is a sign of ``whose`` life, too."""
    before = _whose.set(whose)
    try:
        yield
    finally:
        _whose.reset(before)


def carried(work: Callable[..., R]) -> Callable[..., R]:
    """``work`` for another thread, once: its signs are of whoever asks for it here."""
    return partial(copy_context().run, work)
