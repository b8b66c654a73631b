"""How far this node's clock is from the store's, since the times of one save are compared between nodes."""

from __future__ import annotations

import contextlib
import threading
import time

from ckptsync.errors import CkptsyncError
from ckptsync.records.names import clock_name
from ckptsync.stores.contract import About, Store

DAY = 86400.0
HOUR = 3600.0  # seconds between measurements, and how long it is said that the clock was set
JUMP = 2.0  # seconds: NTP slews less between two looks


class Clock:
    """How far this node's clock is from the store's, as far as that was measured; ``last`` in ns.

    A clock that somebody sets makes the last measurement worthless, and is said in ``notes``.
    """

    def __init__(self, store: Store, node: str) -> None:
        self._store, self._node = store, node
        self.last = 0
        self.notes: tuple[str, ...] = ()
        self._at: float | None = None
        self._lock = threading.Lock()
        self._now = 0.0
        self._skew = skew()
        self._said = 0.0

    def notice(self, now: float) -> None:
        """See whether the clock was set.  ``now`` in seconds on a clock that only grows."""
        self._now = max(now, self._now)
        before, self._skew = self._skew, skew()
        by = jumped(before, self._skew)
        if by:
            self._at, self._said = None, now
            self.notes = (f"this node's clock was set {'forward' if by > 0 else 'back'} by {abs(by):.0f} s",)
        elif self.notes and now - self._said > HOUR:
            self.notes = ()

    def offset(self, now: float) -> int:
        """Measured within the last hour; whoever asks meanwhile waits for it.  Raises StoreError."""
        now = max(now, self._now)  # whoever waited for his turn knew the time before that
        with self._lock:
            if not self._is_measured(now):
                self.last, self._at = measure(self._store, self._node), now
            return self.last

    def measure_in_time(self, now: float, *, is_idle: bool) -> None:
        """Measure while there is time for it, so that no save waits for it, but ask nothing of a store that needs nothing."""
        if not is_idle and not self._is_measured(now):
            with contextlib.suppress(CkptsyncError):  # whoever needs it measures, and says what is wrong
                self.offset(now)

    def _is_measured(self, now: float) -> bool:
        return self._at is not None and 0 <= now - self._at < HOUR


def skew() -> float:
    """What the system's clock says more than one that nobody sets; seconds."""
    return time.time() - time.monotonic()


def jumped(before: float, after: float) -> float:
    """Seconds by which the clock was set between two readings of `skew`; 0 for what NTP does by itself."""
    return after - before if abs(after - before) > JUMP else 0.0


def measure(store: Store, node: str, farthest: float = DAY) -> int:
    """Node clock minus store clock in ns, 0 where it is within the error of measuring it, or cannot be told now.  Raises StoreError.

    One name a node, written over each time: nothing needs to be deleted.  Where a listing still shows the time of the last measurement, it is
    late (or that was within the same second), and says nothing of this one.
    """
    name = clock_name(node)
    last = _time_of(store, name)
    before = time.time()
    store.write(name, [b"?"], About(1))
    after = time.time()
    told = _time_of(store, name)
    return 0 if told is None or told == last else offset(before, after, told, farthest)


def offset(before: float, after: float, told: float, farthest: float = DAY) -> int:
    """From when a file was written (between two readings of our clock, seconds) and the time the store gave it.

    A time without a fraction was cut to the second.  A store that is ``farthest`` off has no clock.
    """
    grain = 1.0 if told == int(told) else 0.0
    found = (before + after) / 2 - (told + grain / 2)
    error = (after - before) / 2 + grain / 2 + 0.02  # file systems tick by 4 ms, some by 10
    return 0 if abs(found) <= error or abs(found) > farthest else int(found * 100) * 10**7


def _time_of(store: Store, name: str) -> float | None:
    return next((e.mtime for e in store.names(f"{name.rpartition('/')[0]}/") if e.name == name), None)
