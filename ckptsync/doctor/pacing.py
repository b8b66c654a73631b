"""Whether checkpoints can be sent as fast as they are saved.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ckptsync.doctor.findings import STORAGE, Finding
from ckptsync.scan import Found
from ckptsync.stores.timetable import DAY, Timetable
from ckptsync.units import show_duration, show_size

_WEEK = 7 * DAY


def mean(bandwidth: Timetable | None) -> float | None:
    """Bytes a second over a week; ``None`` where there ever is no limit."""
    if bandwidth is None or any(rate is None for rate in bandwidth.rates):
        return None
    ends = (*bandwidth.starts[1:], bandwidth.starts[0] + _WEEK)
    spans = zip(bandwidth.starts, ends, bandwidth.rates, strict=True)
    return sum((end - start) * (rate or 0.0) for start, end, rate in spans) / _WEEK


def slow(newest: Found, before: Found, rate: float | None, nodes: tuple[str, ...], path: str) -> Iterator[Finding]:
    """What the last two saves of an output directory, and the bandwidth that is allowed, say."""
    size = sum(file.size for file in newest.files)
    apart = (_when(newest) - _when(before)) / 1e9
    if rate and apart > 0 and size / rate > apart:
        what = f"{show_size(size)} are saved every {show_duration(apart)}, and take {show_duration(size / rate)} at {show_size(int(rate))}/s"
        why = "pins pile up until the disk is full; with save_total_limit they outlive their checkpoints, and the oldest unsent ones are given up"
        hint = "raise limits.bandwidth, save less often, or send less (worker.send: no-optimizer)"
        yield Finding("warn", "too-slow", nodes, path, what, why, hint, STORAGE)


def _when(one: Found) -> int:
    return max(file.mtime for file in one.files)
