"""``ckptsync ls``: the runs and checkpoints of a store, each with one word."""

from __future__ import annotations

import argparse

from ckptsync.catalogue import kept
from ckptsync.catalogue.reading import read
from ckptsync.cli import output
from ckptsync.cli.arguments import add_store
from ckptsync.cli.locations import HEADING, asked_store, described, exit_code, fault_lines, rows

DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    add_store(command)


def run(args: argparse.Namespace) -> int:
    """List the store once."""
    store = asked_store(args)
    cache = kept.load(store.url)
    try:
        found = read(store, cache)
    finally:
        kept.save(store.url, cache)  # also what was read before an error: the next time goes on there
    faults = fault_lines(found)
    if args.json:
        output.print_json({"store": store.url, "locations": described(store, found.summaries), "unreadable": faults})
        return exit_code(found)
    if found.summaries:
        output.print_table(HEADING, rows(store, found.summaries))
    elif not faults:
        print(f"{output.clean(store.url)}: no checkpoints yet")
    for line in faults:
        print(output.clean(f"unreadable: {line}"))
    return exit_code(found)
