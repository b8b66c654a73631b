"""``ckptsync status``: show what the nodes and heads of a store do, and what is wrong."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptsync.catalogue import kept
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Catalogue
from ckptsync.cli import locations, output
from ckptsync.cli.arguments import add_store
from ckptsync.cli.status_view import WIDE, alarm_lines, lines
from ckptsync.errors import CkptsyncError
from ckptsync.fleet.alarms import Patience
from ckptsync.fleet.overview import Overview, document
from ckptsync.service.overview import Overseer, patience
from ckptsync.stores.contract import Store
from ckptsync.units import show_duration

EVERY = 2.0  # seconds between two looks of --watch
NARROWEST = 80
ALARMED = 1
DAMAGED = 10


DETAILS = "With --json everything is printed as one document (`ckptsync help monitoring`)."


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    add_store(command)
    how = command.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="draw again every 2 seconds")
    how.add_argument(
        "--check",
        action="store_true",
        help="print a line for each alarm; exit code 1 if there is any, 10 if one is damage: for cron, Nagios and the like",
    )


def run(args: argparse.Namespace) -> int:
    """Once, or again and again until it is interrupted."""
    store = locations.asked_store(args)
    config = locations.configuration(args)
    overseer = Overseer(store, _catalogues(store), patience(config) if config else Patience())
    if args.watch and not args.json and sys.stdout.isatty():
        return show(overseer, store.url, EVERY)
    while True:
        seen = overseer.look()
        _print(store, seen, args)
        if not args.watch:
            return checked(seen) if args.check else locations.exit_code(seen.catalogue)
        time.sleep(EVERY)


def _catalogues(store: Store) -> Callable[[], Catalogue]:
    """As it is at each call; what was read is kept for the next time."""
    cache = kept.load(store.url)

    def look() -> Catalogue:
        found = read(store, cache)
        kept.save(store.url, cache)
        return found

    return look


def checked(seen: Overview) -> int:
    """What `--check` exits with: 10 for damage, 1 for any other alarm, 0 for none."""
    return DAMAGED if any(a.kind == "damage" for a in seen.alarms) else ALARMED if seen.alarms else 0


def described(store: Store, seen: Overview) -> dict[str, Any]:
    """The whole document: the overview's, and each location as `ckptsync ls` has it."""
    return {**document(seen), "locations": locations.described(store, seen.catalogue.summaries)}


def width() -> int:
    """Columns to write in: the terminal's; off a terminal a line is as long as it is, so that programs find what belongs together."""
    return max(NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDE


def _print(store: Store, seen: Overview, args: argparse.Namespace) -> None:
    if args.json:
        output.print_json(described(store, seen))
        return
    for line in alarm_lines(seen) if args.check else lines(seen, width()):
        print(output.painted(line) if sys.stdout.isatty() else line)


if TYPE_CHECKING:
    from rich.text import Text

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
    from rich.live import Live

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
    """Return what the screen shows now."""
    from rich.text import Text

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
