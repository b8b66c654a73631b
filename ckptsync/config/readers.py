"""How a value is read.

Each reader takes what YAML (or the environment: always a string) gave and returns the value, or raises ValueError saying what was wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptsync import parsing
from ckptsync.config.units import LARGEST, parse_duration, parse_size
from ckptsync.config.values import ROLES, RunConfig
from ckptsync.errors import Corrupt
from ckptsync.paths import checked_path
from ckptsync.records.names import CONSOLIDATED, checked_node
from ckptsync.stores.limits import Schedule, parse_schedule

_MOST = 10**9  # of whatever is counted: threads, jobs, checkpoints, steps


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
    """A rate, a timetable, or off."""
    if value is False:  # what YAML makes of `off`
        return None
    timetable = parse_schedule(text(value))
    return None if timetable.is_unlimited else timetable


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
