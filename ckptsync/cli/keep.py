"""``ckptsync keep``: a person's word that a checkpoint stays."""

from __future__ import annotations

import argparse

from ckptsync.cli import output
from ckptsync.cli.arguments import add_store_option
from ckptsync.cli.locations import asked_store, checked_name
from ckptsync.errors import ConfigError
from ckptsync.head.keeping import keep, release

DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument("what", metavar="RUN/CHECKPOINT", help="as `ckptsync ls` shows it")
    add_store_option(command)
    command.add_argument("--release", action="store_true", help="let the retention rules decide again")
    command.add_argument("--reason", metavar="TEXT", default="", help="a note for people, shown by gc")


def run(args: argparse.Namespace) -> int:
    """Say it, and what was so before."""
    where, location = named(args.what)
    store = asked_store(args)
    reason = args.reason.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are no text cannot be recorded
    changed = release(store, where, location) if args.release else keep(store, where, location, reason)
    if args.json:
        output.print_json({"run": where, "location": location, "kept": not args.release, "changed": changed})
        return 0
    words = {
        (False, True): "kept from now on",
        (False, False): "was kept already",
        (True, True): "released: the rules decide",
        (True, False): "was not kept",
    }
    print(output.clean(f"{where}/{location}: {words[args.release, changed]}"))
    return 0


def named(what: str) -> tuple[str, str]:
    """Run and location; raises ConfigError."""
    run_, _, location = what.strip("/").rpartition("/")
    if not run_ or not location:
        raise ConfigError(f"{what}: RUN/CHECKPOINT wanted", hint="`ckptsync ls` shows what is there")
    return checked_name(run_, "run"), checked_name(location, "checkpoint")
