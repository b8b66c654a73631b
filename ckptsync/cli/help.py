"""``ckptsync help``: print a command's help, or a page of the documents.

The documents are files of the installed package, so they are those of this version, and need no
network.  `show` prints one file by name, or the list of all; `config example` uses it, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptsync.cli import output
from ckptsync.cli.commands import COMMANDS, EXIT_CODES
from ckptsync.errors import ConfigError
from ckptsync.near_names import did_you_mean

PACKAGE = Path(__file__).parent.parent


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    command.add_argument(
        "name",
        metavar="COMMAND | TOPIC",
        nargs="?",
        default="",
        help="the command, or the page, to print (default: list the pages)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the help of a command and the page of that name; without a name, list the pages.

    Return 0.  Raises ConfigError if there is no such command or page.
    """
    pages = topics()
    if args.name == "exit-codes" or args.name in COMMANDS:
        texts = [EXIT_CODES if args.name == "exit-codes" else _command_help(args.name)]
        texts += [pages[args.name].read_text("utf-8")] if args.name in pages else []
        return _print_text("topic", args, "\n".join(texts))
    return show("topic", pages, args, [*COMMANDS, "exit-codes"])


def _command_help(command: str) -> str:
    """Return the help of a command, as ``--help`` prints it."""
    from ckptsync.cli.main import parser

    return parser(command).format_help()


def topics() -> dict[str, Path]:
    """Return the pages of the documents by name, with the guides and the JSON schema."""
    pages = sorted((PACKAGE / "docs").rglob("*.md"))
    return {path.stem: path for path in [*pages, PACKAGE / "docs" / "json-schema.json"]}


def show(
    kind: str, files: Mapping[str, Path], args: argparse.Namespace, more: Iterable[str] = ()
) -> int:
    """Print the file that ``args.name`` names, or the list of all if it is empty; return 0.

    ``kind``: the word for a file in messages and JSON.  ``more``: further names to suggest.  Raises
    ConfigError if there is no such file.
    """
    if not args.name:
        titles = {name: _title(path) for name, path in files.items()}
        if args.json:
            output.print_json({f"{kind}s": titles})
        else:
            print("\n".join(output.aligned(titles.items())))
        return 0
    if args.name not in files:
        command = "ckptsync help" if kind == "topic" else "ckptsync config example"
        hint = f"{did_you_mean(args.name, [*files, *more])}  `{command}` lists them all".strip()
        raise ConfigError(f"{args.name}: no such {kind}", hint=hint)
    return _print_text(kind, args, files[args.name].read_text("utf-8"))


def _print_text(kind: str, args: argparse.Namespace, text: str) -> int:
    """Print a text, or its JSON document with ``args.name`` under ``kind``; return 0."""
    if args.json:
        output.print_json({kind: args.name, "text": text})
    else:
        print(text, end="")
    return 0


def _title(path: Path) -> str:
    """Return a file's first line with text, without its format's marks; empty for other JSON."""
    if path.name == "json-schema.json":
        return "what commands print with --json"
    if path.suffix == ".json":
        return ""
    lines = (line.strip("#/ \n") for line in path.read_text("utf-8").splitlines())
    return next((line for line in lines if line and not line.startswith("<!--")), "")
