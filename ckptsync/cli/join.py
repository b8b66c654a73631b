"""``ckptsync join``: declare that two locations of a checkpoint are one save."""

from __future__ import annotations

import argparse

from ckptsync.cli import output
from ckptsync.cli.arguments import add_store_option, run_and_location, store_and_name
from ckptsync.errors import ConfigError
from ckptsync.worker.join import join

DETAILS = (
    "`ckptsync ls` shows which locations may be parts of one save, and what speaks against it."
    " Locations with files of the same rank are refused. Files are copied within the store, so"
    " that one directory holds the whole checkpoint. If the command is killed, run it again."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        command.add_argument(
            name,
            metavar="RUN/CHECKPOINT",
            help="a location, as `ckptsync ls` shows it, or its URL",
        )
    add_store_option(command)


def run(args: argparse.Namespace) -> int:
    """Join them, and say where the save lies now."""
    (store, one), (_, two) = store_and_name(args, args.first), store_and_name(args, args.second)
    (where, first), (other, second) = run_and_location(one), run_and_location(two)
    if where != other:
        raise ConfigError(
            f"{args.first} and {args.second} are of two runs",
            hint="`ckptsync ls` shows which locations can be joined",
        )
    done = join(store, where, first, second)
    if args.json:
        changed = done.is_new or bool(done.moved)
        output.print_json(
            {"run": where, "location": done.location, "moved": done.moved, "changed": changed}
        )
        return 0
    how = "joined" if done.is_new else "was one save already"
    copied = [
        f"the part of {node} was copied from {source}"
        for node, source in sorted(done.moved.items())
    ]
    output.say("; ".join([f"{where}/{done.location}: {how}", *copied]))
    return 0
