"""Draw the screen of ``--watch``, and fit lines and tables to a terminal's width.

`ls` and `status` draw the same kinds of lines again every two seconds, and a store may answer
slowly or not at all.  `Screen` keeps what it drew last, with a warning above it; the functions
below it cut or wrap each kind of line.
"""

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
EVERY = 2.0  # seconds between two drawings
LATE = 6.0  # seconds without an answer of the store, after which the screen warns
NARROWEST = 20  # columns: a narrower terminal has no room for a name and its indent
MOST = 20  # rows of a table
LEAST = 12  # columns of a name, however narrow the terminal is
WIDEST = 40  # columns of any other cell
LONGEST = 5000  # characters of one error, which is as long as a heartbeat may be
_FILLER = "\0"  # a character that `clean` never returns

Row = tuple[Sequence[str], Sequence[str]]
"""The cells of a table's row, and the lines that stand below them."""


class Screen(logging.Handler, Generic[T]):
    """Draws ``lines`` of what ``read`` returns, for the terminal's columns, again and again.

    If the store does not answer, the last lines stay, below a warning with the reason.  It is also
    a log handler: a store that tries again logs why, and the warning shows that.
    """

    def __init__(
        self, read: Callable[[], T], lines: Callable[[T, int], Sequence[str]], url: str
    ) -> None:
        super().__init__()
        self.shown: T | None = None
        self.reason = ""
        self._read, self._lines, self._url = read, lines, url
        self._last = time.monotonic()
        self._draw: Callable[[], None] = lambda: None

    def run(self) -> int:
        """Read and draw every `EVERY` seconds until the user presses q, then return 0.

        Replaces the handlers of the root logger for good.  Raises CkptsyncError if the first
        reading fails.
        """
        from rich.live import Live

        logging.basicConfig(handlers=[self], force=True)
        with _waiting_for_q() as wait, Live(auto_refresh=False, screen=True) as live:
            self._draw = lambda: live.update(self.draw_text(), refresh=True)
            self._draw()
            while True:
                self.refresh()
                self._draw()
                if wait(EVERY):
                    return 0

    def refresh(self) -> None:
        """Read the store into ``shown``; keep an error in ``reason``.

        While nothing was ever read, the error is raised instead.
        """
        try:
            self.shown = self._read()
        except CkptsyncError as e:
            if self.shown is None:
                raise
            self.reason = f"{e}{f' ({e.hint})' if e.hint else ''}"
        else:
            self._last, self.reason = time.monotonic(), ""

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log message in the warning, at once."""
        self.reason = record.getMessage()
        self._draw()

    def draw_text(self) -> Text:
        """Return the text to draw: a warning if need be, then the last lines, or "reading ...".

        The warning comes after an error or a log message, or `LATE` seconds without an answer.
        Lines below the terminal's end are left out, and the last line says how many.
        """
        from rich.text import Text

        size, age = shutil.get_terminal_size(), time.monotonic() - self._last
        width = max(NARROWEST, size.columns)
        shown = [*wrapped(f"store {self._url}", width), "reading ..."]
        if self.shown is not None:
            shown = [*self._lines(self.shown, width)]
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
    """Return whether this process is in the background; False for another session's terminal."""
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # another session's terminal
        return False


@contextlib.contextmanager
def _waiting_for_q() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits a number of seconds, and returns True at once if q is pressed.

    Else it returns False after them.  Within the block the terminal passes each key on; its
    settings are restored.  Without a terminal, or in the background, the function only waits.
    """
    fd = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    if fd < 0 or _is_in_background(fd):

        def sleep(seconds: float) -> bool:
            """Wait, and return False: no key can be pressed."""
            time.sleep(seconds)
            return False

        yield sleep
        return
    import termios
    import tty

    def wait(seconds: float) -> bool:
        """Return True once q is pressed, False after the seconds."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            if select.select([fd], [], [], remaining)[0]:
                keys = os.read(fd, 64)
                if b"q" in keys.lower():
                    return True
                if not keys:  # the terminal was closed
                    time.sleep(remaining)
        return False

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def alarms_of(alarms: Sequence[Alarm], now: float, width: int, most: int = MOST) -> Iterator[str]:
    """Yield the lines of alarms, each with its remedy, and how many exceed ``most``."""
    for alarm in alarms[:most]:
        age = show_duration(round(max(0.0, now - (alarm.since or 0.0))))
        since = "" if alarm.since is None else f" for {age}"
        yield from wrapped(f"{alarm.severity.upper()} {alarm.code}{since}: {alarm.text}", width)
        yield from wrapped(f"  -> {alarm.todo}", width)
    yield from more(alarms, "more alarms", most)


def running_lines(
    entries: Sequence[NodeProgress], now: float, width: int, most: int = MOST
) -> Iterator[str]:
    """Yield a line for each activity of a node, and how many exceed ``most``."""
    for entry in entries[:most]:
        yield from wrapped(f"{entry.subject}: {describe(entry, now)}", width)
    yield from more(entries, "more that nodes do, or wait to do", most)


def narrowed(
    heading: Sequence[str], rows: Sequence[Row], width: int, spare: Sequence[str]
) -> tuple[list[str], list[Row]]:
    """Return heading and rows of which `table` can show each row in one line.

    Columns of ``spare`` are left out, in their order, until the table fits ``width``.  Lines below
    rows are cut, and cells of all columns but the first.
    """
    columns = list(heading)
    cells = [
        [name, *(cut(cell, max(LEAST, width // 2)) for cell in other_cells)]
        for (name, *other_cells), _ in rows
    ]

    def needed() -> int:
        """Return the least width of the remaining columns."""
        first, *other_widths = (
            max(map(output.columns, [name, *(row[heading.index(name)] for row in cells)])) + 2
            for name in columns
        )
        return min(first, LEAST + 2) + sum(other_widths) - 2

    for name in spare:
        if name in columns and needed() > width:
            columns.remove(name)
    shown = [[row[heading.index(name)] for name in columns] for row in cells]
    below = ([cut(clean(text), max(LEAST, width - 2)) for text in texts] for _, texts in rows)
    return columns, list(zip(shown, below, strict=True))


def table(heading: Sequence[str], rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the lines of a table; cut the first column to fit ``width``, others at `WIDEST`.

    At most `MOST` rows are shown; a last line says how many more there are.  A row that is still
    too wide, and each line below a row, is wrapped.
    """
    shown = [(name, *(cut(cell, WIDEST) for cell in cells)) for (name, *cells), _ in rows[:MOST]]
    shown = [tuple(heading), *shown]
    other_widths = sum(
        max(map(output.columns, column)) + 2 for column in list(zip(*shown, strict=True))[1:]
    )
    room = max(LEAST, width - other_widths)
    lines = output.aligned([(cut(name, room), *cells) for name, *cells in shown])
    # a row that is still too wide continues in the next line
    yield from wrapped(lines[0], width)
    for line, (_, below) in zip(lines[1:], rows, strict=False):
        yield from wrapped(line, width)
        for text in below:
            yield from wrapped(f"  {text}", width)
    yield from more(rows, "more")


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most ``width`` columns; long words are broken, not cut.

    It is cleaned, and cut at `LONGEST` characters; further lines are indented.
    """
    cleaned, indent = clean(text, LONGEST), "    "
    if output.columns(cleaned) <= width:
        return [cleaned]
    if not cleaned.isascii():
        # `textwrap` counts characters: add a filler after each that takes two columns, and keep a
        # column free, as a line may end between the two
        cleaned = "".join(c + _FILLER * (output.columns(c) - 1) for c in cleaned)
        width -= 1
    lines = textwrap.wrap(
        cleaned, width, subsequent_indent=indent, replace_whitespace=False, tabsize=1
    )
    return [line.replace(_FILLER, "") for line in lines]


def more(items: Sequence[object], noun: str, most: int = MOST) -> list[str]:
    """Return a line with the number of items that exceed ``most``; no line if none do."""
    return [f"and {len(items) - most} {noun}"] if len(items) > most else []


def cut(text: str, room: int) -> str:
    """Return a text cut to ``room`` columns, with an ellipsis as the last; unchanged if it fits."""
    if output.columns(text) <= room:
        return text
    while output.columns(text) >= room:
        text = text[:-1] if len(text) <= room else text[:room]
    return f"{text}…"
