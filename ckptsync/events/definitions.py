"""The events that a head's configuration defines: read and checked. Pure.

A wrong key or value would show only when the event first happens, perhaps at night. So every value
is checked as the configuration is read, and an error names the value and what was probably meant.
"""

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

    It is a ``command``, or a ``url`` that gets a POST. ``timeout``: seconds. ``environment``:
    variables of the command; None means the head's own value. ``secrets``: it gets all of the
    head's environment, and the store's options.
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
        """Return 16 hex digits that change with what is run; then what failed is tried again.

        Of variables only the names count; ``on`` and ``runs`` do not.
        """
        content = (self.command, self.url, self.timeout, sorted(self.environment), self.secrets)
        return digest(repr(content).encode())[:16]

    @property
    def uses_path(self) -> bool:
        """Return whether an argument needs a store that is a path."""
        return any("{path}" in word for word in self.command)


def fill_places(words: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return arguments in which each name of `PLACES` in braces is replaced by its value.

    Other words in braces stay.
    """
    return [_PLACE.sub(lambda m: values.get(m[1], m[0]), word) for word in words]


def read_definitions(
    value: object, command: Callable[[object], tuple[str, ...]]
) -> tuple[Definition, ...]:
    """Return the definitions in a list of mappings.

    ``command`` reads a list of arguments, or raises ValueError.  Raises ValueError if a definition
    is wrong, or two have one name.
    """
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list of events, such as - {{name: …, on: …}}")  # noqa: TRY004 - a problem of the file's
    definitions = [_read_definition(item, command) for item in value]
    names = [d.name for d in definitions]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two events are named {repeated[0]!r}")
    return tuple(definitions)


def _read_definition(item: object, command: Callable[[object], tuple[str, ...]]) -> Definition:
    """Return the definition in a mapping; raise ValueError, which names the event."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{item!r:.80} is not a mapping with name, on, and command or url")  # noqa: TRY004 - as above
    name = item.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "letters, digits, '_', '.', '-', at most 64"
        raise ValueError(f"{name!r:.80} is not the name of an event ({rule})")
    try:
        definition = Definition(**dict(_read_values(item, command)))
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    if "complete" in definition.on and any("{model}" in word for word in definition.command):
        raise ValueError(f"{name}: on: there is no {{model}} yet when a save is complete")
    return definition


def _read_values(
    item: Mapping[str, Any], command: Callable[[object], tuple[str, ...]]
) -> Iterator[tuple[str, Any]]:
    """Yield each key whose value is not None, with the checked value.  Lazy.

    Raises ValueError for a wrong value, an unknown key, without ``on``, or unless the event has
    either a command or a URL.
    """
    readers: Mapping[str, Callable[[Any], Any]] = {
        "name": str,
        "on": _read_events,
        "command": lambda value: _checked_places(command(value)),
        "url": _read_url,
        "runs": _read_glob,
        "timeout": _read_timeout,
        "environment": _read_environment,
        "secrets": _read_flag,
    }
    for key in item:
        if key not in readers:
            suggestion = did_you_mean(str(key), readers)
            raise ValueError(
                f"{key!r} is not a key of an event{f' ({suggestion})' if suggestion else ''}"
            )
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


def _read_events(value: object) -> tuple[str, ...]:
    """Return the events in a list, or one word, in the order of `EVENTS`; raise ValueError."""
    words = value if isinstance(value, list) else [value]
    if not words:
        raise ValueError(f"is empty: expected one or more of {', '.join(EVENTS)}")
    for word in words:
        if word not in EVENTS:
            suggestion = did_you_mean(str(word), EVENTS)
            more = f" ({suggestion})" if suggestion else ""
            raise ValueError(f"{word!r:.80} is not one of {', '.join(EVENTS)}{more}")
    return tuple(event for event in EVENTS if event in words)


def _checked_places(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments; raise ValueError if a word in braces is nearly one of `PLACES`.

    Other words in braces are the program's own.
    """
    for place in (match for word in words for match in _PLACE.findall(word)):
        suggestion = did_you_mean(place, PLACES)
        if place not in PLACES and suggestion:  # other words in braces are the program's own
            allowed = ", ".join(f"{{{name}}}" for name in PLACES)
            raise ValueError(f"{{{place}}} is not one of {allowed} ({suggestion})")
    return words


def _read_url(value: object) -> str:
    """Return an http or https URL; raise ValueError without it, since it may hold a token."""
    text = value if isinstance(value, str) and re.fullmatch(r"[!-~]+", value) else ""
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http:
        raise ValueError("not an address such as https://host/path")
    return text


def _read_glob(value: object) -> str:
    """Return a glob of runs' names; raise ValueError if it is empty or no text."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r:.80} is not a glob of runs' names")
    return value


def _read_timeout(value: object) -> float:
    """Return a duration in seconds; raise ValueError if it is 0 or longer than 7 days."""
    seconds = parse_duration(str(value))
    if not 0 < seconds <= LONGEST or not math.isfinite(seconds):
        raise ValueError(f"{value!r:.80} is not above 0 and at most 7d")
    return seconds


def _read_environment(value: object) -> dict[str, str | None]:
    """Return variables with their values; raise ValueError, which repeats no value."""
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping of variables to values")  # noqa: TRY004 - as above
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name) or not (text is None or isinstance(text, str)):
            raise ValueError(f"{name!r:.80} is not a variable with a text (put it in quotes)")
        if "\0" in (text or ""):
            raise ValueError(f"{name}: a NUL character is in it")
    return dict(value)


def _read_flag(value: object) -> bool:
    """Return a boolean; raise ValueError for any other value."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is not one of true, false")  # noqa: TRY004 - as above
    return value
