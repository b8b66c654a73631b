"""The store's own clock, learnt from the times that it gives to files.

And how late it shows what others wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import About, Store

DAY = 86400.0
_CLOCK = f"{RECORDS}/clocks/~gc"  # no node's id holds a ~


def wait_until_visible(store: Store, wait: Callable[[float], object] = time.sleep) -> None:
    """Wait until everything that other machines have written by now is seen here (`Store.late`)."""
    wait(store.late)


def store_now(store: Store) -> float:
    """Return seconds on the store's clock since the epoch.  Writes a small file, whose mtime tells.

    Raises StoreError.
    """
    store.write(_CLOCK, [b"now\n"])
    return _time_of(store, _CLOCK) or 0.0


def measure_offset(store: Store, name: str, farthest: float = DAY) -> int:
    """Write a small file; return this machine's clock minus the store's in ns. Raises StoreError.

    0 where that is within the error of measuring it, or cannot be told now: where a listing still
    shows the time of the last measurement, it is late (or that was within the same second). One
    ``name`` for each node, written over each time: nothing needs to be deleted.
    """
    last = _time_of(store, name)
    before = time.time()
    store.write(name, [b"?"], About(1))
    after = time.time()
    mtime = _time_of(store, name)
    return 0 if mtime is None or mtime == last else offset_of(before, after, mtime, farthest)


def offset_of(before: float, after: float, mtime: float, farthest: float = DAY) -> int:
    """Return this machine's clock minus the store's in ns, by the time of one file.

    ``before``, ``after``: our clock before and after the file was written, in seconds.
    ``mtime``: its time in the store; one without a fraction was cut to the second. A store that is
    ``farthest`` off has no clock.
    """
    grain = 1.0 if mtime == int(mtime) else 0.0
    offset = (before + after) / 2 - (mtime + grain / 2)
    error = (after - before) / 2 + grain / 2 + 0.02  # file systems tick by 4 ms, some by 10
    return 0 if abs(offset) <= error or abs(offset) > farthest else int(offset * 100) * 10**7


def _time_of(store: Store, name: str) -> float | None:
    return next(
        (e.mtime for e in store.names(f"{name.rpartition('/')[0]}/") if e.name == name), None
    )
