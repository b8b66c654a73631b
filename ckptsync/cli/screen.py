"""Lines that fit a terminal, and the picture of ``--watch`` that is made of them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptsync.cli import output
from ckptsync.errors import CkptsyncError
from ckptsync.quantities import clean, show_duration
from ckptsync.status.alarms import Alarm
from ckptsync.status.live_catalogue import NodeProgress, describe

if TYPE_CHECKING:
    from rich.text import Text

T = TypeVar("T")
EVERY = 2.0  # seconds between two pictures
LATE = 6.0  # seconds after which the picture says that it is old
NARROWEST = 20  # columns: of what is narrower a name and its indent leave nothing
MOST = 20  # rows that are shown
LEAST = 12  # columns of a name, however narrow the terminal is
WIDEST = 40  # columns of any other cell
LONGEST = 5000  # characters of one error: only the size of a heartbeat bounds it
_FILLER = "\0"  # in no text that `clean` returns

Row = tuple[Sequence[str], Sequence[str]]
"""The cells of a table's row, and the lines that stand below them."""


class Screen(logging.Handler, Generic[T]):
    """The picture of ``--watch``: ``lines`` of what ``read`` returns, in so many columns.

    If the store does not answer, the last picture stays, below a warning with the reason.  It is
    the log's handler, too: a store that retries says so there, between two pictures.
    """

    def __init__(
        self, read: Callable[[], T], lines: Callable[[T, int], Sequence[str]], url: str
    ) -> None:
        super().__init__()
        self.seen: T | None = None
        self.reason = ""
        self._read, self._lines, self._url = read, lines, url
        self._last = time.monotonic()
        self._draw: Callable[[], None] = lambda: None

    def run(self) -> int:
        """Draw again and again until somebody presses q, or interrupts it.

        Raises CkptsyncError if the store cannot be read at all.
        """
        from rich.live import Live

        logging.basicConfig(handlers=[self], force=True)
        with _waiting_for_q() as wait, Live(auto_refresh=False, screen=True) as live:
            self._draw = lambda: live.update(self.picture(), refresh=True)
            self._draw()
            while True:
                self.refresh()
                self._draw()
                if wait(EVERY):
                    return 0

    def refresh(self) -> None:
        """Read the store.  Raises CkptsyncError if it has never been read."""
        try:
            self.seen = self._read()
        except CkptsyncError as e:
            if self.seen is None:
                raise
            self.reason = f"{e}{f' ({e.hint})' if e.hint else ''}"
        else:
            self._last, self.reason = time.monotonic(), ""

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message of the log as the reason why the picture is old."""
        self.reason = record.getMessage()
        self._draw()

    def picture(self) -> Text:
        """Return what the screen shows now: no more lines than it has."""
        from rich.text import Text

        size, age = shutil.get_terminal_size(), time.monotonic() - self._last
        width = max(NARROWEST, size.columns)
        shown = [*wrapped(f"store {self._url}", width), "reading ..."]
        if self.seen is not None:
            shown = [*self._lines(self.seen, width)]
        if self.reason or age > LATE:
            why = f": {self.reason}" if self.reason else ""
            late = f"WARNING the store has not answered for {show_duration(round(age))}{why}"
            shown = [*wrapped(late, width), *shown]
        if (over := len(shown) - size.lines) > 0:
            text = f"({over + 1} more lines: a taller terminal, or without --watch)"
            end = wrapped(text, width)
            shown = [*shown[: max(0, size.lines - len(end))], *end]
        lines = "\n".join(map(output.paint, shown))
        return Text.from_ansi(lines, no_wrap=True, overflow="ellipsis")


def _is_in_background(fd: int) -> bool:
    """Return whether the system would stop this process if it changed its terminal."""
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # another session's terminal
        return False


@contextlib.contextmanager
def _waiting_for_q() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits that many seconds, and returns whether q was pressed."""
    fd = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    if fd < 0 or _is_in_background(fd):

        def sleep(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield sleep
        return
    import termios
    import tty

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                keys = os.read(fd, 64)
                if b"q" in keys.lower():
                    return True
                if not keys:  # the terminal has gone
                    time.sleep(left)
        return False

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def alarms_of(alarms: Sequence[Alarm], now: float, width: int, most: int = MOST) -> Iterator[str]:
    """Yield what is wrong, and what to do."""
    for alarm in alarms[:most]:
        age = show_duration(round(max(0.0, now - (alarm.since or 0.0))))
        since = "" if alarm.since is None else f" for {age}"
        yield from wrapped(f"{alarm.severity.upper()} {alarm.code}{since}: {alarm.text}", width)
        yield from wrapped(f"  -> {alarm.todo}", width)
    yield from more(alarms, "more alarms", most)


def running_lines(
    entries: Sequence[NodeProgress], now: float, width: int, most: int = MOST
) -> Iterator[str]:
    """Yield a line for each thing that nodes do, or wait to do."""
    for entry in entries[:most]:
        yield from wrapped(f"{entry.subject}: {describe(entry, now)}", width)
    yield from more(entries, "more that nodes do, or wait to do", most)


def narrowed(
    heading: Sequence[str], rows: Sequence[Row], width: int, spare: Sequence[str]
) -> tuple[list[str], list[Row]]:
    """Return a table that `table` shows with a line a row.

    Columns of ``spare`` are left out, one after the other, until the rest fits.  What stands below
    a row, and all but the first column, is cut.
    """
    left = list(heading)
    cells = [
        [name, *(cut(cell, max(LEAST, width // 2)) for cell in its)] for (name, *its), _ in rows
    ]

    def needed() -> int:
        first, *others = (
            max(map(output.columns, [name, *(row[heading.index(name)] for row in cells)])) + 2
            for name in left
        )
        return min(first, LEAST + 2) + sum(others) - 2

    for name in spare:
        if name in left and needed() > width:
            left.remove(name)
    shown = [[row[heading.index(name)] for name in left] for row in cells]
    below = ([cut(clean(text), max(LEAST, width - 2)) for text in texts] for _, texts in rows)
    return left, list(zip(shown, below, strict=True))


def table(heading: Sequence[str], rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield a table; names in the first column are cut where a row is too wide."""
    shown = [(name, *(cut(cell, WIDEST) for cell in cells)) for (name, *cells), _ in rows[:MOST]]
    shown = [tuple(heading), *shown]
    others = sum(
        max(map(output.columns, column)) + 2 for column in list(zip(*shown, strict=True))[1:]
    )
    room = max(LEAST, width - others)
    lines = output.aligned([(cut(name, room), *cells) for name, *cells in shown])
    # a row that is still too wide goes on in the next line
    yield from wrapped(lines[0], width)
    for line, (_, below) in zip(lines[1:], rows, strict=False):
        yield from wrapped(line, width)
        for text in below:
            yield from wrapped(f"  {text}", width)
    yield from more(rows, "more")


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines; long words are broken, so that a path is seen whole."""
    cleaned, indent = clean(text, LONGEST), "    "
    if output.columns(cleaned) <= width:
        return [cleaned]
    if not cleaned.isascii():
        # `textwrap` counts characters: one that takes two columns is followed by a filler, which
        # may be parted from it
        cleaned = "".join(c + _FILLER * (output.columns(c) - 1) for c in cleaned)
        width -= 1
    lines = textwrap.wrap(
        cleaned, width, subsequent_indent=indent, replace_whitespace=False, tabsize=1
    )
    return [line.replace(_FILLER, "") for line in lines]


def more(of: Sequence[object], what: str, most: int = MOST) -> list[str]:
    return [f"and {len(of) - most} {what}"] if len(of) > most else []


def cut(text: str, room: int) -> str:
    if output.columns(text) <= room:
        return text
    while output.columns(text) >= room:
        text = text[:-1] if len(text) <= room else text[:room]
    return f"{text}…"
