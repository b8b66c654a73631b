"""What was tried, and when the same may be tried again.  Pure; times are seconds on a clock that only this process reads."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.daemon.orders import Done, End, Failed

SOON, LATE = 60.0, 3600.0
"""Seconds until what passes by itself (a store, a network, a process that was killed) is tried again, doubled each time up to the second; and until
anything else is: bytes, layouts and options stay as they are, unless somebody mends them without a record of it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What became of an errand of this ``key``, ``count`` times in succession; nothing ``failed`` if it was well.  ``until``: when it may be tried again."""

    key: str
    until: float
    failed: Failed | None = None
    count: int = 0


def after(before: Wait | None, key: str, end: End, now: float, *, lasts: bool) -> Wait | None:
    """``lasts``: what was well stays well while the key is the same."""
    if isinstance(end, Done):
        if lasts:
            return Wait(key, float("inf"))
        return None if end.changed else Wait(key, now + SOON)
    count = before.count + 1 if before and before.failed and before.key == key else 1
    patience = min(LATE, SOON * 2.0 ** min(count - 1, 20)) if end.passes or end.is_ours else LATE
    return Wait(key, now + patience, end, count)


def may_begin(before: Wait | None, key: str, now: float) -> bool:
    """Whether it is due: always, if anything has changed since."""
    return before is None or before.key != key or now >= before.until
