"""A small JSON file as one of the spool's dataclasses: every key of its type, unknown ones ignored.

A file that cannot be read is no file: a mark is a hint about files, never the files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ckptsync.spool import folders

_LARGEST = {"Commit": 32 * 1024 * 1024}  # bytes: 120,000 files and more
_LARGE = 4 * 1024 * 1024  # of all else
_DENSE = 16  # bytes for each list and object: a commit has 28 and more, and what is all brackets takes fifty times its size
_LARGEST_NUMBER = 2**63 - 1  # what the store's records can hold
_Mark = TypeVar("_Mark")


def read(path: Path, kind: Callable[..., _Mark]) -> _Mark | None:
    """What it says; ``None`` if it is not there, too large, or not a ``kind``."""
    try:
        return kind(**dict(_known(load(path, _LARGEST.get(getattr(kind, "__name__", ""), _LARGE)), kind)))
    except (OSError, ValueError, TypeError):
        return None  # gone, half deleted or not ours: no mark, as the docstring of the module says


def load(path: Path, largest: int = _LARGE) -> object:
    """The JSON in a small file of the spool, whatever it is; ``None`` if it is not there, too large, too deep, or no JSON.  Raises OSError."""
    data = folders.read(path, largest) or b"null"
    if data.count(b"[") + data.count(b"{") > 1000 + len(data) // _DENSE:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError):  # also of invalid UTF-8, and of numbers of too many digits
        return None


def _known(raw: object, kind: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """The keys that the dataclass has, each of its type; raises TypeError or ValueError where one is not."""
    if not isinstance(raw, dict):
        raise TypeError(raw)
    for wanted in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass of `ckptsync.spool.marks`
        if wanted.name in raw:
            yield wanted.name, _TYPES[str(wanted.type)](raw[wanted.name])


def _text(raw: object) -> str:
    """Raises ValueError for what no UTF-8 says: a store could not keep it."""
    if not isinstance(raw, str):
        raise TypeError(raw)
    raw.encode()
    return raw


def _whole(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or abs(raw) > _LARGEST_NUMBER:
        raise TypeError(raw)
    return raw


def _number(raw: object) -> float:
    number = raw if isinstance(raw, float) else float(_whole(raw))
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _ranks(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise TypeError(raw)
    return tuple(_whole(r) for r in raw)


def _facts(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise TypeError(raw)
    return {_shown(k): _shown(v) for k, v in raw.items()}


def _shown(raw: object) -> str:
    """Text for people: of a variable that is no UTF-8 what can be told."""
    if not isinstance(raw, str):
        raise TypeError(raw)
    return raw.encode("utf-8", "replace").decode()


def _files(raw: object) -> dict[str, tuple[int, int]]:
    if not isinstance(raw, dict):
        raise TypeError(raw)
    found = {}
    for path, entry in raw.items():
        size, mtime = _ranks(entry)
        found[path] = (size, mtime)  # a name of a file, which may be no UTF-8
    return found


_TYPES: Mapping[str, Callable[[object], object]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "tuple[int, ...]": _ranks,
    "Mapping[str, str]": _facts,
    "Mapping[str, tuple[int, int]]": _files,
}
