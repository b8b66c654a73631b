"""``ckptsync join``: declare that two locations of a checkpoint are one save."""

from __future__ import annotations

import argparse

from ckptsync.cli import output
from ckptsync.cli.arguments import CHECKPOINT, add_targets, run_and_location, store_and_name
from ckptsync.errors import ConfigError
from ckptsync.worker.join import join

DETAILS = (
    "`ckptsync ls` shows which locations may be parts of one save, and what speaks against it."
    " Locations with files of the same rank are refused. Files are copied within the store, so"
    " that one directory holds the whole checkpoint. If the command is killed, run it again."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_targets(command, CHECKPOINT, "two locations, as `ckptsync ls` shows them, or their URLs")


def run(args: argparse.Namespace) -> int:
    """Join them, and say where the save lies now."""
    if len(args.targets) != 2:
        hint = "`ckptsync ls` shows which locations can be joined"
        raise ConfigError(f"expected two of {CHECKPOINT}, not {len(args.targets)}", hint=hint)
    (store, one), (_, two) = (store_and_name(args, what) for what in args.targets)
    (where, first), (other, second) = run_and_location(one), run_and_location(two)
    if where != other:
        raise ConfigError(
            f"{' and '.join(args.targets)} are of two runs",
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
