"""Logging: one line on stderr for each event, in a form for its reader.

Code logs a short text, or `pairs`: a ``phase`` and the values that belong to it.  A formatter makes
of that a sentence on a terminal, and JSON or ``key=value`` (logfmt) elsewhere; control characters
in names cannot break a line.  A `Line` is the present state of one thing, such as a checkpoint; it
is logged only when that state changes (`changed`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptsync.colours import has_colours
from ckptsync.quantities import clean, show_duration, show_size

if TYPE_CHECKING:  # `ckptsync status` does without it
    from ckptsync.config.schema import LogConfig

SENTENCES: Mapping[str, str] = {
    "starting": "starts",
    "started": "runs",
    "stopped": "has stopped",
    "off": "not configured",
    "no-directory": "nothing to watch yet",
    "waiting": "waits",
    "sending": "upload begins",
    "sent": "stored",
    "elsewhere": "another node uploads it",
    "retired": "deleted, or will be",
    "uploading": "uploading",
    "repairing": "uploading again",
    "repaired": "repaired",
    "not-repaired": "not repaired",
    "not-final": "perhaps not the final model",
    "consolidate": "consolidating",
    "verify": "verifying",
    "retain": "applying retention",
    "found": "damage found",
    "unreadable": "cannot be read",
    "left-out": "not served",
    "missed": "removed before it was known to be whole",
    "lost": "removed before all of it was stored",
    "superseded": "not uploaded: a newer one is",
    "cleaned": "removed from this node",
    "given-up": "given up",
    "marked": "marked for deletion",
    "marked-again": "marked for deletion again",
    "withdrawn": "kept after all",
    "waits": "is not deleted yet",
    "alarm-over": "alarm is over",
    "clock-jumped": "the clock was set",
    "hung": "hangs; the process ends",
    "refused": "refused",
    "left": "a child process cannot be killed",
    "reloading": "reads its new configuration",
    "not-reloaded": "keeps its configuration",
    "abandoned": "did not end in time",
}
"""The words for each phase on a terminal; a phase that is missing here is its own words."""
_COLOURS = {"warning": "33", "error": "31", "critical": "1;31"}
_WHY = ("reason", "detail", "error", "todo")
_SIZES = ("bytes", "read", "total", "done")


class Pairs(str):
    """``key=value`` pairs as a line of text, and the ``values`` from which it was made."""

    __slots__ = ("values",)
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Line:
    """The log line of one thing: ``key`` names it, ``text`` is its present state.

    ``state`` is compared instead of the text, if the text counts time.
    """

    key: str
    text: str
    level: Literal["info", "warning", "error"] = "info"
    state: str = ""

    def write(self, logger: logging.Logger) -> None:
        """Write this line to a log."""
        logger.log(getattr(logging, self.level.upper()), "%s", self.text)


def changed(before: Mapping[str, str], now: Iterable[Line]) -> tuple[list[Line], dict[str, str]]:
    """Return the lines whose state differs from ``before``, and ``before`` for the next call.

    ``before``: states by key.  Of lines with the same key only the last one counts.
    """
    lines = {line.key: line for line in now}
    states = {key: line.state or line.text for key, line in lines.items()}
    return [line for key, line in lines.items() if before.get(key) != states[key]], states


def pairs(**values: object) -> Pairs:
    """Return ``key=value`` pairs; "", () and None are left out, values with spaces are quoted."""
    present = {
        key: value if isinstance(value, (int, float, datetime)) else str(value)
        for key, value in values.items()
        if value not in ("", (), None)
    }
    text = Pairs(_joined(present))
    text.values = present
    return text


def moment(seconds: float) -> datetime:
    """Return a time since the epoch as a value of `pairs`."""
    return datetime.fromtimestamp(round(seconds), timezone.utc)


def _joined(values: Mapping[str, object]) -> str:
    """Return ``key=value`` pairs in logfmt."""
    return " ".join(f"{key}={_quoted(str(_plain(value)))}" for key, value in values.items())


def _plain(value: object) -> object:
    """Return a value for JSON or logfmt: a time as ``2026-01-02T03:04:05Z``, others as they are."""
    return _utc(value.timestamp()) if isinstance(value, datetime) else value


def _quoted(value: str) -> str:
    """Return a value of logfmt, in quotes if it is empty or has spaces, quotes or ``=``."""
    plain = value and not any(c.isspace() or c in '"=' for c in value)
    return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shown(path: Path | str) -> str:
    """Return a path as text that JSON can hold; bytes that are not UTF-8 become "�"."""
    return os.fsencode(path).decode("utf-8", "replace")


class ForPeople(logging.Formatter):
    """``2026-01-02 03:04:05 info    sft/checkpoint-4: stored (7 files, 1.2 GB)``, in local time.

    Tracebacks follow on lines of their own.
    """

    def __init__(self, *, has_colours: bool = False) -> None:
        super().__init__()
        self._has_colours = has_colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and its traceback."""
        values, level = _values(record), record.levelname.lower()
        text = sentence(values) if values else record.getMessage()
        created = datetime.fromtimestamp(record.created, timezone.utc).astimezone()
        padded = f"{level:7}"
        if self._has_colours and level in _COLOURS:
            padded = f"\x1b[{_COLOURS[level]}m{padded}\x1b[0m"
        return "\n".join(
            [f"{created:%Y-%m-%d %H:%M:%S} {padded} {clean(text)}", *_traceback(record)]
        )


class Logfmt(logging.Formatter):
    """``time=2026-01-02T03:04:05Z level=info logger=ckptsync.worker phase=sent run=…``.

    Tracebacks follow on lines of their own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, with its traceback; time, level and logger stand first."""
        values = _values(record) or {"message": record.getMessage()}
        line = _joined({**_origin(record), **values, **_origin(record)})
        return "\n".join([clean(line), *_traceback(record)])


class Json(logging.Formatter):
    """Formats a log record as one JSON object a line.

    It has time, level, logger and message, and a traceback if there is one.  The message of `pairs`
    is the words for its phase, and each value stands under its key.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a record, on one line."""
        values = _values(record)
        message = _meaning(values) if values else record.getMessage()
        event: dict[str, object] = {**_origin(record), "message": message}
        # the values come last, and replace none of these four
        event |= {key: _plain(v) for key, v in (values or {}).items() if key not in event}
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _values(record: logging.LogRecord) -> Mapping[str, object] | None:
    """Return the values of a record that was logged with `pairs`; None for any other."""
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return first.values if isinstance(first, Pairs) else None


def _origin(record: logging.LogRecord) -> dict[str, str]:
    """Return the time, level and logger of a record."""
    level = record.levelname.lower()
    return {"time": _utc(record.created), "level": level, "logger": record.name}


def _traceback(record: logging.LogRecord) -> Iterator[str]:
    """Yield the lines of a record's exception; none without one."""
    if record.exc_info:
        yield from map(clean, logging.Formatter().formatException(record.exc_info).split("\n"))


def _meaning(values: Mapping[str, object]) -> str:
    """Return the sentence of the values' phase; the phase itself if it has none."""
    phase = str(values.get("phase", ""))
    return SENTENCES.get(phase, phase)


def sentence(values: Mapping[str, object]) -> str:
    """Return the values of `pairs` for people: subject, phase, reason, hint, then all others."""
    remaining: dict[str, Any] = {key: value for key, value in values.items() if key != "phase"}
    names = [remaining.pop(key, "") for key in ("file", "location", "checkpoint")]
    subject = "/".join([*filter(None, [remaining.pop("run", "")]), *list(filter(None, names))[:1]])
    for key in ("subject", "task", "record"):
        subject = subject or remaining.pop(key, "")
    text = f"{subject}: {_meaning(values)}" if subject else _meaning(values)
    if until := remaining.pop("until", None):
        text += f" until {until.astimezone():%H:%M:%S}"
    why = [remaining.pop(key) for key in _WHY if key in remaining]
    text = ": ".join([text, *map(str, why)])
    if hint := remaining.pop("hint", ""):
        text += f"; {hint}"
    facts = ", ".join(_fact(key, value) for key, value in remaining.items())
    return f"{text} ({facts})" if facts else text


def _fact(key: str, value: Any) -> str:
    """Return a value of `pairs` for people: a rate, size, count or time by its key, else both."""
    if key == "rate":
        return f"{show_size(value)}/s"
    if key in _SIZES:
        return show_size(value) if key == "bytes" else f"{show_size(value)} {key}"
    if key == "files":
        return f"{value} file{'' if value == 1 else 's'}"
    return f"{show_duration(value)} left" if key == "left" else f"{key} {value}"


def configure(config: LogConfig) -> None:
    """Replace the root logger's handlers by one on stderr, with the configured level and form.

    On a terminal the form is for people, unless JSON is configured.  Below warnings only ckptsync
    logs: botocore's debug lines would show signatures.  Python's warnings are logged.
    """
    handler = logging.StreamHandler()
    form: logging.Formatter = Json()
    if config.format != "json" and sys.stderr.isatty():
        form = ForPeople(has_colours=has_colours(sys.stderr))
    elif config.format == "text":
        form = Logfmt()
    handler.setFormatter(form)
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
    """Return a time since the epoch as ``2026-01-02T03:04:05Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
