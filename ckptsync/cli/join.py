"""``ckptsync join``: declare that two locations of a checkpoint are one save.

Nodes whose records do not link their parts upload them as different saves.  Only a user can know
that they are one; `worker.join` records it and copies the files together.
"""

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
NOTES = """\
It refuses locations that contradict each other, or that are not in the store (exit code 2).
While a node is uploading there, it ends with 3. This machine reads and writes each byte once.
It cannot be undone. `ckptsync gc --orphans` deletes what the old location holds, a day later.

Parts of one save without the hook's save id get one location by themselves if their files were
written at one time; or within five minutes, if they are of other nodes and ranks, complete the
save, and no other part would complete it.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_targets(command, CHECKPOINT, "two locations, as `ckptsync ls` shows them, or their URLs")


def run(args: argparse.Namespace) -> int:
    """Join two locations, copying files within the store, and print where the save lies; return 0.

    Raises ConfigError for anything but two locations of one run, or if they cannot be one save;
    Incomplete while a node uploads there; StoreError.
    """
    if len(args.targets) != 2:
        hint = "`ckptsync ls` shows which locations can be joined"
        raise ConfigError(f"expected two of {CHECKPOINT}, not {len(args.targets)}", hint=hint)
    (store, path_a), (_, path_b) = (store_and_name(args, target) for target in args.targets)
    (run_a, location_a), (run_b, location_b) = run_and_location(path_a), run_and_location(path_b)
    if run_a != run_b:
        raise ConfigError(
            f"{' and '.join(args.targets)} are of two runs",
            hint="`ckptsync ls` shows which locations can be joined",
        )
    result = join(store, run_a, location_a, location_b)
    if args.json:
        changed = result.is_new or bool(result.moved)
        output.print_json(
            {"run": run_a, "location": result.location, "moved": result.moved, "changed": changed}
        )
        return 0
    how = "joined" if result.is_new else "was one save already"
    copied = [
        f"the part of {node} was copied from {source}"
        for node, source in sorted(result.moved.items())
    ]
    output.say("; ".join([f"{run_a}/{result.location}: {how}", *copied]))
    return 0
