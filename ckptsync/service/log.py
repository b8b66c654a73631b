"""Logging: one line an event on stderr, ``key=value`` or JSON; what names hold cannot break a line.

A `Line` is the present state of one thing, such as a checkpoint: it is logged when its text
changes, and not while it stays the same (`changed`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptsync.quantities import clean

if TYPE_CHECKING:  # `ckptsync status` does without it
    from ckptsync.config.schema import LogConfig

_PAIR = re.compile(r'([\w.-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s="]+))(?: |$)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """What to log about one thing: ``key`` names it, ``text`` is its present state."""

    key: str
    text: str
    level: Literal["info", "warning", "error"] = "info"

    def write(self, logger: logging.Logger) -> None:
        """Write this line to a log."""
        logger.log(getattr(logging, self.level.upper()), "%s", self.text)


def changed(before: Mapping[str, str], now: Iterable[Line]) -> tuple[list[Line], dict[str, str]]:
    """Return the lines that are new or differ, and what to give as ``before`` the next time."""
    lines = {line.key: line for line in now}
    new = [line for key, line in lines.items() if before.get(key) != line.text]
    return new, {key: line.text for key, line in lines.items()}


def pairs(**values: object) -> str:
    """Return ``key=value`` pairs; empty values are left out, values with spaces are quoted."""
    there = {key: str(value) for key, value in values.items() if value not in ("", (), None)}
    return " ".join(f"{key}={_quoted(value)}" for key, value in there.items())


def fields(text: str) -> dict[str, str] | None:
    """Return the values of a text that `pairs` made; ``None`` of any other text."""
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


def shown(path: Path | str) -> str:
    """Return a path as text that JSON can hold."""
    return os.fsencode(path).decode("utf-8", "replace")


class Text(logging.Formatter):
    """``2026-01-02T03:04:05Z info worker phase=sent run=…``.

    Tracebacks follow on lines of their own.
    """

    def format(self, record: logging.LogRecord) -> str:
        level, name = record.levelname.lower(), record.name.removeprefix("ckptsync.")
        lines = [f"{_utc(record.created)} {level} {name} {clean(record.getMessage())}"]
        if record.exc_info:
            lines += map(clean, self.formatException(record.exc_info).split("\n"))
        return "\n".join(lines)


class Json(logging.Formatter):
    """Format a log record as one JSON object a line.

    It has time, level, logger, message and traceback, and each ``key=value`` pair of the message
    under its key.
    """

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # the message's own fields come last, and replace none of these four
        event = event | (fields(record.getMessage()) or {}) | event
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)


def configure(config: LogConfig) -> None:
    """Replace the root logger's handlers.

    The level is ours alone: libraries are silent below warnings, since botocore's `debug` shows
    signatures.
    """
    handler = logging.StreamHandler()
    is_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    handler.setFormatter(Json() if is_json else Text())
    level: int = getattr(logging, config.level.upper())
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger("ckptsync").setLevel(level)
    # it warns of each tick that is still running when the next is due
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    logging.captureWarnings(capture=True)
    # watchdog 7.1 warns of a directory that is renamed while it begins to watch it, as pins are; it
    # watches it all the same
    warnings.filterwarnings("ignore", "Callback with id", RuntimeWarning)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
