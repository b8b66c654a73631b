"""What several threads want done, done by one of them for all: so a round trip is shared by those who would have to wait for one each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Seat(Generic[T]):
    """``gate`` opens when its item is done, or when there is a bundle that its thread shall do."""

    item: T
    gate: threading.Lock = field(default_factory=threading.Lock)
    bundle: list[_Seat[T]] = field(default_factory=list)
    is_done: bool = False


class Bundles(Generic[T]):
    """A bundle is begun when none is being done, or when one of ``most`` items has come together; at most ``at_once`` at a time."""

    def __init__(self, do: Callable[[Sequence[T]], None], most: int, at_once: int) -> None:
        self._do, self._most, self._at_once = do, most, at_once
        self._reset()

    def join(self, item: T) -> None:
        """Return when ``item`` was in a bundle that is over.  ``do`` may be called in this thread, and raises into that one alone."""
        seat = _Seat(item)
        seat.gate.acquire()
        if self._process != os.getpid():  # a fork: those who waited, or worked, did not come with us
            self._reset()
        with self._lock:
            self._line.append(seat)
            bundle = self._next()
        while not seat.is_done:
            if bundle:
                self._lead(bundle)
            seat.gate.acquire()
            bundle, seat.bundle = seat.bundle, []  # the seat is in it: rings stay in memory until somebody looks for them

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._line: list[_Seat[T]] = []
        self._busy = 0

    def _next(self) -> list[_Seat[T]]:
        """The bundle to be begun now; under the lock."""
        if not self._line or (self._busy and (len(self._line) < self._most or self._busy >= self._at_once)):
            return []
        bundle, self._line = self._line[: self._most], self._line[self._most :]
        self._busy += 1
        return bundle

    def _lead(self, bundle: list[_Seat[T]]) -> None:
        try:
            self._do([seat.item for seat in bundle])
        finally:
            with self._lock:
                self._busy -= 1
                following = self._next()
            if following:  # its own thread does it: ours has other work
                following[0].bundle = following
                following[0].gate.release()
            for seat in bundle:
                seat.is_done = True
                seat.gate.release()
