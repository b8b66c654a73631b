"""Readers of the configuration's values: each returns a value, or raises ValueError.

A value comes from YAML, with a type, or from an environment variable, always as a string; one
reader accepts both.  YAML reads ``off`` as false.  Every function here with the parameter ``value``
is such a reader; the message of its ValueError says what was expected.
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
_MOST = 10**9  # the greatest count of threads, jobs, checkpoints or steps
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
    """Return a string as it is.  Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")  # noqa: TRY004 - a problem of the file's, not of the program's types
    return value


def duration(value: object) -> float:
    """Return the seconds of a duration such as ``1h30m``, 0 included.  Raises ValueError."""
    return parse_duration(str(value))


def period(value: object) -> float:
    """Return the seconds of a duration above zero.  Raises ValueError."""
    seconds = duration(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is not a period: expected more than zero, such as 30s")
    return seconds


def size(value: object) -> int:
    """Return the bytes of a number or of text such as ``5GB``, at least one.  Raises ValueError."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    count = int(value) if is_number else parse_size(text(value))  # type: ignore[call-overload]
    if not 1 <= count <= LARGEST:
        raise ValueError(f"{value!r:.80} is not a size: expected 1 byte to {LARGEST}")
    return int(count)


def location(value: object) -> str:
    """Return an absolute path or a URL; may be empty.  Raises ValueError."""
    url = text(value)
    if url and "://" not in url and not url.startswith("/"):
        raise ValueError(f"{url!r} {_RELATIVE} or a URL")
    return url


def count(value: object) -> int:
    """Return a whole number, or one in text, from zero to `_MOST`.  Raises ValueError."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST:
        raise ValueError(f"{value!r:.80} is not a whole number from zero to {_MOST}")
    return number


def positive_count(value: object) -> int:
    """Return a whole number from one to `_MOST`.  Raises ValueError."""
    number = count(value)
    if not number:
        raise ValueError(f"{value!r} is too small: expected at least one")
    return number


def factor(value: object) -> float:
    """Return a number above one and at most a million.  Raises ValueError."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int | float) or isinstance(number, bool) or not 1 < number <= 1e6:
        raise ValueError(f"{value!r:.80} is not a factor: expected a number above 1, such as 2")
    return float(number)


def one_of(*words: str) -> Callable[[object], str]:
    """Return a reader that returns one of ``words`` and raises ValueError for any other value.

    YAML's false is read as ``off`` if that is one of them.
    """

    def read_word(value: object) -> str:
        """Return the word, or raise ValueError that lists the words."""
        word = "off" if value is False and "off" in words else value
        if word not in words:
            raise ValueError(f"{value!r} is not one of {', '.join(words)}")
        return str(word)

    return read_word


def yes_or_no(value: object) -> bool:
    """Return a bool, also of the words ``true`` and ``false``.  Raises ValueError."""
    if isinstance(value, bool):
        return value
    return one_of("true", "false")(value.lower() if isinstance(value, str) else value) == "true"


def or_off(read_other: Callable[[object], T]) -> Callable[[object], T | int]:
    """Return a reader that returns 0 for ``off`` or false, else what ``read_other`` does."""
    return lambda value: 0 if value is False or value == "off" else read_other(value)


def _listed(value: object, item_kind: str) -> list[Any]:
    """Return a list as it is, or the items of a string with commas, stripped, without empty ones.

    Raise ValueError, which names ``item_kind``, for anything else.
    """
    items = value
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(items, list):
        raise ValueError(f"{value!r} is not a list of {item_kind}")  # noqa: TRY004 - as in `text`
    return items


def roles(value: object) -> tuple[str, ...]:
    """Return roles, each once, at least one.  Raises ValueError."""
    items = _listed(value, f"roles ({', '.join(ROLES)})")
    if not items:
        raise ValueError(f"no role is given: expected one or more of {', '.join(ROLES)}")
    return tuple(dict.fromkeys(map(one_of(*ROLES), items)))


def alarms(value: object) -> tuple[str, ...]:
    """Return kinds of alarms, each once.  Raises ValueError."""
    return tuple(dict.fromkeys(map(one_of(*KINDS), _listed(value, ", ".join(KINDS)))))


def globs(value: object) -> tuple[str, ...]:
    """Return relative globs of files, also of text with commas.  Raises ValueError."""
    expected = 'globs such as ["*.safetensors", "optimizer*"]'
    items = _listed(value, expected)
    if not all(isinstance(item, str) and item and not item.startswith("/") for item in items):
        raise ValueError(f"{value!r} is not a list of {expected}")
    return tuple(items)


def node(value: object) -> str:
    """Return a node id, or "" if it is to be computed.  Raises ValueError."""
    try:
        return checked_node(text(value)) if value else ""
    except Corrupt as e:
        raise ValueError(str(e)) from e


def mapping(value: object) -> dict[str, object]:
    """Return a mapping with strings for keys.  Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{value!r} is not a mapping of names to values")
    return dict(value)


def storage_options(value: object) -> dict[str, object]:
    """Return a mapping, also of its JSON.  Raises ValueError.

    No message repeats a value: access keys may be among them.
    """
    try:
        options = plain_json.parse(value, "") if isinstance(value, str) else value
    except Corrupt as e:
        why = 'not JSON: expected an object such as {"endpoint_url": "https://…"}'
        raise ValueError(why) from e
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError("not a mapping of names to values")
    return dict(options)


def bandwidth(value: object) -> Schedule | None:
    """Return a rate or timetable as a schedule; None if it limits nothing.  Raises ValueError."""
    if value is False:  # what YAML makes of `off`
        return None
    schedule = parse_schedule(text(value))
    return None if schedule.is_unlimited else schedule


def spool_full(value: object) -> str:
    """Return ``oldest``, ``wait`` or ``every:N``.  Raises ValueError."""
    word, _, number = text(value).partition(":")
    if word == "every" and number.isascii() and number.isdigit() and int(number):
        return f"every:{int(number)}"
    if value not in ("oldest", "wait"):
        raise ValueError(f"{value!r} is not one of oldest, wait, every:N (such as every:10)")
    return text(value)


def directories(value: object) -> dict[str, str]:
    """Return a mapping of run names to directories.  Raises ValueError."""
    return {name: text(path) for name, path in mapping(value).items()}


def bases(value: object) -> dict[str, str]:
    """Return the base model by run, or for all runs by ``*``: {} without ``into``.

    ``value`` is ``{into: BASE}`` or ``{into: {RUN: BASE}}``; a base is an absolute path or a URL.
    Raises ValueError.
    """
    settings = mapping(value)
    if unknown := settings.keys() - {"into"}:
        raise ValueError(f"{min(unknown)!r} is not known here, only `into` is")
    into = settings.get("into", {})
    by_run = {"*": into} if isinstance(into, str) else mapping(into)
    return {name: location(base) for name, base in by_run.items()}


def run_name(name: str) -> str:
    """Return ``name`` if a run may have it in a store, else raise ValueError."""
    try:
        return checked_run_name(name)
    except Corrupt as e:
        raise ValueError(str(e)) from e


def best(value: object) -> Best | None:
    """Return the rule of ``eval_loss:2`` or ``max:eval_accuracy:3``; None for "" or off.

    Raises ValueError.
    """
    if value in (False, "", "off"):
        return None
    match = _BEST.fullmatch(text(value))
    if not match:
        example = "such as eval_loss:2 or max:eval_accuracy:2"
        raise ValueError(f"{value!r} is not a metric and a number, {example}")
    return Best(match[2], int(match[3]), is_greatest=match[1] == "max")


def shards(value: object) -> int | None:
    """Return N of ``drop-after:N``, or None for ``keep``.  Raises ValueError."""
    if value == "keep":
        return None
    match = _SHARDS.fullmatch(text(value))
    if not match:
        raise ValueError(f"{value!r} is not one of keep, drop-after:N (such as drop-after:3)")
    return int(match[1])


RULES: Mapping[str, Callable[[object], Any]] = {
    "keep_last": or_off(positive_count),
    "keep_every": or_off(positive_count),
    "keep_best": best,
    "max_age": or_off(period),
    "max_size": or_off(size),
    "shards": shards,
}
"""The reader of each retention rule, which holds for all runs or for one."""


def by_run(value: object) -> dict[str, dict[str, Any]]:
    """Return for each run, or glob of runs, its own retention rules, read.  Raises ValueError."""
    rules_of: dict[str, dict[str, Any]] = {}
    for name, rules in mapping(value).items():
        run_rules = rules_of[run_name(name)] = {}
        for key, item in mapping(rules).items():
            if key not in RULES:
                raise ValueError(f"{name}: {key!r} is not one of {', '.join(RULES)}")
            try:
                run_rules[key] = RULES[key](item)
            except ValueError as e:
                raise ValueError(f"{name}: {key}: {e}") from e
    return rules_of


def apprise_urls(value: object) -> tuple[str, ...]:
    """Return Apprise URLs of a list, or of a string with spaces between them; http: is refused.

    Raises ValueError, whose message never quotes a URL: it may contain a token.
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
    """Return a command's words, of a list, or of a string, which is split as a shell does.

    () for an empty one; else its program is an absolute path, which need not exist.  Raises
    ValueError.
    """
    words = shlex.split(value) if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f'{value!r} is not a command such as ["/usr/local/bin/page", "--now"]')
    if words and not words[0].startswith("/"):
        raise ValueError(f"{words[0]!r} {_RELATIVE}")
    if any("\0" in word for word in words):
        raise ValueError("a NUL character is in it")
    return tuple(words)


def events(value: object) -> tuple[Definition, ...]:
    """Return event definitions, each with a command or a URL.  Raises ValueError."""
    return read_definitions(value, command)


def listen(value: object) -> str:
    """Return ``host:port``, or "" for "" and off.  Raises ValueError."""
    if value in (False, "", "off"):
        return ""
    match = _LISTEN.fullmatch(text(value))
    if not match or count(match[2]) > 65535:
        raise ValueError(f"{value!r} is not a host and a port, such as 127.0.0.1:9464 or [::]:9464")
    return match[0]


def listen_or_path(value: object) -> str:
    """Return ``unix:/path`` as it is, else what `listen` returns.  Raises ValueError."""
    if isinstance(value, str) and value.startswith(UNIX):
        if not value.startswith("unix:/"):
            raise ValueError(f"{value!r} is not a socket's absolute path, such as unix:/run/web")
        return value
    return listen(value)


def is_local(where: str) -> bool:
    """Return whether only this machine reaches an address: a socket's, or loopback's."""
    return where.startswith(UNIX) or bool(_LOCAL.fullmatch(where.rpartition(":")[0].lower()))


def token(value: object) -> str:
    """Return a token of 16 to 200 characters, or "".

    Raises ValueError, whose message never quotes it.
    """
    if value == "":
        return ""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{16,200}", value):
        raise ValueError("not a token of 16 to 200 characters of ASCII without spaces")
    return value


def runs(value: object) -> tuple[RunConfig, ...]:
    """Return runs of a list of ``{path, name}``, or of plain paths, which are absolute.

    A name that is not given is "".  Raises ValueError.
    """
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of runs, such as - path: /data/out")  # noqa: TRY004 - as in `text`
    result = []
    for item in value:
        fields = {"path": item} if isinstance(item, str) else mapping(item)
        if unknown := sorted(set(fields) - {"path", "name"}):
            raise ValueError(f"{unknown[0]!r} is not a key of a run: path and name are")
        if not fields.get("path"):
            raise ValueError(f"{item!r} has no path")
        path, name = text(fields["path"]), text(fields.get("name") or "")
        if not path.startswith("/"):
            raise ValueError(f"path {path!r} {_RELATIVE}")
        result.append(RunConfig(path, run_name(name) if name else ""))
    return tuple(result)
