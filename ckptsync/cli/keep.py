"""``ckptsync keep``: keep a checkpoint whatever the retention rules say, or release it."""

from __future__ import annotations

import argparse

from ckptsync.cli import output
from ckptsync.cli.arguments import add_store_option, run_and_location, store_and_name
from ckptsync.head.removal import keep, release


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        metavar="RUN/CHECKPOINT",
        help="the checkpoint, as `ckptsync ls` shows it, or its URL",
    )
    add_store_option(command)
    command.add_argument(
        "--release", action="store_true", help="let the retention rules decide again"
    )
    command.add_argument(
        "--reason", metavar="TEXT", default="", help="a note for people, shown by gc"
    )


def run(args: argparse.Namespace) -> int:
    """Keep or release the checkpoint, and say what has changed."""
    store, what = store_and_name(args, args.what)
    where, location = run_and_location(what)
    # bytes that are no text cannot be recorded
    reason = args.reason.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if args.release:
        changed = release(store, where, location)
        done = "released: the retention rules decide" if changed else "was not kept"
    else:
        changed = keep(store, where, location, reason)
        done = "kept from now on" if changed else "was kept already"
    if args.json:
        kept = not args.release
        output.print_json({"run": where, "location": location, "kept": kept, "changed": changed})
    else:
        output.say(f"{where}/{location}: {done}")
    return 0
