"""The parser, and arguments that several commands have.

Imports nothing heavy: ``ckptsync --help`` answers at once.
"""

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
    """Accepts an optional URL also after flags.

    Argparse alone gives it up when it meets a flag before it.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments; one word that is left over is the URL where none was found."""
        found, rest = super().parse_known_args(args, namespace)
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(found, "url", "") is None:
            found.url = rest.pop()
        return found, rest


def add_command(
    commands: Any, name: str, summary: str, details: str = ""
) -> argparse.ArgumentParser:
    """Add a command (or an action of one) with ``--json`` and the exit codes.

    ``summary`` is a phrase without a full stop.
    """
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


def add_dry_run(command: argparse.ArgumentParser, does: str) -> None:
    """Add ``--dry-run`` to a command that ``does`` something."""
    command.add_argument("--dry-run", action="store_true", help=f"only say what would be {does}")
