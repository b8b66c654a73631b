"""A small JSON file as one of the spool's dataclasses: every key of its type, unknown ones ignored.

A file that cannot be read is no file: a mark is a hint about files, never the files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

_LARGEST = 64 * 1024 * 1024  # bytes: the commit of 500,000 files
_Mark = TypeVar("_Mark")


def read(path: Path, kind: Callable[..., _Mark]) -> _Mark | None:
    """What it says; ``None`` if it is not there, too large, or not a ``kind``."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        raw = json.loads(path.read_bytes())
        return kind(**dict(_known(raw, kind)))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # gone, half deleted or not ours: no mark, as the docstring of the module says


def _known(raw: object, kind: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """The keys that the dataclass has, each of its type; raises TypeError or ValueError where one is not."""
    if not isinstance(raw, dict):
        raise TypeError(raw)
    for wanted in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass of `ckptsync.spool.marks`
        if wanted.name in raw:
            yield wanted.name, _TYPES[str(wanted.type)](raw[wanted.name])


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise TypeError(raw)
    return raw


def _whole(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise TypeError(raw)
    return raw


def _number(raw: object) -> float:
    return raw if isinstance(raw, float) else float(_whole(raw))


def _ranks(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise TypeError(raw)
    return tuple(_whole(r) for r in raw)


def _facts(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise TypeError(raw)
    return {_text(k): _text(v) for k, v in raw.items()}


def _files(raw: object) -> dict[str, tuple[int, int]]:
    if not isinstance(raw, dict):
        raise TypeError(raw)
    found = {}
    for path, entry in raw.items():
        size, mtime = _ranks(entry)
        found[_text(path)] = (size, mtime)
    return found


_TYPES: Mapping[str, Callable[[object], object]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "tuple[int, ...]": _ranks,
    "Mapping[str, str]": _facts,
    "Mapping[str, tuple[int, int]]": _files,
}
