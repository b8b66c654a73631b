"""Arguments of what keeps, lets go, joins and repairs: ``gc``, ``keep``, ``join``, ``repair``.  Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
RULES = (
    ("keep-last", "N", "the newest N that are verified stay"),
    ("keep-every", "N", "steps that are a multiple of N stay"),
    ("keep-best", "METRIC:N", "the best N by a metric in trainer_state.json stay: eval_loss:2 (the least), max:eval_accuracy:2"),
    ("max-age", "TIME", "what no rule keeps goes when it is older, such as 30d"),
    ("max-size", "SIZE", "what no rule keeps goes when what is newer takes so much, such as 2TB"),
    (
        "shards",
        "WHICH",
        "keep, or drop-after:N: the trainer's own files go while the consolidated model stays, but for the newest N",
    ),
)


def add(commands: Any, command: Command, store: Callable[[argparse.ArgumentParser], None]) -> None:
    """All of them."""
    _gc(command(commands, "gc", "let go of checkpoints that no rule keeps", _OF_GC), store)
    _keep(command(commands, "keep", "keep a checkpoint by hand, whatever the rules say"))
    _join(
        command(commands, "join", "say that two locations of a checkpoint are one save, and bring their files together", _OF_JOIN)
    )
    _repair(command(commands, "repair", "say what can be done about damage, and do it", _OF_REPAIR))


_OF_GC = """What is to go is marked first, and removed by a later run when the grace is over; the last verified checkpoint of a run
never goes.  Rules are the configuration's, or those given here, which then are all there are."""
_OF_JOIN = """`ckptsync ls` shows which locations may be parts of one save, and why nothing joins them by itself.  Locations with files of one
rank are refused.  Files are copied within the store, so that one directory holds the whole checkpoint; killed, and called again, it goes on."""
_OF_REPAIR = """Consolidated files are made again from shards; shards are sent again by the nodes that still hold them.
Exit code 10: something cannot be repaired; 3: nodes were asked and have not answered yet."""


def _gc(command: argparse.ArgumentParser, store: Callable[[argparse.ArgumentParser], None]) -> None:
    store(command)
    command.add_argument("--run", metavar="RUN", default="", help="only of this run")
    for name, what, text in RULES:
        command.add_argument(f"--{name}", metavar=what, help=text)
    command.add_argument(
        "--grace", metavar="TIME", help="how long what is to go is only marked (default: the configuration's, or 1d)"
    )
    command.add_argument(
        "--litter",
        action="store_true",
        help="also remove files that no record has named for a day, and drafts that killed writers left",
    )
    command.add_argument("--dry-run", action="store_true", help="say what would be kept and what would go, and why; write nothing")


def _keep(command: argparse.ArgumentParser) -> None:
    command.add_argument("what", metavar="RUN/CHECKPOINT", help="as `ckptsync ls` shows it")
    _of_store(command)
    command.add_argument("--release", action="store_true", help="let the rules decide again")
    command.add_argument("--reason", metavar="TEXT", default="", help="for people, shown by gc")


def _join(command: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        command.add_argument(name, metavar="RUN/CHECKPOINT", help="as `ckptsync ls` shows it")
    _of_store(command)


def _repair(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what", metavar="URL | RUN[/CHECKPOINT]", nargs="*", help="the store; and what of it (default: all that is damaged)"
    )
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and what is lost; write nothing")
    command.add_argument("--wait", action="store_true", help="until nodes have answered, and what they sent is verified")


def _of_store(command: argparse.ArgumentParser) -> None:
    command.add_argument("--store", metavar="URL", dest="url", help="the store (default: the -c file's, or $CKPTSYNC_STORE)")
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")
