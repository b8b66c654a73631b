"""Whether this process gets anywhere: what decides if systemd's watchdog is fed.

A tick may rightly take hours (a large upload), and may hang for ever (a dead NFS server): both look alike from outside but
for the bytes that move.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptsync.daemon.tick import Tick
from ckptsync.stores import signs

LEAST_BYTES = 1 << 20
LEAST_CPU = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the process has come: ``idle`` and ``finished`` ticks, bytes read and written, seconds of CPU, signs of transfers."""

    idle: frozenset[str]
    finished: tuple[int, ...]
    moved: int
    cpu: float
    signs: int = 0


def mark(ticks: Iterable[Tick]) -> Mark:
    """Now."""
    ticks = tuple(ticks)
    return Mark(
        frozenset(t.name for t in ticks if not t.is_running),
        tuple(t.finished for t in ticks),
        _moved(),
        time.process_time(),
        signs.given(),
    )


def advanced(before: Mark, now: Mark, names: Iterable[str]) -> bool:
    """Pure: whether every tick rests or came to an end in between, or the process as a whole did real work."""
    ended = {name for name, a, b in zip(names, before.finished, now.finished, strict=True) if a != b}
    if set(names) <= ended | now.idle:
        return True
    return now.moved - before.moved >= LEAST_BYTES or now.cpu - before.cpu >= LEAST_CPU or now.signs != before.signs


def _moved() -> int:
    try:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return 0  # some containers hide it; CPU time and finished ticks remain
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
