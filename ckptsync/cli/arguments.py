"""What the arguments of several commands have in common.  Imports nothing heavy: ``ckptsync --help`` answers at once."""

from __future__ import annotations

import argparse
from typing import Any

EXIT_CODES = """\
exit codes:
  0    success
  1    failure
  2    usage or configuration error
  3    incomplete: something is missing
  4    store, disk or network error
  5    unsupported layout or version
  10   corrupt: a checksum or a format does not match
  130  interrupted (143: terminated)
"""


class Parser(argparse.ArgumentParser):
    """Accepts an optional URL also after flags; argparse alone gives it up when it meets a flag before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        found, rest = super().parse_known_args(args, namespace)
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(found, "url", "") is None:
            found.url = rest.pop()
        return found, rest


def add_command(commands: Any, name: str, summary: str, details: str = "") -> argparse.ArgumentParser:
    """Add a command (or an action of one) with ``--json`` and the exit codes; ``summary`` is a phrase without a full stop."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.{' ' if details else ''}{details}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout, and errors as JSON on stderr",
    )
    return command


def add_store(command: argparse.ArgumentParser) -> None:
    """Add the store as an optional argument."""
    command.add_argument("url", metavar="URL", nargs="?", help="the store (default: the store of -c, or $CKPTSYNC_STORE)")
    add_config(command)


def add_store_option(command: argparse.ArgumentParser) -> None:
    """Add the store as an option, for commands whose arguments are checkpoints."""
    command.add_argument("--store", metavar="URL", dest="url", help="the store (default: the store of -c, or $CKPTSYNC_STORE)")
    add_config(command)


def add_config(command: argparse.ArgumentParser) -> None:
    """Add ``-c``."""
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")


def add_bandwidth(command: argparse.ArgumentParser) -> None:
    """Add ``--bandwidth``."""
    command.add_argument(
        "--bandwidth",
        metavar="RATE",
        help='limit of all transfers together: for example 50MB/s, or a timetable as in rclone, "08:00,50M 19:00,off" (default:'
        " $CKPTSYNC_LIMITS_BANDWIDTH, or off)",
    )


def add_dry_run(command: argparse.ArgumentParser, does: str) -> None:
    """Add ``--dry-run`` to a command that ``does`` something."""
    command.add_argument("--dry-run", action="store_true", help=f"only say what would be {does}")
