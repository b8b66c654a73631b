"""Logging: one line an event on stderr, ``key=value`` or JSON; what names hold cannot break a line."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings

from ckptsync.config.schema import LogConfig
from ckptsync.daemon.phases import fields
from ckptsync.units import clean


class Text(logging.Formatter):
    """``2026-01-02T03:04:05Z info worker phase=sent run=…``; tracebacks follow on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_utc(record.created)} {record.levelname.lower()} {_short(record.name)} {clean(record.getMessage())}"
        return "\n".join([line, *map(clean, self.formatException(record.exc_info).split("\n"))]) if record.exc_info else line


class Json(logging.Formatter):
    """One object a line: time, level, logger, message, traceback, and the message's ``key=value`` pairs each under its key."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event |= {key: value for key, value in (fields(record.getMessage()) or {}).items() if key not in event}
        return json.dumps(event | ({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}))


def configure(config: LogConfig) -> None:
    """Replace the root logger's handlers.  The level is ours alone: libraries are silent below warnings, since botocore's `debug` shows signatures."""
    handler = logging.StreamHandler()
    is_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    handler.setFormatter(Json() if is_json else Text())
    level: int = getattr(logging, config.level.upper())
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger("ckptsync").setLevel(level)
    logging.getLogger("apscheduler").setLevel(logging.ERROR)  # it warns of each tick that is still running when the next is due
    logging.captureWarnings(capture=True)
    # watchdog 7.1 warns of a directory that is renamed while it begins to watch it, as pins are; it watches it all the same
    warnings.filterwarnings("ignore", "Callback with id", RuntimeWarning)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _short(name: str) -> str:
    return name.removeprefix("ckptsync.")
