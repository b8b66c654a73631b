"""Limits of transfers: threads, memory, time to try again, and one bandwidth for a process.

Training uses the same network, so all transfers of a process share one `RateLimiter`, which lets
small requests pass large ones. Its bandwidth follows a schedule in rclone's notation
(rclone.org/docs, ``--bwlimit``): ``50MB/s``, or ``08:00,50M 19:00,off`` every day, or
``Mon-08:00,10M Sat-00:00,off`` every week.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from ckptsync.errors import Transient
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import Chunk

LEAST_PIECE = 256 << 10
MOST_PIECE = 1 << 20
# s that a large request waits at least, if it has to wait: each time it wakes it may take a core
# from a training
GATHER = 0.05
_LITTLE = progress_signs.LEAST  # bytes: a smaller request goes before larger ones
_BURST = 0.25  # s: unused bandwidth of this time may be used later
_CLOSE = 0.001  # of a byte: sums of floats are not exact
_SHORTEST = 0.001  # s that a small request waits at least, if it has to wait
_STEP = 0.25  # s between two checks of the schedule, and of whether the process is about to end

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
DAY = 24 * 60  # minutes
_SLOT = re.compile(r"(?:([A-Za-z]+)-)?([0-9]{1,2}):([0-9]{2}),(\S+)")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?)?(B)?(/s)?", re.IGNORECASE)
# the space before a unit, as in 5 MB/s
_SPACED = re.compile(r"(?<=[0-9])\s+(?=(?:[KMGT]i?B?|B)(?:/s)?(?:\s|$))", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_is_urgent: ContextVar[bool] = ContextVar("urgent", default=False)


@contextmanager
def urgent() -> Iterator[None]:
    """Let small requests of this block go at once, in this thread.

    A heartbeat that waits in a queue reports what is no longer true. Its bytes count, so that other
    requests wait longer.
    """
    before = _is_urgent.set(True)
    try:
        yield
    finally:
        _is_urgent.reset(before)


class RateLimiter(Protocol):
    """Limits the bandwidth that all transfers of a process share.

    Code that moves bytes over a network calls `take` before.
    """

    @property
    def piece(self) -> int:
        """The most bytes to request at a time.

        They are few, so that a change of the rate takes effect soon, and small requests do not wait
        long.
        """
        ...

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go; raise Transient if the process is to end before."""
        ...


class Unlimited:
    """A `RateLimiter` without a limit."""

    piece = MOST_PIECE

    def take(self, count: int) -> None:
        """Return at once; a large request is a sign of progress."""
        _sign_if_large(count)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the transfers of a store may use.

    ``pace``: the bandwidth. ``threads``: parts sent, or ranges read ahead, at once. ``memory``:
    bytes of parts in flight. ``patience``: seconds for which a transient failure is tried again.
    ``stall``: seconds without a byte after which a transfer is broken off, and tried again.
    """

    pace: RateLimiter = field(default_factory=Unlimited)
    threads: int = 4
    memory: int = 96 << 20
    patience: float = 120.0
    stall: float = 60.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rates of a week.

    ``starts``: minutes of the week from Monday 00:00, ascending. ``rates``: bytes a second from
    each start on; None is no limit.
    """

    starts: tuple[int, ...]
    rates: tuple[float | None, ...]

    def rate(self, weekday: int, hour: int, minute: int) -> float | None:
        """Return the bytes a second at a local time (Monday is 0), None without a limit.

        Before the first start of the week the last rate holds.
        """
        return self.rates[bisect.bisect_right(self.starts, weekday * DAY + hour * 60 + minute) - 1]

    @property
    def is_unlimited(self) -> bool:
        """Whether there never is a limit."""
        return all(rate is None for rate in self.rates)


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text in rclone's notation means.

    Raise ValueError, whose text is shown to the user.
    """
    words = _SPACED.sub("", text).split()
    if not words:
        raise ValueError(
            "an empty bandwidth: expected a rate such as 50MB/s, a timetable such as '08:00,50M"
            " 19:00,off', or off"
        )
    if len(words) == 1 and "," not in words[0]:
        return Schedule((0,), (_parse_rate(words[0]),))
    rates: dict[int, float | None] = {}
    for word in words:
        starts, rate = _parse_entry(word)
        for start in starts:
            if start in rates:
                raise ValueError(f"{word!r}: this time is given twice")
            rates[start] = rate
    return Schedule(tuple(sorted(rates)), tuple(rates[start] for start in sorted(rates)))


def _parse_entry(word: str) -> tuple[list[int], float | None]:
    """Return the starts of an entry such as ``Mon-08:00,10M``, and its rate as `_parse_rate` does.

    Starts are minutes of the week: one, or one of each day where the entry names none. A day is
    its first three letters or more. Raise ValueError for any other text, day, time or rate.
    """
    matched = _SLOT.fullmatch(word)
    if not matched:
        raise ValueError(
            f"{word!r} is not a time and a rate: expected one such as 08:00,50M or Sat-00:00,off"
        )
    day, hour, minute = matched[1], int(matched[2]), int(matched[3])
    if hour > 23 or minute > 59:
        raise ValueError(f"{word!r}: there is no such time of day")
    days = [
        n
        for n, name in enumerate(DAYS)
        if day is None or (len(day) > 2 and name.startswith(day.lower()))
    ]
    if not days:
        raise ValueError(
            f"{word!r}: there is no such day, expected one of Mon Tue Wed Thu Fri Sat Sun"
        )
    return [n * DAY + hour * 60 + minute for n in days], _parse_rate(matched[4])


def _parse_rate(text: str) -> float | None:
    """Return bytes a second, None for "off"; raise ValueError without a unit, or below 1.

    ``K M G T`` are powers of 1024, as rclone's, and so are ``KiB``…; ``KB MB GB TB`` are of 1000.
    """
    if text.lower() == "off":
        return None
    matched = _RATE.fullmatch(text)
    # rclone takes a bare number for KiB, others for bytes
    if not matched or not (matched[2] or matched[3]):
        raise ValueError(
            f"{text!r} is not a bandwidth: expected a rate with its unit, such as 50MB/s or 8MiB/s,"
            " or off"
        )
    unit = (matched[2] or "").upper()
    base = 1000.0 if matched[3] and not unit.endswith("I") else 1024.0
    rate = float(matched[1]) * math.pow(base, _POWERS[unit[0]] if unit else 0)
    if rate < 1:
        raise ValueError(f"{text!r}: less than 1 byte a second; off means no limit")
    return rate


class TokenBucket:
    """A `RateLimiter` that follows a schedule.

    All bytes that were requested lie one behind the other on a line. `_reached` moves along it with
    the schedule's rate, and a request may go once `_reached` passes its last byte. A small request
    (a head, a listing) passes the large ones that wait: a small save, or a heartbeat, needs several
    of them in a row. It waits behind small ones only, twice as long as their bytes take, so that
    half of the rate is left to large ones. Later requests lie behind it, which evens this out: for
    a moment the rate can be exceeded, by at most the bytes of the large requests that wait.

    ``clock`` is monotonic, in seconds; ``wall`` is the local time that the schedule follows.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self._schedule, self._clock, self._sleep, self._wall = schedule, clock, sleep, wall
        self._lock = threading.Lock()
        self._reached, self._moved_at = 0.0, clock()  # byte of the line, and when it was computed
        # ends on the line of the last request, and of the last small one
        self._end = self._small_end = 0.0

    @property
    def piece(self) -> int:
        """The bytes of `GATHER` seconds, within bounds: each piece costs CPU of a training."""
        rate = self._rate()
        return MOST_PIECE if rate is None else int(min(MOST_PIECE, max(LEAST_PIECE, rate * GATHER)))

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go; raise Transient if the process is to end before.

        Fewer than `_LITTLE` bytes pass larger requests, and go at once in an `urgent` block. A
        larger request counts a sign of progress at each step.
        """
        is_small = count < _LITTLE
        with self._lock:
            self._advance()
            self._end += count
            end = self._end
            if is_small and _is_urgent.get():
                end = self._reached
            elif is_small:
                end = min(end, max(self._small_end, self._reached) + 2 * count)
                self._small_end = end
        while (wait := self._seconds_until(end)) > 0:
            if progress_signs.is_shutting_down():
                raise Transient(
                    "the process stopped while a transfer waited for bandwidth",
                    hint="start it again",
                )
            _sign_if_large(count)
            self._sleep(min(max(wait, _SHORTEST if is_small else GATHER), _STEP))
        _sign_if_large(count)

    def _seconds_until(self, end: float) -> float:
        """Return the seconds until byte ``end`` of the line is reached at the present rate."""
        with self._lock:
            rate = self._advance()
            missing = end - self._reached
        return 0.0 if rate is None or missing <= _CLOSE else missing / rate

    def _advance(self) -> float | None:
        """Advance `_reached` to now; return the present rate, None without a limit.

        It stops `_BURST` seconds of the rate beyond the last request. The caller holds the lock.
        """
        now, rate = self._clock(), self._rate()
        passed, self._moved_at = now - self._moved_at, now
        if rate is None:
            self._reached = max(self._reached, self._end)
        else:
            self._reached = min(self._reached + passed * rate, self._end + _BURST * rate)
        return rate

    def _rate(self) -> float | None:
        """Return the schedule's rate at this moment, in bytes a second; None without a limit."""
        wall = self._wall()
        return self._schedule.rate(wall.tm_wday, wall.tm_hour, wall.tm_min)


def _sign_if_large(count: int) -> None:
    """Count a sign of progress for a request of at least `progress_signs.LEAST` bytes.

    So a wait for a small bandwidth does not look like a thread that hangs.
    """
    if count >= progress_signs.LEAST:
        progress_signs.sign()


def limit(chunks: Iterable[Chunk], limiter: RateLimiter) -> Iterator[memoryview]:
    """Yield the chunks as views of at most ``limiter.piece`` bytes, each once it may go.

    It waits in between. Raise as `RateLimiter.take`.
    """
    for chunk in chunks:
        view = memoryview(chunk)
        flat, piece = view.cast("B") if view.nbytes else memoryview(b""), limiter.piece
        for start in range(0, len(flat), piece):
            part = flat[start : start + piece]
            limiter.take(len(part))
            yield part
