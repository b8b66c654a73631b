"""``ckptsync keep``: keep a checkpoint whatever the retention rules say, or release it.

Some checkpoints matter for reasons that no rule knows.  A record in the store, with a reason for
people, protects such a checkpoint from retention and from ``rm``.
"""

from __future__ import annotations

import argparse

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    CHECKPOINT,
    add_targets,
    only_target,
    run_and_location,
    store_and_name,
    store_run_location,
)
from ckptsync.cli.ls import exit_code, select
from ckptsync.head.removal import keep, release


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_targets(command, CHECKPOINT, "the checkpoint, as `ckptsync ls` shows it, or its URL")
    how = command.add_mutually_exclusive_group()
    how.add_argument(
        "--list", action="store_true", help="list what is kept, in the store or in a run"
    )
    how.add_argument("--release", action="store_true", help="let the retention rules decide again")
    command.add_argument(
        "--reason", metavar="TEXT", default="", help="a note for people, shown by gc"
    )


def run(args: argparse.Namespace) -> int:
    """Keep or release the checkpoint, or list the kept ones; print what has changed.

    Return 0, for a list the exit code of unreadable records.  Raises ConfigError, also if there is
    no such checkpoint; Incomplete, with the keep written, if its removal has begun; StoreError.
    """
    if args.list:
        return _list(args)
    store, path = store_and_name(args, only_target(args, CHECKPOINT, is_needed=True))
    run_, location = run_and_location(path)
    # a record cannot hold bytes that are no text
    reason = args.reason.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if args.release:
        changed = release(store, run_, location)
        text = "released: the retention rules decide" if changed else "was not kept"
    else:
        changed = keep(store, run_, location, reason)
        text = "kept from now on" if changed else "was kept already"
    if args.json:
        is_kept = not args.release
        output.print_json({"run": run_, "location": location, "kept": is_kept, "changed": changed})
    else:
        output.say(f"{run_}/{location}: {text}")
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print what is kept; return unreadable records' code or 0; save the catalogue's cache.

    Raises ConfigError if the target is not in the store, StoreError.
    """
    store, run_, location = store_run_location(args, only_target(args))
    cache = Cache.load(store.url)
    catalogue = select(store, read_catalogue(store, cache, run_), run_, location)
    cache.save(store.url)
    kept_locations = [summary for summary in catalogue.summaries if summary.kept]
    if args.json:
        rows = [{"run": s.run, "location": s.location, "reason": s.kept} for s in kept_locations]
        output.print_json({"store": store.url, "kept": rows}, exit_code(catalogue))
    elif kept_locations:
        output.print_table(
            ("RUN", "CHECKPOINT", "STATUS", "REASON"),
            [(s.run, s.location, s.status, s.kept) for s in kept_locations],
        )
    else:
        output.say(f"{store.url}: nothing is kept by hand")
    return exit_code(catalogue)
