"""The command line's arguments.  Imports nothing heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
from typing import Any

from ckptsync import __version__
from ckptsync.cli import arguments_doctor, arguments_keeping, arguments_merging, arguments_service, arguments_verifying

EXIT_CODES = """\
exit codes:
  0    all is well
  1    failure
  2    usage or configuration
  3    incomplete: something is missing
  4    store, storage or network
  5    unsupported layout or version
  10   corrupt: something is wrong
  130  interrupted (143: terminated)
"""
PRESETS = ("all", "no-optimizer", "weights")


class _Parser(argparse.ArgumentParser):
    """Takes a URL that may be left out also where flags stand before it: argparse gives it up as soon as it meets a flag after the word before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        found, rest = super().parse_known_args(args, namespace)
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(found, "url", "") is None:
            found.url = rest.pop()
        return found, rest


def parser() -> argparse.ArgumentParser:
    """The whole command line; each command's arguments name the module that runs it (``command``)."""
    top = argparse.ArgumentParser(
        prog="ckptsync",
        description="Every finished checkpoint, whole and proven, in one place.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ckptsync {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in (_demo, _run, _push, _merge, _verify, _inspect, _ls, _status, _pull):
        add(commands)
    arguments_keeping.add(commands, _command, _store)
    arguments_service.add(commands, _command)
    arguments_doctor.add(commands, _command)
    return top


def _command(commands: Any, name: str, summary: str, description: str = "") -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.{' ' if description else ''}{description}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="the result as JSON on stdout, errors as JSON on stderr")
    command.set_defaults(command=f"ckptsync.cli.{name}")
    return command


def _store(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", nargs="?", help="the store (default: the -c file's, or $CKPTSYNC_STORE)")
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")


def _bandwidth(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--bandwidth",
        metavar="RATE",
        help='of all transfers together: such as 50MB/s, or a timetable as rclone has it, "08:00,50M 19:00,off" (default:'
        " $CKPTSYNC_LIMITS_BANDWIDTH, or off)",
    )


def _demo(commands: Any) -> None:
    command = _command(
        commands, "demo", "the whole story on this machine, in a minute", "Two nodes, a head, a flipped bit, its repair."
    )
    command.add_argument("--dir", metavar="DIR", help="where to work; must be empty or absent (default: a new temporary directory)")


def _run(commands: Any) -> None:
    command = _command(commands, "run", "the daemon: its configuration names its roles (worker, head, verifier)")
    command.add_argument(
        "-c", "--config", metavar="CONFIG", required=True, help="configuration file; `ckptsync config example` prints complete ones"
    )
    command.add_argument("--until-gone", metavar="PID", type=int, help="end once that process has ended and what it left is stored")


def _push(commands: Any) -> None:
    command = _command(commands, "push", "send one checkpoint (or every one below a directory) to a store, now")
    command.add_argument("directory", metavar="DIR", help="a checkpoint, or an output directory of checkpoints")
    command.add_argument(
        "url", metavar="STORE_URL", nargs="?", help="the store, a path or a URL (default: the -c file's, or $CKPTSYNC_STORE)"
    )
    command.add_argument(
        "--as", dest="name", metavar="NAME", default="", help="send all of DIR as one checkpoint of this name (default: its own)"
    )
    command.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help="a worker's configuration: its store, limits, node, names of runs, and what it sends",
    )
    command.add_argument(
        "--send",
        choices=PRESETS,
        help="all; no-optimizer: without its states; weights: the model alone (default: the -c file's, or all)",
    )
    command.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        help="of that only files that match this, or another --include, by path or name",
    )
    command.add_argument("--exclude", metavar="GLOB", action="append", help="of that no file that matches this")
    command.add_argument("--run", metavar="NAME", help="the run's name in the store (default: the output directory's name)")
    command.add_argument("--node", metavar="ID", help="the node's id in the store (default: computed)")
    _bandwidth(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be sent, send nothing")


def _merge(commands: Any) -> None:
    command = _command(
        commands,
        "merge",
        "consolidate a sharded checkpoint, with no service running",
        "Several SRC\noverlay: shards of one checkpoint that were left on several nodes.",
    )
    arguments_merging.add(command)
    _bandwidth(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")


def _verify(commands: Any) -> None:
    command = _command(commands, "verify", "prove what a store, or a checkpoint in a plain directory, holds")
    arguments_verifying.add(command)
    _bandwidth(command)


def _inspect(commands: Any) -> None:
    command = _command(commands, "inspect", "which layouts a checkpoint has, whether it is complete, its tensors")
    command.add_argument("targets", metavar="PATH_OR_URL", nargs="+", help="a checkpoint, or a location in a store")
    command.add_argument("--tensors", action="store_true", help="every tensor, not the first few")


def _ls(commands: Any) -> None:
    _store(_command(commands, "ls", "the runs and checkpoints of a store, each with one word"))


def _pull(commands: Any) -> None:
    command = _command(
        commands,
        "pull",
        "bring a checkpoint back, so that a training resumes from it",
        "Every byte is proven as it is read; what is damaged is not given (exit code 10), and what came stays for the next try.",
    )
    command.add_argument(
        "what",
        metavar="RUN[/CHECKPOINT]",
        help="a run, which means RUN/latest, its newest VERIFIED checkpoint; or one by name; or its URL or path in a store",
    )
    command.add_argument(
        "destination",
        metavar="DST",
        help="an output directory: the checkpoint appears in it, whole or not at all; with --consolidated, the model's own directory",
    )
    command.add_argument("--store", metavar="URL", dest="url", help="the store (default: the -c file's, or $CKPTSYNC_STORE)")
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")
    part = command.add_mutually_exclusive_group()
    part.add_argument("--node", metavar="ID", help="only what that node needs to resume: its own files, and those of no rank")
    part.add_argument("--consolidated", action="store_true", help="the consolidated model instead")
    command.add_argument(
        "--unverified", action="store_true", help="also what is not VERIFIED yet, retired, or not all there; damage is never given"
    )
    _bandwidth(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be brought, bring nothing")


def _status(commands: Any) -> None:
    command = _command(
        commands,
        "status",
        "what a store's nodes and heads are doing, and what is wrong",
        "With --json all of it as one document (`ckptsync help monitoring`).",
    )
    _store(command)
    how = command.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="draw again every 2 seconds")
    how.add_argument(
        "--check", action="store_true", help="a line for each alarm; exit code 1 if there is any, 10 if one is damage: for cron, Nagios and the like"
    )  # fmt: skip
