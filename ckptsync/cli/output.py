"""What a command prints: JSON for programs, aligned tables for people, and the progress of long work."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from ckptsync.units import clean, show_duration, show_size

__all__ = ["CODES", "Progress", "aligned", "clean", "painted", "print_json", "print_table", "shown", "silent"]

CODES = {
    "ARRIVING": "33",
    "COMPLETE": "36",
    "CONSOLIDATED": "34",
    "VERIFIED": "32",
    "DAMAGED": "1;31",
    "CONFLICT": "35",
    "RETIRED": "2",
    "CRITICAL": "1;31",
    "WARNING": "33",
}
"""How a terminal shows each word (ECMA-48 SGR)."""


def print_json(value: object) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value, ensure_ascii=True, default=_plain), flush=True)


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines with columns that line up; the last column is not padded."""
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in cleaned), strict=True)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip() for row in cleaned]


def print_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A heading and rows; the one word is coloured on a terminal."""
    lines = aligned([heading, *rows])
    print("\n".join(map(painted, lines) if sys.stdout.isatty() else lines))


def painted(line: str) -> str:
    """``line`` with the first word of `CODES` that stands alone in it coloured."""
    for word, code in CODES.items():
        if f" {word} " in f" {line} ":
            return line.replace(word, f"\x1b[{code}m{word}\x1b[0m", 1)
    return line


Progress = Callable[[int, int], None]
SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def shown(what: str) -> Iterator[Progress]:
    """A function of ``(bytes done, bytes in all)``, shown until the block ends."""
    what = clean(what)
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def silent(_what: str) -> Iterator[Progress]:
    """For ``--json``: nothing but JSON is printed."""
    yield lambda _done, _total: None


class _Lines:
    """At most a line every `SECONDS_BETWEEN_LINES`, and none for work that is over sooner.  The rate is that since the line before."""

    def __init__(self, what: str) -> None:
        self._what, self._last, self._done = what, time.monotonic(), 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            rate = max(0.0, (done - self._done) / (now - self._last))
            self._last, self._done = now, done
            print(
                f"ckptsync: {self._what}: {show_size(done)} of {show_size(total)}, {_outlook(rate, total - done)}",
                file=sys.stderr,
                flush=True,
            )


def _outlook(rate: float, left: int) -> str:
    speed = f"{show_size(round(rate))}/s"
    return f"{speed}, {show_duration(round(left / rate))} left" if rate >= 1 else speed
