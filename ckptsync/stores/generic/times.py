"""When a file was last changed, as the back ends of fsspec say it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "modify", "timeModified", "modificationTime", "created")
_STAMP = "%Y%m%d%H%M%S"  # RFC 3659, section 2.3: what an FTP server says


def changed(info: Mapping[str, Any]) -> float:
    """Seconds on the server's clock; 0 where nothing is said."""
    for key in _KEYS:
        if (value := info.get(key)) is not None:
            return _seconds(value) / (1000 if key == "modificationTime" else 1)  # WebHDFS counts milliseconds
    return 0.0


def _seconds(value: Any) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    when = value if isinstance(value, datetime) else _parsed(str(value))
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def _parsed(text: str) -> datetime:
    try:
        if text[:14].isdecimal():
            return datetime.strptime(text[:14], _STAMP).replace(tzinfo=timezone.utc)
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return _mail(text)


def _mail(text: str) -> datetime:
    try:
        return parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return datetime.fromtimestamp(0, timezone.utc)  # as where nothing is said
