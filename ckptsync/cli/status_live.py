"""``ckptsync status --watch`` on a terminal: one connection, one screen, drawn over in place.

A thread reads, so that a store that does not answer leaves the last picture standing, with its age and the reason, and ^C is heard.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time

from rich.live import Live
from rich.text import Text

from ckptsync.cli import output
from ckptsync.cli.status_view import lines
from ckptsync.daemon.overseeing import Overseer
from ckptsync.errors import CkptsyncError
from ckptsync.fleet.overview import Overview
from ckptsync.units import show_duration

LATE = 3  # periods after which the picture is said to be old


class Reading:
    """Looks again and again; ``seen`` is the last that was well, ``read`` when on the monotonic clock, ``said`` why there is no newer one.

    ``fault``: what ends it: a store that cannot be read at all, or a bug.
    """

    def __init__(self, overseer: Overseer, every: float) -> None:
        self.seen: Overview | None = None
        self.read = time.monotonic()
        self.said = ""
        self.fault: BaseException | None = None
        self.changed = threading.Event()
        self._overseer, self._every = overseer, every

    def run(self) -> None:
        """For as long as the process lives."""
        try:
            while True:
                self._look()
                self.changed.set()
                time.sleep(self._every)
        except BaseException as e:  # noqa: BLE001 - the main thread raises it
            self.fault = e
            self.changed.set()

    def _look(self) -> None:
        try:
            self.seen = self._overseer.look()
        except CkptsyncError as e:
            if self.seen is None:
                raise
            self.said = f"{e}{f' ({e.hint})' if e.hint else ''}"
        else:
            self.read, self.said = time.monotonic(), ""


class Said(logging.Handler):
    """What is tried again would be written over the picture: the reading has it instead."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self._reading = reading

    def emit(self, record: logging.LogRecord) -> None:
        """The last one stays until something was read."""
        self._reading.said = record.getMessage()


def show(overseer: Overseer, url: str, every: float) -> int:
    """Until it is interrupted."""
    reading = Reading(overseer, every)
    logging.basicConfig(handlers=[Said(reading)], force=True)
    threading.Thread(target=reading.run, daemon=True, name="status").start()
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            reading.changed.wait(every)
            reading.changed.clear()
            if reading.fault:
                raise reading.fault
            live.update(drawn(reading, url, every), refresh=True)


def drawn(reading: Reading, url: str, every: float) -> Text:
    """What the screen shows now."""
    size = shutil.get_terminal_size()
    shown = lines(reading.seen, max(80, size.columns)) if reading.seen else [f"store {output.clean(url)}", "reading ..."]
    age = time.monotonic() - reading.read
    if age > LATE * every:
        why = f": {output.clean(reading.said)}" if reading.said else ""
        shown.insert(0, f"WARNING the store has not answered for {show_duration(round(age))}{why}")
    over = len(shown) - size.lines
    if over > 0:
        shown = [*shown[: size.lines - 1], f"({over + 1} more lines: a taller terminal, or `ckptsync status | less`)"]
    return Text.from_ansi("\n".join(map(output.painted, shown)), no_wrap=True, overflow="ellipsis")
