"""The events that a head's configuration defines.  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ckptsync.digest import digest
from ckptsync.near_names import did_you_mean
from ckptsync.quantities import parse_duration
from ckptsync.records.event_record import EVENTS, Event

PLACES = ("run", "checkpoint", "step", "location", "path", "model", "url")
"""What may stand in braces in an argument."""
LONGEST = 7 * 86400.0  # seconds of a timeout
_PLACE = re.compile(r"\{([a-z]+)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Definition:
    """What is run ``on`` some events of the runs whose names match the glob ``runs``.

    A ``command``, or a ``url`` that gets a POST.  ``timeout``: seconds.  ``environment``: variables
    of the command; None where it gets the head's own value.  ``secrets``: it gets all of the head's
    environment, and the store's options.
    """

    name: str
    on: tuple[Event, ...]
    command: tuple[str, ...] = ()
    url: str = field(default="", repr=False)
    runs: str = "*"
    timeout: float = 3600.0
    environment: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    secrets: bool = False

    @property
    def digest(self) -> str:
        """Return 16 hex digits that change with what is run: then what failed is tried again."""
        what = (self.command, self.url, self.timeout, sorted(self.environment), self.secrets)
        return digest(repr(what).encode())[:16]

    @property
    def uses_path(self) -> bool:
        """Return whether an argument needs a store that is a path."""
        return any("{path}" in word for word in self.command)


def filled(words: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return arguments with the values of `PLACES` in the place of their names in braces."""
    return [_PLACE.sub(lambda m: values.get(m[1], m[0]), word) for word in words]


def read_definitions(
    value: object, command: Callable[[object], tuple[str, ...]]
) -> tuple[Definition, ...]:
    """Read a list of definitions; raise ValueError.  ``command`` reads a list of arguments."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list of events, such as - {{name: …, on: …}}")  # noqa: TRY004 - a problem of the file's
    definitions = [_read(item, command) for item in value]
    names = [d.name for d in definitions]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two events are named {twice[0]!r}")
    return tuple(definitions)


def _read(item: object, command: Callable[[object], tuple[str, ...]]) -> Definition:
    if not isinstance(item, Mapping):
        raise ValueError(f"{item!r:.80} is not a mapping with name, on, and command or url")  # noqa: TRY004 - as above
    name = item.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "letters, digits, '_', '.', '-', at most 64"
        raise ValueError(f"{name!r:.80} is not the name of an event ({what})")
    try:
        definition = Definition(**dict(_values(item, command)))
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    if "complete" in definition.on and any("{model}" in word for word in definition.command):
        raise ValueError(f"{name}: on: there is no {{model}} yet when a save is complete")
    return definition


def _values(
    item: Mapping[str, Any], command: Callable[[object], tuple[str, ...]]
) -> Iterator[tuple[str, Any]]:
    readers: Mapping[str, Callable[[Any], Any]] = {
        "name": str,
        "on": _events,
        "command": lambda value: _checked_places(command(value)),
        "url": _url,
        "runs": _text,
        "timeout": _timeout,
        "environment": _environment,
        "secrets": _flag,
    }
    for key in item:
        if key not in readers:
            meant = did_you_mean(str(key), readers)
            raise ValueError(f"{key!r} is not a key of an event{f' ({meant})' if meant else ''}")
    if item.get("on") is None:
        raise ValueError(f"`on` is missing: one or more of {', '.join(EVENTS)}")
    if bool(item.get("command")) == bool(item.get("url")):
        raise ValueError("needs a command or a url, and not both")
    for key, value in item.items():
        if value is None:
            continue
        try:
            yield key, readers[key](value)
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from e


def _events(value: object) -> tuple[str, ...]:
    words = value if isinstance(value, list) else [value]
    if not words:
        raise ValueError(f"is empty: expected one or more of {', '.join(EVENTS)}")
    for word in words:
        if word not in EVENTS:
            meant = did_you_mean(str(word), EVENTS)
            raise ValueError(
                f"{word!r:.80} is not one of {', '.join(EVENTS)}{f' ({meant})' if meant else ''}"
            )
    return tuple(event for event in EVENTS if event in words)


def _checked_places(words: tuple[str, ...]) -> tuple[str, ...]:
    for place in (match for word in words for match in _PLACE.findall(word)):
        meant = did_you_mean(place, PLACES)
        if place not in PLACES and meant:  # other words in braces are the program's own
            known = ", ".join(f"{{{name}}}" for name in PLACES)
            raise ValueError(f"{{{place}}} is not one of {known} ({meant})")
    return words


def _url(value: object) -> str:
    """Read an address; no problem repeats it, since it may hold a token."""
    text = value if isinstance(value, str) and re.fullmatch(r"[!-~]+", value) else ""
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http:
        raise ValueError("not an address such as https://host/path")
    return text


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r:.80} is not a glob of runs' names")
    return value


def _timeout(value: object) -> float:
    seconds = parse_duration(str(value))
    if not 0 < seconds <= LONGEST or not math.isfinite(seconds):
        raise ValueError(f"{value!r:.80} is not between 1s and 7d")
    return seconds


def _environment(value: object) -> dict[str, str | None]:
    """Read variables; no problem repeats a value."""
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping of variables to values")  # noqa: TRY004 - as above
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name) or not (text is None or isinstance(text, str)):
            raise ValueError(f"{name!r:.80} is not a variable with a text (put it in quotes)")
        if "\0" in (text or ""):
            raise ValueError(f"{name}: a NUL character is in it")
    return dict(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is not one of true, false")  # noqa: TRY004 - as above
    return value
