"""Readers of the configuration's values: each takes what YAML or the environment gave, and returns the value or raises ValueError.

The environment always gives a string.  YAML reads ``off`` as false.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ckptsync import parsing
from ckptsync.errors import Corrupt
from ckptsync.fleet.alarms import KINDS
from ckptsync.head.rules import Best
from ckptsync.paths import checked_path
from ckptsync.records.names import CONSOLIDATED, checked_node
from ckptsync.stores.limits import Schedule, parse_schedule
from ckptsync.units import LARGEST, parse_duration, parse_size

T = TypeVar("T")
Role = Literal["worker", "head", "verifier"]
ROLES: tuple[Role, ...] = ("worker", "head", "verifier")
_MOST = 10**9  # of whatever is counted: threads, jobs, checkpoints, steps
_BEST = re.compile(r"(?:(min|max):)?([\w./@-]+):([1-9][0-9]*)")
_SHARDS = re.compile(r"drop-after:([0-9]+)")
_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):([0-9]{1,5})")


def text(value: object) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")  # noqa: TRY004 - a problem of the file's, not of the program's types
    return value


def duration(value: object) -> float:
    """Seconds from zero."""
    return parse_duration(str(value))


def period(value: object) -> float:
    """A duration above zero."""
    seconds = duration(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is not a period: something above zero is wanted, such as 30s")
    return seconds


def size(value: object) -> int:
    """Bytes, at least one."""
    count = value if isinstance(value, int) and not isinstance(value, bool) else parse_size(text(value))
    if not 1 <= count <= LARGEST:
        raise ValueError(f"{value!r:.80} is not a size: at least one byte is wanted, and at most {LARGEST}")
    return count


def location(value: object) -> str:
    """An absolute path or a URL."""
    url = text(value)
    if url and "://" not in url and not url.startswith("/"):
        raise ValueError(f"{url!r} is relative: a service has no directory of its own, an absolute path or a URL is wanted")
    return url


def count(value: object) -> int:
    """A whole number from zero."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST:
        raise ValueError(f"{value!r:.80} is not a whole number from zero to {_MOST}")
    return number


def one_of(*words: str) -> Callable[[object], str]:
    """A reader of one word out of a list."""

    def read(value: object) -> str:
        if value not in words:
            raise ValueError(f"{value!r} is not one of {', '.join(words)}")
        return str(value)

    return read


def yes_or_no(value: object) -> bool:
    """``true`` or ``false``, as YAML reads them, or (from the environment) as words."""
    if isinstance(value, bool):
        return value
    return one_of("true", "false")(value.lower() if isinstance(value, str) else value) == "true"


def roles(value: object) -> tuple[str, ...]:
    """A list of roles, or (from the environment) their names with commas."""
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise ValueError(f"{value!r} is not a list of roles ({', '.join(ROLES)})")
    role = one_of(*ROLES)
    return tuple(dict.fromkeys(role(item) for item in items))


def node(value: object) -> str:
    """A node id, or nothing (it is computed then)."""
    try:
        return checked_node(text(value)) if value else ""
    except Corrupt as e:
        raise ValueError(str(e)) from e


def mapping(value: object) -> dict[str, object]:
    """A mapping with strings for keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{value!r} is not a mapping of names to values")
    return dict(value)


def storage_options(value: object) -> dict[str, object]:
    """A mapping, or (from the environment) its JSON.  No problem repeats a value: keys may be among them."""
    try:
        found = parsing.parse(value, "") if isinstance(value, str) else value
    except Corrupt as e:
        raise ValueError('not JSON: an object such as {"endpoint_url": "https://…"} is wanted') from e
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise ValueError("not a mapping of names to values")
    return dict(found)


def bandwidth(value: object) -> Schedule | None:
    """A rate, a schedule, or off."""
    if value is False:  # what YAML makes of `off`
        return None
    schedule = parse_schedule(text(value))
    return None if schedule.is_unlimited else schedule


def budget(value: object) -> int:
    """Bytes, or 0: off (YAML reads it as false)."""
    return 0 if value is False or value == "off" else size(value)


def cleaning(value: object) -> str:
    """``off`` (YAML reads it as false) or ``verified``."""
    return one_of("off", "verified")("off" if value is False else value)


def globs(value: object) -> tuple[str, ...]:
    """A list of globs of files in a checkpoint, or (from the environment) the globs with commas."""
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item and not item.startswith("/") for item in items):
        raise ValueError(f'{value!r} is not a list of globs such as ["*.safetensors", "optimizer*"]')
    return tuple(items)


def spool_full(value: object) -> str:
    """``oldest``, ``wait`` or ``every:N``."""
    word, _, number = text(value).partition(":")
    if word == "every" and number.isascii() and number.isdigit() and int(number):
        return f"every:{int(number)}"
    if value not in ("oldest", "wait"):
        raise ValueError(f"{value!r} is not one of oldest, wait, every:N (such as every:10)")
    return text(value)


def some(value: object) -> int:
    """A whole number from one."""
    number = count(value)
    if not number:
        raise ValueError(f"{value!r}: at least one is wanted")
    return number


def directories(value: object) -> dict[str, str]:
    """A mapping of run names to directories."""
    return {name: text(path) for name, path in mapping(value).items()}


def run_name(name: str) -> str:
    """``name`` itself, if it may be a directory of the store; raises ValueError."""
    try:
        checked_path(name)
    except Corrupt as e:
        raise ValueError(str(e)) from e
    if "/" in name or name.startswith((".", "_")) or name == CONSOLIDATED:
        raise ValueError(f"{name!r} is not a run's name: one directory's name that starts with neither '.' nor '_' is wanted")
    return name


def or_off(read: Callable[[object], T]) -> Callable[[object], T | int]:
    """A reader that takes ``off`` (YAML reads it as false) for 0."""
    return lambda value: 0 if value is False or value == "off" else read(value)


def best(value: object) -> Best | None:
    """``eval_loss:2``, ``max:eval_accuracy:3``; empty, or off: none."""
    if value in (False, "", "off"):
        return None
    found = _BEST.fullmatch(text(value))
    if not found:
        raise ValueError(f"{value!r} is not a metric and a number, such as eval_loss:2 or max:eval_accuracy:2")
    return Best(found[2], int(found[3]), is_greatest=found[1] == "max")


def shards(value: object) -> int | None:
    """``keep``, or ``drop-after:N``."""
    if value == "keep":
        return None
    found = _SHARDS.fullmatch(text(value))
    if not found:
        raise ValueError(f"{value!r} is not one of keep, drop-after:N (such as drop-after:3)")
    return int(found[1])


RULES: Mapping[str, Callable[[object], Any]] = {
    "keep_last": or_off(some),
    "keep_every": or_off(some),
    "keep_best": best,
    "max_age": or_off(period),
    "max_size": or_off(size),
    "shards": shards,
}
"""Of retention: what is said of all runs, and may be said of one."""


def by_run(value: object) -> dict[str, dict[str, Any]]:
    """Runs (or globs of their names), and what is said of each instead of what is said of all."""
    return {
        _glob(name): {key: _rule(name, key, item) for key, item in mapping(rules).items()} for name, rules in mapping(value).items()
    }


def _glob(name: str) -> str:
    run_name(name)
    return name


def _rule(run: str, key: str, item: object) -> Any:
    if key not in RULES:
        raise ValueError(f"{run}: {key!r} is not one of {', '.join(RULES)}")
    try:
        return RULES[key](item)
    except ValueError as e:
        raise ValueError(f"{run}: {key}: {e}") from e


def webhook(value: object) -> str:
    """An http or https URL, or nothing.  No problem repeats it: keys are among its parts."""
    if not isinstance(value, str) or (value and not value.startswith(("http://", "https://"))):
        raise ValueError("not a URL that begins with https:// or http://")
    return value


def command(value: object) -> tuple[str, ...]:
    """A list of words, or one string as a shell would split it; no shell runs it."""
    words = shlex.split(value) if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f'{value!r} is not a command such as ["/usr/local/bin/page", "--now"]')
    if words and not words[0].startswith("/"):
        raise ValueError(f"{words[0]!r} is relative: a service has no directory of its own, an absolute path is wanted")
    return tuple(words)


def alarms(value: object) -> tuple[str, ...]:
    """A list of alarms' names, or (from the environment) the names with commas."""
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError(f"{value!r} is not a list of {', '.join(KINDS)}")  # noqa: TRY004 - a problem of the file's
    known = one_of(*KINDS)
    return tuple(dict.fromkeys(known(item) for item in items))


def listen(value: object) -> str:
    """``host:port``, or nothing: off."""
    if value is False or value in ("", "off"):
        return ""
    found = _LISTEN.fullmatch(text(value))
    if not found or count(found[2]) > 65535:
        raise ValueError(f"{value!r} is not a host and a port, such as 127.0.0.1:9464 or [::]:9464")
    return found[0]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A training's output directory, or a glob of them.  ``name`` is empty where the directory's own name is the run's."""

    path: str
    name: str = ""


def runs(value: object) -> tuple[RunConfig, ...]:
    """A list of ``{path, name}``; a plain string is a path."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of runs, such as - path: /data/out")  # noqa: TRY004 - as in `text`
    return tuple(_run(item) for item in value)


def _run(item: object) -> RunConfig:
    fields = {"path": item} if isinstance(item, str) else mapping(item)
    unknown = sorted(set(fields) - {"path", "name"})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a key of a run: path and name are")
    if not fields.get("path"):
        raise ValueError(f"{item!r} has no path")
    name = text(fields.get("name") or "")
    path = text(fields["path"])
    if not path.startswith("/"):
        raise ValueError(f"path {path!r} is relative: a service has no directory of its own, an absolute path is wanted")
    return RunConfig(path, run_name(name) if name else "")
