"""``ckptsync help`` and ``ckptsync config example``: the documents and the example configurations, which are installed with the program."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path

from ckptsync.cli import output
from ckptsync.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent


def topics() -> dict[str, Path]:
    """The pages of the documents by their names; guides, too."""
    return {path.stem: path for path in sorted((_PACKAGE / "docs").rglob("*.md"))}


def examples() -> dict[str, Path]:
    """The files of ``configs/`` by their names; those of YAML without their ending."""
    return {path.stem if path.suffix == ".yaml" else path.name: path for path in sorted((_PACKAGE / "configs").iterdir())}


def run(args: argparse.Namespace) -> int:
    """Print the page or the file that is named; without a name, list what there is."""
    kind, found = ("topic", topics()) if args.documents == "help" else ("example", examples())
    if not args.name:
        if args.json:
            output.print_json({f"{kind}s": {name: _title(path) for name, path in found.items()}})
        else:
            print("\n".join(output.aligned([name, _title(path)] for name, path in found.items())))
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
    words = "ckptsync help" if kind == "topic" else "ckptsync config example"
    meant = f"did you mean {close[0]}?  " if close else ""
    raise ConfigError(f"{name}: there is no such {kind}", hint=f"{meant}`{words}` lists them all")


def _title(path: Path) -> str:
    """The first line that says something, without the marks of its format."""
    if path.suffix == ".json":
        return ""
    lines = (line.strip("#/ \n") for line in path.read_text("utf-8").splitlines())
    return next((line for line in lines if line and not line.startswith("<!--")), "")
