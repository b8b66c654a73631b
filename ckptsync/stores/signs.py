"""Signs of life of transfers: what tells a slow network, or a store that is tried again, from a thread that hangs for ever.

The kernel counts no bytes of sockets for a process, and under a small bandwidth few move.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_given = 0
LEAST = 64 << 10  # bytes of an ask that is one: a heartbeat's few hundred are none, as it beats while all else hangs


def give() -> None:
    """Say that something moved, or failed and is tried again."""
    global _given  # noqa: PLW0603 - of the whole process, as its CPU time is
    with _lock:
        _given += 1


def given() -> int:
    """How many there have been."""
    return _given
