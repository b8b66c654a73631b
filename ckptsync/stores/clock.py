"""The store's own clock, learnt from the times that it gives to files, and compared with ours.

Machines' clocks differ, so ages of stored files are counted on the clock that dated them: a small
file is written, and its time in the listing is the store's time. How late a listing shows what
others wrote is here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import About, Store

DAY = 86400.0
# no node's id contains a ~
_CLOCK = f"{RECORDS}/clocks/~gc"


def wait_until_visible(store: Store, wait: Callable[[float], object] = time.sleep) -> None:
    """Block for `Store.late` seconds: then listings show all that others have written by now."""
    wait(store.late)


def store_now(store: Store) -> float:
    """Write a small file; return its time: seconds since 1970 on the store's clock.

    0.0 if the listing does not show the file. Raise StoreError.
    """
    store.write(_CLOCK, [b"now\n"])
    return _time_of(store, _CLOCK) or 0.0


def measure_offset(store: Store, name: str, farthest: float = DAY) -> int:
    """Write a small file; return this machine's clock minus the store's in ns.

    0 as `offset_of` says, or if the listing shows no file, or still its last time: then it is late,
    or the last measurement was within the same second. Each node has one ``name`` and writes it
    over each time, so nothing needs to be deleted. Raise StoreError.
    """
    previous = _time_of(store, name)
    before = time.time()
    store.write(name, [b"?"], About(1))
    after = time.time()
    mtime = _time_of(store, name)
    return 0 if mtime is None or mtime == previous else offset_of(before, after, mtime, farthest)


def offset_of(before: float, after: float, mtime: float, farthest: float = DAY) -> int:
    """Return this machine's clock minus the store's in ns, by the time of one file.

    It is a whole number of 10 ms. 0 if they agree within the error of measuring, or differ by more
    than ``farthest`` seconds: such a store has no clock.

    Args:
        before: our clock before the file was written, in seconds.
        after: our clock after it was written.
        mtime: its time in the store; one without a fraction was cut to the second.
        farthest: the largest difference that is believed, in seconds.

    """
    grain = 1.0 if mtime == int(mtime) else 0.0
    offset = (before + after) / 2 - (mtime + grain / 2)
    error = (after - before) / 2 + grain / 2 + 0.02  # file systems tick by 4 ms, some by 10
    return 0 if abs(offset) <= error or abs(offset) > farthest else int(offset * 100) * 10**7


def _time_of(store: Store, name: str) -> float | None:
    """Return the time of a file as its directory's listing shows it, or None if it does not."""
    return next(
        (e.mtime for e in store.names(f"{name.rpartition('/')[0]}/") if e.name == name), None
    )
