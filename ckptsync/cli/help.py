"""``ckptsync help``: print a page of the documents, which are installed with the program."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path

from ckptsync.cli import output
from ckptsync.errors import ConfigError

PACKAGE = Path(__file__).parent.parent


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name",
        metavar="TOPIC",
        nargs="?",
        default="",
        help="the page to print (default: list the pages)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the page that is named; without a name, list the pages."""
    return show("topic", topics(), args)


def topics() -> dict[str, Path]:
    """Return the pages of the documents by name, guides included."""
    return {path.stem: path for path in sorted((PACKAGE / "docs").rglob("*.md"))}


def show(kind: str, found: Mapping[str, Path], args: argparse.Namespace) -> int:
    """Print the file that ``args.name`` names, or a list of all.

    Raises ConfigError if there is no such file.
    """
    if not args.name:
        titles = {name: _title(path) for name, path in found.items()}
        if args.json:
            output.print_json({f"{kind}s": titles})
        else:
            print("\n".join(output.aligned(titles.items())))
        return 0
    text = _named(kind, args.name, found).read_text("utf-8")
    if args.json:
        output.print_json({kind: args.name, "text": text})
    else:
        print(text, end="")
    return 0


def _named(kind: str, name: str, found: Mapping[str, Path]) -> Path:
    if name in found:
        return found[name]
    close = difflib.get_close_matches(name, found, 1)
    command = "ckptsync help" if kind == "topic" else "ckptsync config example"
    meant = f"did you mean {close[0]}?  " if close else ""
    raise ConfigError(f"{name}: no such {kind}", hint=f"{meant}`{command}` lists them all")


def _title(path: Path) -> str:
    """Return the first line with text, without the marks of its format."""
    if path.suffix == ".json":
        return ""
    lines = (line.strip("#/ \n") for line in path.read_text("utf-8").splitlines())
    return next((line for line in lines if line and not line.startswith("<!--")), "")
