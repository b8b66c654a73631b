"""Readers of the configuration's values: each returns a value, or raises ValueError.

The environment always gives a string.  YAML reads ``off`` as false.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ckptsync import plain_json
from ckptsync.errors import Corrupt
from ckptsync.events.definitions import Definition, read_definitions
from ckptsync.head.retention_rules import Best
from ckptsync.quantities import LARGEST, parse_duration, parse_size
from ckptsync.records.store_paths import checked_node
from ckptsync.safe_names import checked_run_name
from ckptsync.status.alarms import KINDS
from ckptsync.stores.limits import Schedule, parse_schedule

T = TypeVar("T")
Role = Literal["worker", "head", "verifier"]
ROLES: tuple[Role, ...] = ("worker", "head", "verifier")
_MOST = 10**9  # of whatever is counted: threads, jobs, checkpoints, steps
_BEST = re.compile(r"(?:(min|max):)?([\w./@-]+):([1-9][0-9]*)")
_SHARDS = re.compile(r"drop-after:([0-9]+)")
UNIX = "unix:"
_LOCAL = re.compile(r"localhost|\[::1\]|127(\.[0-9]{1,3}){3}")
_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):([0-9]{1,5})")
_APPRISE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://\S+\Z")
APPRISE_FORM = "Apprise writes http://host/path as json://host/path, https:// as jsons://"
_RELATIVE = "is relative: a service has no directory of its own, give an absolute path"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A training's output directory, or a glob of them.

    ``name`` is empty where the directory's own name is the run's.
    """

    path: str
    name: str = ""


def text(value: object) -> str:
    """Read any string."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")  # noqa: TRY004 - a problem of the file's, not of the program's types
    return value


def duration(value: object) -> float:
    """Read seconds from zero."""
    return parse_duration(str(value))


def period(value: object) -> float:
    """Read a duration above zero."""
    seconds = duration(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is not a period: expected more than zero, such as 30s")
    return seconds


def size(value: object) -> int:
    """Read bytes, at least one."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    count = int(value) if is_number else parse_size(text(value))  # type: ignore[call-overload]
    if not 1 <= count <= LARGEST:
        raise ValueError(f"{value!r:.80} is not a size: expected 1 byte to {LARGEST}")
    return int(count)


def location(value: object) -> str:
    """Read an absolute path or a URL."""
    url = text(value)
    if url and "://" not in url and not url.startswith("/"):
        raise ValueError(f"{url!r} {_RELATIVE} or a URL")
    return url


def count(value: object) -> int:
    """Read a whole number from zero."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST:
        raise ValueError(f"{value!r:.80} is not a whole number from zero to {_MOST}")
    return number


def some(value: object) -> int:
    """Read a whole number from one."""
    number = count(value)
    if not number:
        raise ValueError(f"{value!r} is too small: expected at least one")
    return number


def factor(value: object) -> float:
    """Read a number above one, at most a million."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int | float) or isinstance(number, bool) or not 1 < number <= 1e6:
        raise ValueError(f"{value!r:.80} is not a factor: expected a number above 1, such as 2")
    return float(number)


def one_of(*words: str) -> Callable[[object], str]:
    """Return a reader of one word out of a list.

    YAML's false is ``off`` where that is one of them.
    """

    def read(value: object) -> str:
        word = "off" if value is False and "off" in words else value
        if word not in words:
            raise ValueError(f"{value!r} is not one of {', '.join(words)}")
        return str(word)

    return read


def yes_or_no(value: object) -> bool:
    """Read ``true`` or ``false``, as YAML reads them, or as words of the environment."""
    if isinstance(value, bool):
        return value
    return one_of("true", "false")(value.lower() if isinstance(value, str) else value) == "true"


def or_off(read: Callable[[object], T]) -> Callable[[object], T | int]:
    """Return a reader that reads ``off`` as 0."""
    return lambda value: 0 if value is False or value == "off" else read(value)


def _listed(value: object, what: str) -> list[Any]:
    """Read a list, or (from the environment) its items with commas."""
    items = value
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(items, list):
        raise ValueError(f"{value!r} is not a list of {what}")  # noqa: TRY004 - as in `text`
    return items


def roles(value: object) -> tuple[str, ...]:
    """Read a list of roles."""
    items = _listed(value, f"roles ({', '.join(ROLES)})")
    if not items:
        raise ValueError(f"no role is given: expected one or more of {', '.join(ROLES)}")
    return tuple(dict.fromkeys(map(one_of(*ROLES), items)))


def alarms(value: object) -> tuple[str, ...]:
    """Read a list of kinds of alarms."""
    return tuple(dict.fromkeys(map(one_of(*KINDS), _listed(value, ", ".join(KINDS)))))


def globs(value: object) -> tuple[str, ...]:
    """Read a list of globs of files in a checkpoint."""
    what = 'globs such as ["*.safetensors", "optimizer*"]'
    items = _listed(value, what)
    if not all(isinstance(item, str) and item and not item.startswith("/") for item in items):
        raise ValueError(f"{value!r} is not a list of {what}")
    return tuple(items)


def node(value: object) -> str:
    """Read a node id, or nothing (it is computed then)."""
    try:
        return checked_node(text(value)) if value else ""
    except Corrupt as e:
        raise ValueError(str(e)) from e


def mapping(value: object) -> dict[str, object]:
    """Read a mapping with strings for keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{value!r} is not a mapping of names to values")
    return dict(value)


def storage_options(value: object) -> dict[str, object]:
    """Read a mapping, or (from the environment) its JSON.

    No problem repeats a value: keys may be among them.
    """
    try:
        found = plain_json.parse(value, "") if isinstance(value, str) else value
    except Corrupt as e:
        why = 'not JSON: expected an object such as {"endpoint_url": "https://…"}'
        raise ValueError(why) from e
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise ValueError("not a mapping of names to values")
    return dict(found)


def bandwidth(value: object) -> Schedule | None:
    """Read a rate, a schedule, or off."""
    if value is False:  # what YAML makes of `off`
        return None
    schedule = parse_schedule(text(value))
    return None if schedule.is_unlimited else schedule


def spool_full(value: object) -> str:
    """Read ``oldest``, ``wait`` or ``every:N``."""
    word, _, number = text(value).partition(":")
    if word == "every" and number.isascii() and number.isdigit() and int(number):
        return f"every:{int(number)}"
    if value not in ("oldest", "wait"):
        raise ValueError(f"{value!r} is not one of oldest, wait, every:N (such as every:10)")
    return text(value)


def directories(value: object) -> dict[str, str]:
    """Read a mapping of run names to directories."""
    return {name: text(path) for name, path in mapping(value).items()}


def bases(value: object) -> dict[str, str]:
    """Return run name (``*`` for all) → base of ``{into: BASE}`` or ``{into: {RUN: BASE}}``.

    Raises ValueError.
    """
    settings = mapping(value)
    if unknown := settings.keys() - {"into"}:
        raise ValueError(f"{min(unknown)!r} is not known here, only `into` is")
    into = settings.get("into", {})
    by_run = {"*": into} if isinstance(into, str) else mapping(into)
    return {name: location(base) for name, base in by_run.items()}


def run_name(name: str) -> str:
    """Return ``name`` if it may be a directory of the store; raise ValueError."""
    try:
        return checked_run_name(name)
    except Corrupt as e:
        raise ValueError(str(e)) from e


def best(value: object) -> Best | None:
    """Read ``eval_loss:2``, ``max:eval_accuracy:3``; nothing, or off, is none."""
    if value in (False, "", "off"):
        return None
    found = _BEST.fullmatch(text(value))
    if not found:
        example = "such as eval_loss:2 or max:eval_accuracy:2"
        raise ValueError(f"{value!r} is not a metric and a number, {example}")
    return Best(found[2], int(found[3]), is_greatest=found[1] == "max")


def shards(value: object) -> int | None:
    """Read ``keep``, or ``drop-after:N``."""
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
"""The retention rules, which hold for all runs, or for one."""


def by_run(value: object) -> dict[str, dict[str, Any]]:
    """Read runs (or globs of their names), each with the rules that hold for it instead."""
    found: dict[str, dict[str, Any]] = {}
    for name, rules in mapping(value).items():
        own = found[run_name(name)] = {}
        for key, item in mapping(rules).items():
            if key not in RULES:
                raise ValueError(f"{name}: {key!r} is not one of {', '.join(RULES)}")
            try:
                own[key] = RULES[key](item)
            except ValueError as e:
                raise ValueError(f"{name}: {key}: {e}") from e
    return found


def apprise_urls(value: object) -> tuple[str, ...]:
    """Read a list of Apprise URLs, or (from the environment) URLs with spaces between them.

    Error messages never quote one: it holds tokens.
    """
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, list) or not all(
        isinstance(item, str) and _APPRISE.match(item) for item in items
    ):
        raise ValueError("not a list of Apprise URLs such as jsons://host/path")
    if web := [item for item in items if item.lower().startswith(("http://", "https://"))]:
        raise ValueError(f"{len(web)} of its URLs begin with http: {APPRISE_FORM}")
    return tuple(items)


def command(value: object) -> tuple[str, ...]:
    """Read a list of words, or one string as a shell would split it; no shell runs it."""
    words = shlex.split(value) if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f'{value!r} is not a command such as ["/usr/local/bin/page", "--now"]')
    if words and not words[0].startswith("/"):
        raise ValueError(f"{words[0]!r} {_RELATIVE}")
    if any("\0" in word for word in words):
        raise ValueError("a NUL character is in it")
    return tuple(words)


def events(value: object) -> tuple[Definition, ...]:
    """Read a list of events, each with a command or a URL."""
    return read_definitions(value, command)


def listen(value: object) -> str:
    """Read ``host:port``; nothing, or off, is none."""
    if value in (False, "", "off"):
        return ""
    found = _LISTEN.fullmatch(text(value))
    if not found or count(found[2]) > 65535:
        raise ValueError(f"{value!r} is not a host and a port, such as 127.0.0.1:9464 or [::]:9464")
    return found[0]


def listen_or_path(value: object) -> str:
    """Read what `listen` does, or ``unix:/path``, a socket that only this user may open."""
    if isinstance(value, str) and value.startswith(UNIX):
        if not value.startswith("unix:/"):
            raise ValueError(f"{value!r} is not a socket's absolute path, such as unix:/run/web")
        return value
    return listen(value)


def is_local(where: str) -> bool:
    """Return whether only this machine reaches an address that `listen_or_path` read."""
    return where.startswith(UNIX) or bool(_LOCAL.fullmatch(where.rpartition(":")[0].lower()))


def token(value: object) -> str:
    """Read a token of at least 16 characters, or nothing.  Error messages never quote it."""
    if value == "":
        return ""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{16,200}", value):
        raise ValueError("not a token of 16 to 200 characters of ASCII without spaces")
    return value


def runs(value: object) -> tuple[RunConfig, ...]:
    """Read a list of ``{path, name}``; a plain string is a path."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of runs, such as - path: /data/out")  # noqa: TRY004 - as in `text`
    found = []
    for item in value:
        given = {"path": item} if isinstance(item, str) else mapping(item)
        if unknown := sorted(set(given) - {"path", "name"}):
            raise ValueError(f"{unknown[0]!r} is not a key of a run: path and name are")
        if not given.get("path"):
            raise ValueError(f"{item!r} has no path")
        path, name = text(given["path"]), text(given.get("name") or "")
        if not path.startswith("/"):
            raise ValueError(f"path {path!r} {_RELATIVE}")
        found.append(RunConfig(path, run_name(name) if name else ""))
    return tuple(found)
