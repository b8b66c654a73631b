"""How far long work is: a bar on a terminal, a line on stderr now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from ckptsync.units import clean, show_duration, show_size

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
