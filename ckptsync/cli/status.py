"""``ckptsync status``: what a store's nodes and heads are doing, and what is wrong."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from ckptsync.catalogue import kept
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Catalogue
from ckptsync.cli import locations, output
from ckptsync.cli.arguments import add_store
from ckptsync.cli.status_view import WIDE, alarm_lines, lines
from ckptsync.daemon.overseeing import Overseer, patience
from ckptsync.fleet.alarms import Patience
from ckptsync.fleet.overview import Overview, document
from ckptsync.stores.contract import Store

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
        from ckptsync.cli.status_live import show

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
