"""Limits of transfers: threads, memory, time to try again, and one bandwidth for a process.

The bandwidth follows a schedule in rclone's notation (rclone.org/docs, ``--bwlimit``): ``50MB/s``,
or ``08:00,50M 19:00,off`` every day, or ``Mon-08:00,10M Sat-00:00,off`` every week.
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
_BURST = 0.25  # s of the rate that may be saved up
_CLOSE = 0.001  # of a byte: sums of floats are not exact
_SHORTEST = 0.001  # s that a small request waits at least, if it has to wait
_STEP = 0.25  # s between two looks at the schedule, and at whether the process is about to end

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
DAY = 24 * 60  # minutes
_SLOT = re.compile(r"(?:([A-Za-z]+)-)?([0-9]{1,2}):([0-9]{2}),(\S+)")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?)?(B)?(/s)?", re.IGNORECASE)
_SPACED = re.compile(
    r"(?<=[0-9])\s+(?=(?:[KMGT]i?B?|B)(?:/s)?(?:\s|$))", re.IGNORECASE
)  # before a unit, as in 5 MB/s
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


_is_urgent: ContextVar[bool] = ContextVar("urgent", default=False)


@contextmanager
def urgent() -> Iterator[None]:
    """Let small requests of this block go at once: a heartbeat, late by a queue, tells old things.

    Their bytes count, so that others wait longer.
    """
    before = _is_urgent.set(True)
    try:
        yield
    finally:
        _is_urgent.reset(before)


class RateLimiter(Protocol):
    """Limits the bandwidth that all transfers of a process share.

    Code that moves bytes over a network calls it first.
    """

    @property
    def piece(self) -> int:
        """Return how many bytes to ask for at a time, at most.

        They are few, so that a change of the rate takes effect soon, and small requests do not wait
        for long.
        """
        ...

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go."""
        ...


class Unlimited:
    """A `RateLimiter` without a limit."""

    piece = MOST_PIECE

    def take(self, count: int) -> None:
        """Return at once."""
        _give_sign(count)


@dataclass(frozen=True, slots=True)
class Limits:
    """``threads``: parts sent, or ranges read ahead, at once.

    ``memory``: bytes of parts in flight.

    ``patience``: seconds for which what fails transiently is tried again.  ``stall``: seconds
    without a byte after which a transfer is broken off, and tried again.
    """

    pace: RateLimiter = field(default_factory=Unlimited)
    threads: int = 4
    memory: int = 96 << 20
    patience: float = 120.0
    stall: float = 60.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """``starts``: minutes of the week from Monday 00:00, ascending.

    ``rates``: bytes a second from then on; None is no limit.
    """

    starts: tuple[int, ...]
    rates: tuple[float | None, ...]

    def rate(self, weekday: int, hour: int, minute: int) -> float | None:
        """Return the rate at a local time; Monday is 0.

        Before the first start of the week the last rate holds.
        """
        return self.rates[bisect.bisect_right(self.starts, weekday * DAY + hour * 60 + minute) - 1]

    @property
    def is_unlimited(self) -> bool:
        """Whether there never is a limit."""
        return all(rate is None for rate in self.rates)


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text means; raise ValueError."""
    words = _SPACED.sub("", text).split()
    if not words:
        raise ValueError(
            "an empty bandwidth: expected a rate such as 50MB/s, a timetable such as '08:00,50M"
            " 19:00,off', or off"
        )
    if len(words) == 1 and "," not in words[0]:
        return Schedule((0,), (_rate(words[0]),))
    rates: dict[int, float | None] = {}
    for word in words:
        starts, rate = _slot(word)
        for start in starts:
            if start in rates:
                raise ValueError(f"{word!r}: this time is given twice")
            rates[start] = rate
    return Schedule(tuple(sorted(rates)), tuple(rates[start] for start in sorted(rates)))


def _slot(word: str) -> tuple[list[int], float | None]:
    """Return the minutes of the week at which it begins, one or one of each day, and the rate."""
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
    return [n * DAY + hour * 60 + minute for n in days], _rate(matched[4])


def _rate(text: str) -> float | None:
    """Return bytes a second.

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

    All that has been asked for lies one behind the other on a line of bytes. The schedule's rate
    moves along it, and a request may go once its last byte is reached. A small request (a head, a
    listing) passes the large ones that wait: a small save, or a heartbeat, needs several of them in
    a row. It waits behind small ones only, twice as long as their bytes take, so that half of the
    rate is left to large ones. Later requests lie behind it, which makes up for its haste: for a
    moment the rate can be exceeded, by at most the bytes of the large requests that wait.
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
        self._reached, self._since = 0.0, clock()  # byte of the line, as of when
        self._end = self._small_end = 0.0  # of what was asked for last, and of the last small one

    @property
    def piece(self) -> int:
        """What goes in `GATHER` seconds: each piece costs some CPU, which a training misses."""
        rate = self._rate()
        return MOST_PIECE if rate is None else int(min(MOST_PIECE, max(LEAST_PIECE, rate * GATHER)))

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go.

        Raise Transient where the process is about to end before.
        """
        is_small = count < _LITTLE
        with self._lock:
            self._move()
            self._end += count
            end = self._end
            if is_small and _is_urgent.get():
                end = self._reached
            elif is_small:
                end = min(end, max(self._small_end, self._reached) + 2 * count)
                self._small_end = end
        while (wait := self._seconds_to(end)) > 0:
            if progress_signs.is_shutting_down():
                raise Transient(
                    "the process stopped while a transfer waited for bandwidth",
                    hint="start it again",
                )
            _give_sign(count)
            self._sleep(min(max(wait, _SHORTEST if is_small else GATHER), _STEP))
        _give_sign(count)

    def _seconds_to(self, end: float) -> float:
        """Return the seconds until this byte of the line is reached at the present rate."""
        with self._lock:
            rate = self._move()
            left = end - self._reached
        return 0.0 if rate is None or left <= _CLOSE else left / rate

    def _move(self) -> float | None:
        """Move along the line to now, at most `_BURST` beyond its end; return the present rate."""
        now, rate = self._clock(), self._rate()
        passed, self._since = now - self._since, now
        if rate is None:
            self._reached = max(self._reached, self._end)
        else:
            self._reached = min(self._reached + passed * rate, self._end + _BURST * rate)
        return rate

    def _rate(self) -> float | None:
        wall = self._wall()
        return self._schedule.rate(wall.tm_wday, wall.tm_hour, wall.tm_min)


def _give_sign(count: int) -> None:
    """Give a sign of life for a request of ``count`` bytes, unless it is a small one.

    A long wait gives signs too, so that a small bandwidth does not look like a thread that hangs.
    """
    if count >= progress_signs.LEAST:
        progress_signs.sign()


def limit(chunks: Iterable[Chunk], limiter: RateLimiter) -> Iterator[memoryview]:
    """Yield chunks in small pieces of single bytes, each when it may go."""
    for chunk in chunks:
        view = memoryview(chunk)
        flat, piece = view.cast("B") if view.nbytes else memoryview(b""), limiter.piece
        for at in range(0, len(flat), piece):
            part = flat[at : at + piece]
            limiter.take(len(part))
            yield part
