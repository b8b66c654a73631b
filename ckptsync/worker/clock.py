"""How far this node's clock is from the store's, since the times of one save are compared between nodes."""

from __future__ import annotations

import time

from ckptsync.records.names import clock_name
from ckptsync.stores.contract import About, Store

DAY = 86400.0


def measure(store: Store, node: str) -> int:
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
    return 0 if told is None or told == last else offset(before, after, told)


def offset(before: float, after: float, told: float) -> int:
    """From when a file was written (between two readings of our clock, seconds) and the time the store gave it.

    A time without a fraction was cut to the second.  A store that is a day off has no clock.
    """
    grain = 1.0 if told == int(told) else 0.0
    found = (before + after) / 2 - (told + grain / 2)
    error = (after - before) / 2 + grain / 2 + 0.02  # file systems tick by 4 ms, some by 10
    return 0 if abs(found) <= error or abs(found) > DAY else int(found * 100) * 10**7


def _time_of(store: Store, name: str) -> float | None:
    return next((e.mtime for e in store.names(f"{name.rpartition('/')[0]}/") if e.name == name), None)
