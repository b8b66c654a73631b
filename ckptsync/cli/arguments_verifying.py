"""Arguments of ``verify``.  Imports nothing heavy."""

from __future__ import annotations

import argparse

LEVELS = ("stat", "digest", "parse", "load", "model")
_OF_LEVELS = (
    "stat: names and sizes; digest: every byte; parse: every header, index and metadata; load: every tensor, with torch, in a limited process;"
    " model: transformers' class takes exactly these weights, and a small model runs (default: digest for a store, parse for a directory)"
)


def add(command: argparse.ArgumentParser) -> None:
    """All of them."""
    command.add_argument("targets", metavar="PATH_OR_URL", nargs="+", help="a store, a run or a location in one, or a directory")
    command.add_argument("--level", choices=LEVELS, help=_OF_LEVELS)
    command.add_argument(
        "--sample",
        metavar="PERCENT",
        help="compare only so much of all bytes, such as 10%%, chosen by chance: what it covers is said, and no more is claimed",
    )
    command.add_argument(
        "--baseline", metavar="FILE", help="of a plain directory: compare with the digests that --record has written there"
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="of a plain directory in which nothing is wrong: write the digests of all its files to a new file",
    )
