"""What a command prints: JSON for programs, aligned tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from ckptsync.units import clean

__all__ = ["CODES", "aligned", "clean", "painted", "print_json", "print_table"]

CODES = {
    "ARRIVING": "33",
    "COMPLETE": "36",
    "CONSOLIDATED": "34",
    "VERIFIED": "32",
    "DAMAGED": "1;31",
    "CONFLICT": "35",
    "RETIRED": "2",
    "CRITICAL": "1;31",
    "WARNING": "33",
}
"""How a terminal shows each word (ECMA-48 SGR)."""


def print_json(value: object) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value, ensure_ascii=True, default=_plain), flush=True)


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines with columns that line up; the last column is not padded."""
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in cleaned), strict=True)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip() for row in cleaned]


def print_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A heading and rows; the one word is coloured on a terminal."""
    lines = aligned([heading, *rows])
    print("\n".join(map(painted, lines) if sys.stdout.isatty() else lines))


def painted(line: str) -> str:
    """``line`` with the first word of `CODES` that stands alone in it coloured."""
    for word, code in CODES.items():
        if f" {word} " in f" {line} ":
            return line.replace(word, f"\x1b[{code}m{word}\x1b[0m", 1)
    return line
