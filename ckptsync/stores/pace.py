"""One bandwidth for all transfers of a process, in both directions together, after a timetable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.errors import Transient
from ckptsync.stores import ending, signs
from ckptsync.stores.contract import Chunk
from ckptsync.stores.limits import LEAST_PIECE, MOST_PIECE, Pace
from ckptsync.stores.timetable import Timetable

LITTLE = signs.LEAST  # bytes of an ask that others make way for
MAKES_WAY = 8  # times, so that nobody starves
BURST = 0.25  # seconds of the rate that may have been saved up
GATHER = 0.05  # seconds that what is much waits at least, if it has to: each time it wakes it may take a core from a training
_CLOSE = 0.001  # of a byte: sums of floats are not exact
_STEP = 0.25  # seconds after which the timetable is looked at again, and whether the process is about to end


class Paces:
    """A token bucket.  Who asks waits in line, so that no thread starves; bytes go only when their time is over, so the rate is never exceeded.

    What is little (a request's head, a listing) goes before what is much: a small save, or a heartbeat, needs several of them, one after the other.
    """

    def __init__(
        self,
        timetable: Timetable,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self._timetable, self._clock, self._sleep, self._wall = timetable, clock, sleep, wall
        self._line: list[_Ticket] = []  # the first of them goes now
        self._moved = threading.Condition()
        self._saved, self._since = 0.0, clock()  # bytes that may go, as of when

    @property
    def piece(self) -> int:
        """What goes while one waits anyway: each piece costs some CPU for itself, which a training misses."""
        rate = self._rate()
        return MOST_PIECE if rate is None else int(min(MOST_PIECE, max(LEAST_PIECE, rate * GATHER)))

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go; raises Transient where the process is about to end before they may."""
        with self._turn(count):
            while (wait := self._missing(count)) > 0:
                if ending.is_near():
                    raise Transient("the transfer ended while it waited for its bandwidth", hint="start it again")
                _live(count)
                self._sleep(min(max(wait, GATHER if count >= LITTLE else 0.0), _STEP))
        _live(count)

    def _missing(self, count: int) -> float:
        """Seconds until ``count`` bytes are saved up at the present rate; 0 takes them.  Only whoever's turn it is calls this."""
        now, rate = self._clock(), self._rate()
        passed, self._since = now - self._since, now
        if rate is None:
            return 0.0
        self._saved = min(self._saved + passed * rate, max(BURST * rate, count + GATHER * rate))
        if self._saved < count - _CLOSE:
            return (count - self._saved) / rate
        self._saved -= count
        return 0.0

    def _rate(self) -> float | None:
        wall = self._wall()
        return self._timetable.rate(wall.tm_wday, wall.tm_hour, wall.tm_min)

    @contextlib.contextmanager
    def _turn(self, count: int) -> Iterator[None]:
        """First come, first served, but for what is little: a lock alone may be had again and again by who has it."""
        ticket = _Ticket(count < LITTLE)
        with self._moved:
            self._line.insert(_place(ticket, self._line), ticket)
        try:
            with self._moved:
                self._moved.wait_for(lambda: self._line[0] is ticket)
            yield
        finally:
            with self._moved:
                self._line.remove(ticket)
                self._moved.notify_all()


@dataclass(eq=False, slots=True)
class _Ticket:
    """``overtaken``: by how many that came later."""

    is_little: bool
    overtaken: int = 0


def _place(ticket: _Ticket, line: Sequence[_Ticket]) -> int:
    """Where it stands: behind all, or what is little before what is much and has not made way often; never before who goes now."""
    at = len(line)
    while ticket.is_little and at > 1 and not line[at - 1].is_little and line[at - 1].overtaken < MAKES_WAY:
        at -= 1
        line[at].overtaken += 1
    return at


def _live(count: int) -> None:
    """A sign of life, also of who waits for long: only so is a small bandwidth told from a thread that hangs."""
    if count >= signs.LEAST:
        signs.give()


def slowly(chunks: Iterable[Chunk], pace: Pace) -> Iterator[memoryview]:
    """Chunks in small pieces of single bytes, each when it may go."""
    for chunk in chunks:
        for _, piece in cut(memoryview(chunk), pace):
            yield piece


def taken(pace: Pace, count: int) -> None:
    """Wait until ``count`` bytes may come, where they cannot be had little by little."""
    piece = pace.piece
    for start in range(0, count, piece):
        pace.take(min(piece, count - start))


def cut(view: memoryview, pace: Pace) -> Iterator[tuple[int, memoryview]]:
    """Small pieces of single bytes, and where they begin, each when it may go."""
    flat, piece = view.cast("B") if view.nbytes else memoryview(b""), pace.piece
    for at in range(0, len(flat), piece):
        part = flat[at : at + piece]
        pace.take(len(part))
        yield at, part
