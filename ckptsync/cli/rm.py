"""``ckptsync rm``: delete a checkpoint from a store, as retention does, and without its grace."""

from __future__ import annotations

import argparse
import sys

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    CHECKPOINT,
    add_dry_run,
    add_targets,
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


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_targets(command, CHECKPOINT, "the checkpoint, as `ckptsync ls` shows it, or its URL")
    command.add_argument("--yes", action="store_true", help="delete without asking")
    command.add_argument(
        "--reason", metavar="TEXT", default="", help="a note for people, shown by status"
    )
    add_dry_run(command, "deleted")


def run(args: argparse.Namespace) -> int:
    """Ask, delete, and say what was deleted.  Raises ConfigError where it is protected."""
    store, what = store_and_name(args, only_target(args, CHECKPOINT, is_needed=True))
    wanted, location = run_and_location(what)
    summary = plan_removal(store, wanted, location)
    name, size = f"{wanted}/{location}", summary.size + summary.model_size
    row = {"run": wanted, "location": location, "status": summary.status, "bytes": size}
    if args.dry_run:
        text = f"would be deleted: {name} ({summary.status}), {show_size(size)}"
        output.print_json({**row, "removed": False, "dry_run": True}) if args.json else output.say(
            text
        )
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
    """Ask on the terminal.  Raises ConfigError where nobody can answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{question}: nobody can be asked here", hint="give --yes")
    print(f"{question}? [yes/no] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
