"""One log line for each change of phase of a checkpoint, each finding, each failure; none while nothing changes.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_PAIR = re.compile(r'([\w.-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s="]+))(?: |$)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """What to log about one thing: ``key`` names it, ``text`` is its present state."""

    key: str
    text: str
    is_error: bool = False


def changed(before: Mapping[str, str], now: Iterable[Line]) -> tuple[list[Line], dict[str, str]]:
    """The lines that are new or differ, and what to give as ``before`` the next time."""
    lines = {line.key: line for line in now}
    return [line for key, line in lines.items() if before.get(key) != line.text], {key: line.text for key, line in lines.items()}


def pairs(**values: object) -> str:
    """``key=value`` pairs; empty values are left out, values with spaces are quoted."""
    return " ".join(f"{key}={_quoted(str(value))}" for key, value in values.items() if value not in ("", (), None))


def fields(text: str) -> dict[str, str] | None:
    """The values of `pairs` again; ``None`` of a text that is something else."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        pair = _PAIR.match(text, at)
        if pair is None:
            return None
        quoted, plain = pair[2], pair[3]
        found[pair[1]] = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        at = pair.end()
    return found or None


def _quoted(value: str) -> str:
    plain = value and not any(c.isspace() or c in '"=' for c in value)
    return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
