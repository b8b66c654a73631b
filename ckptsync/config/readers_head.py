"""How the values of ``retention``, ``alerts`` and ``metrics`` are read: as `readers`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckptsync.config.readers import count, mapping, one_of, period, run_name, size, some, text
from ckptsync.config.values import ALARMS
from ckptsync.head.rules import Best

T = TypeVar("T")

_BEST = re.compile(r"(?:(min|max):)?([\w./@-]+):([1-9][0-9]*)")
_SHARDS = re.compile(r"drop-after:([0-9]+)")
_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):([0-9]{1,5})")


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
        raise ValueError(f"{value!r} is not a list of {', '.join(ALARMS)}")  # noqa: TRY004 - a problem of the file's
    known = one_of(*ALARMS)
    return tuple(dict.fromkeys(known(item) for item in items))


def listen(value: object) -> str:
    """``host:port``, or nothing: off."""
    if value is False or value in ("", "off"):
        return ""
    found = _LISTEN.fullmatch(text(value))
    if not found or count(found[2]) > 65535:
        raise ValueError(f"{value!r} is not a host and a port, such as 127.0.0.1:9464 or [::]:9464")
    return found[0]
