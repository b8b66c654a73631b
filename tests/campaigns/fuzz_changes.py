"""Changes to bytes, to JSON and to nested values that a program might not expect, by chance."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DEEP, LONG, TORN = "@deep@", "@long@", "@torn@"
"""What stands for text that JSON's encoder would not write: it is put in afterwards."""
NAMES: Sequence[str] = ("", ".", "..", "../outside/secret", "../../../outside/secret",
    "/outside/secret", "a/../b", "a//b", "a\\b", "a\0b", "a\nb", "a\x1b[2Jb", "~", "é", "\ud800",
    "\u202e", "x" * 300, "%s", "-rf", "CON", "a ")  # fmt: skip
NUMBERS: Sequence[Any] = (0, -1, 1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 0.5,
    -0.0, 1e308, float("nan"), float("inf"))  # fmt: skip
OTHERS: Sequence[Any] = (None, True, False, [], {}, [[]], {"": {}}, [None], DEEP, LONG, TORN,
    [0] * 3000, {str(n): n for n in range(1000)})  # fmt: skip
_TOKENS = (b"", b"\0", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"[" * 100_000,
    b"9" * 400, b"{", b"}", b'"', b"\n", b"NaN", b"-", b"1e999", b"\\ud800", b"\x80\x04",
    b"PK\x03\x04")  # fmt: skip
Leaf = Callable[[Any, random.Random], Any]
"""Another value than one that has no parts."""


def changed_bytes(data: bytes, dice: random.Random) -> bytes:
    """Return bytes of which some are others, more, elsewhere, or gone."""
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at, many = dice.randrange(len(data) + 1), dice.choice((1, 1, 4, 16, 300))
        before, after, token = data[:at], data[at:], dice.choice(_TOKENS)
        elsewhere = data[(start := dice.randrange(len(data) + 1)) : start + many]
        flipped = bytes([after[0] ^ 1 << dice.randrange(8)]) + after[1:] if after else b"\0"
        changes = (
            flipped,
            flipped,
            token + after,
            (token or bytes(many)) + after[len(token) or many :],
            after[many:],
            elsewhere + after,
            elsewhere + after[many:],
            b"",
        )
        data = before + dice.choice(changes)
    return data


def changed_json(data: bytes, dice: random.Random) -> bytes:
    """Return a document in which values, keys or bytes are others; bytes where it is none."""
    try:
        value = json.loads(data)
    except ValueError:
        return changed_bytes(data, dice)
    if dice.randrange(5) == 0:
        return changed_bytes(data, dice)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        value = altered(value, dice, odd)
    text = json.dumps(value, sort_keys=False, default=str).encode()
    text = text.replace(b'"@deep@"', b"[" * 50_000 + b"]" * 50_000).replace(b'"@long@"', b"9" * 400)
    return text.replace(b"@torn@", b"a\xff\xc3")


def odd(value: Any, dice: random.Random) -> Any:
    """Return a value that few programs expect, or one that is not far from this one."""
    if isinstance(value, str) and dice.randrange(3) == 0:
        at = dice.randrange(len(value) + 1)
        return value[:at] + dice.choice(NAMES) + value[at + dice.randrange(3) :]
    if isinstance(value, int | float) and not isinstance(value, bool) and dice.randrange(3):
        return dice.choice((value - 1, value + 1, value * 2, -value, value + 8, value - (1 << 40)))
    return copy.deepcopy(dice.choice((*NAMES, *NUMBERS, *OTHERS)))


def altered(value: Any, dice: random.Random, leaf: Leaf) -> Any:
    """Return a copy in which one thing, anywhere in it, is another one."""
    paths = [*_paths(value)]
    depth = dice.choice([len(path) for path in paths])
    return _replaced(value, dice.choice([p for p in paths if len(p) == depth]), dice, leaf)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a value by their keys; none of one that is not nested."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, list | tuple):
        return [*enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return []


def _with_parts(value: Any, parts: Sequence[tuple[Any, Any]]) -> Any:
    """Return a value of the same kind that has these parts."""
    if isinstance(value, dict):
        return type(value)(parts)
    if isinstance(value, list | tuple):
        try:
            return type(value)(part for _, part in parts)
        except TypeError:  # a shape of what is no number
            return tuple(part for _, part in parts)
    twin = copy.copy(value)
    for name, part in parts:
        object.__setattr__(twin, name, part)
    return twin


def _paths(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield path
    for n, (_, part) in enumerate(_parts(value)):
        yield from _paths(part, (*path, n))


def _replaced(value: Any, path: Sequence[int], dice: random.Random, leaf: Leaf) -> Any:
    parts = _parts(value)
    if path:
        key, part = parts[path[0]]
        parts[path[0]] = key, _replaced(part, path[1:], dice, leaf)
        return _with_parts(value, parts)
    if not parts or dice.randrange(5) == 0:
        return leaf(value, dice)
    a, b, kind = dice.randrange(len(parts)), dice.randrange(len(parts)), dice.randrange(6)
    (key, part), (other_key, other) = parts[a], parts[b]
    if kind == 0 and not dataclasses.is_dataclass(value):
        del parts[a]
    elif kind == 1:
        parts[a], parts[b] = parts[b], parts[a]
    elif kind == 2:
        parts[a], parts[b] = (key, other), (other_key, part)
    elif kind == 3:
        parts.reverse()
    else:
        new_key = altered(key, dice, leaf) if _parts(key) else dice.choice((*NAMES, f"{key}x", 7))
        if kind == 4 and isinstance(value, dict):
            parts[a] = new_key, part
        elif not dataclasses.is_dataclass(value):
            parts.insert(b, (new_key, copy.deepcopy(part)))
    try:
        return _with_parts(value, parts)
    except TypeError:  # a key that cannot be one
        return leaf(value, dice)
