"""Whether this process gets anywhere: what decides if systemd's watchdog is fed.

A tick may rightly take hours (a large upload), and may hang for ever (a dead NFS server): both look alike from outside but
for the bytes that move.  A look sends nothing and never rests for long, so it is judged by its own thread, and its work is nobody else's.
Lanes share connections, memory and bandwidth, and may rightly wait for each other: they are judged together, and each alone only by a silence so long
that what the others lose by a restart is little beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync.service.periodic import Periodic
from ckptsync.stores import signs

APART = frozenset({"look"})
LANE = "lane-"  # how their works' names begin
HUNG = 1800.0  # seconds without a sign of its own after which a lane hangs, whatever the others do
LEAST_BYTES = 1 << 20
LEAST_CPU = 0.5  # seconds
LEAST_OWN_BYTES = 1 << 10  # of a look: names of files, and heads of some
LEAST_OWN_CPU = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read and written, seconds of CPU."""

    moved: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the process has come: ``idle`` and ``finished`` works, ``work`` but for what stands in ``apart`` by tick, signs of transfers."""

    idle: frozenset[str]
    finished: tuple[int, ...]
    work: Work
    signs: int = 0
    apart: Mapping[str, Work] = field(default_factory=dict)


def mark(works: Iterable[Periodic]) -> Mark:
    """Now."""
    works = tuple(works)
    apart = {t.name: _of_thread(t.thread) for t in works if t.name in APART}
    rest = Work(
        _moved(Path("/proc/self/io")) - sum(w.moved for w in apart.values()),
        time.process_time() - sum(w.cpu for w in apart.values()),
    )
    return Mark(frozenset(t.name for t in works if not t.is_running), tuple(t.finished for t in works), rest, signs.given(), apart)


class Silences:
    """Since when each lane gave no sign of its own: it moved nothing, tried nothing again, did not rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}

    def hung(self, works: Iterable[Periodic]) -> tuple[str, ...]:
        """The names of those that have been silent at work for longer than `HUNG`."""
        now, lanes = self._clock(), [t for t in works if t.name.startswith(LANE)]
        for lane in lanes:
            sign = (lane.finished, signs.given_by(lane.name))
            if not lane.is_running or self._seen.get(lane.name, (None, now))[0] != sign:
                self._seen[lane.name] = sign, now
        return tuple(lane.name for lane in lanes if now - self._seen[lane.name][1] > HUNG)


def advanced(before: Mark, now: Mark, names: Iterable[str]) -> bool:
    """Pure: whether every tick rests, came to an end in between, or did real work: those apart each, the others together."""
    names = tuple(names)
    ended = {name for name, a, b in zip(names, before.finished, now.finished, strict=True) if a != b}
    at_it = {name for name in names if name not in ended | now.idle}
    if any(not _worked(before.apart[name], now.apart[name], LEAST_OWN_BYTES, LEAST_OWN_CPU) for name in at_it & APART):
        return False
    return at_it <= APART or worked(before, now)


def worked(before: Mark, now: Mark) -> bool:
    """Pure: whether a process that is one work has come on in between."""
    return now.signs != before.signs or _worked(before.work, now.work, LEAST_BYTES, LEAST_CPU)


def _worked(before: Work, now: Work, least_bytes: int, least_cpu: float) -> bool:
    return now.moved - before.moved >= least_bytes or now.cpu - before.cpu >= least_cpu


def _of_thread(number: int) -> Work:
    """Of one thread of this process; nothing of one that has ended, or has not begun."""
    try:
        fields = Path(f"/proc/self/task/{number}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return Work(0, 0.0)
    return Work(_moved(Path(f"/proc/self/task/{number}/io")), (int(fields[11]) + int(fields[12])) / _TICKS)


def _moved(path: Path) -> int:
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return 0  # some containers hide it; CPU time and finished works remain
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
