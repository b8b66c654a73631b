"""``ckptsync join``: a person's word that two locations of a checkpoint are one save."""

from __future__ import annotations

import argparse

from ckptsync.cli import output
from ckptsync.cli.arguments import add_store_option
from ckptsync.cli.keep import named
from ckptsync.cli.locations import asked_store
from ckptsync.errors import ConfigError
from ckptsync.worker.join import join

DETAILS = """`ckptsync ls` shows which locations may be parts of one save, and what speaks against it. Locations with files
of the same rank are refused. Files are copied within the store, so that one directory holds the whole checkpoint. If it is killed, run it again."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    for name in ("first", "second"):
        command.add_argument(name, metavar="RUN/CHECKPOINT", help="as `ckptsync ls` shows it")
    add_store_option(command)


def run(args: argparse.Namespace) -> int:
    """Join them, and say where the save lies now."""
    (where, first), (other, second) = named(args.first), named(args.second)
    if where != other:
        raise ConfigError(f"{args.first} and {args.second} are of two runs", hint="`ckptsync ls` shows what can be joined")
    done = join(asked_store(args), where, first, second)
    if args.json:
        changed = done.is_new or bool(done.moved)
        output.print_json({"run": where, "location": done.location, "moved": done.moved, "changed": changed})
        return 0
    how = "joined" if done.is_new else "was one save already"
    moved = "".join(f"; the part of {node} was copied from {location}" for node, location in sorted(done.moved.items()))
    print(output.clean(f"{where}/{done.location}: {how}{moved}"))
    return 0
