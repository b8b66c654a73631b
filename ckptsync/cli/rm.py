"""``ckptsync rm``: delete a checkpoint from a store, as retention does, and without its grace."""

from __future__ import annotations

import argparse

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    CHECKPOINT,
    add_dry_run,
    add_targets,
    ask,
    only_target,
    run_and_location,
    store_and_name,
)
from ckptsync.errors import ConfigError
from ckptsync.head.removal import plan_removal, remove_by_hand
from ckptsync.quantities import show_size

DETAILS = (
    "Its files and its consolidated model are deleted at once; a tombstone stays, so that no node"
    " uploads it again. What `keep` keeps, and the last verified checkpoint of a run, are refused."
)
NOTES = """\
It asks on a terminal; elsewhere it needs `--yes`. If it is killed, run it again.

Refused are also conflicts, a checkpoint that a node is uploading, and the last one that a
training can resume from.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_targets(command, CHECKPOINT, "the checkpoint, as `ckptsync ls` shows it, or its URL")
    command.add_argument("--yes", action="store_true", help="delete without asking")
    command.add_argument(
        "--reason", metavar="TEXT", default="", help="a note for people, shown by status"
    )
    add_dry_run(command, "deleted")


def run(args: argparse.Namespace) -> int:
    """Ask unless ``--yes``, delete the checkpoint, and print what was deleted; return 0.

    With ``--dry-run`` only print it.  Raises ConfigError if there is no such checkpoint, it is
    protected, or the user does not confirm; Incomplete if it was not wholly deleted; StoreError.
    """
    store, path = store_and_name(args, only_target(args, CHECKPOINT, is_needed=True))
    run_, location = run_and_location(path)
    summary = plan_removal(store, run_, location)
    name, size = f"{run_}/{location}", summary.size + summary.model_size
    row = {"run": run_, "location": location, "status": summary.status, "bytes": size}
    if args.dry_run:
        text = f"would be deleted: {name} ({summary.status}), {show_size(size)}"
        result = {**row, "removed": False, "dry_run": True}
        output.print_json(result) if args.json else output.say(text)
        return 0
    if not args.yes and not _is_confirmed(f"delete {name} ({summary.status}), {show_size(size)}"):
        raise ConfigError(f"{name}: not deleted", hint="answer yes, or give --yes")
    reason = args.reason.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    outcome = remove_by_hand(store, summary, f"deleted by hand{f': {reason}' if reason else ''}")
    if args.json:
        output.print_json({**row, "removed": True, "dry_run": False})
    else:
        output.say(f"deleted: {name}: {outcome.files} files, {show_size(outcome.size)}")
    return 0


def _is_confirmed(question: str) -> bool:
    """Return whether the user types y or yes on the terminal; wait without limit.

    Raises ConfigError if there is no terminal.
    """
    refusal = ConfigError(f"{question}: nobody can be asked here", hint="give --yes")
    return (ask(f"{question}? [yes/no] ", refusal) or "").lower() in ("y", "yes")
