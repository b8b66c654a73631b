"""Changes to bytes and to JSON that a program might not expect, by chance."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

DEEP, LONG, TORN = "@deep@", "@long@", "@torn@"
"""What stands for text that JSON's encoder would not write: it is put in afterwards."""
NAMES: Sequence[str] = ("", ".", "..", "../outside/secret", "../../../outside/secret",
    "/outside/secret", "a/../b", "a//b", "a\\b", "a\0b", "a\nb", "a\x1b[2Jb", "~", "é", "\ud800",
    "\u202e", "x" * 300, "%s", "-rf", "CON", "a ")  # fmt: skip
NUMBERS: Sequence[Any] = (
    0,
    -1,
    1,
    2,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
)
OTHERS: Sequence[Any] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": {}},
    [None],
    DEEP,
    LONG,
    TORN,
    [0] * 3000,
    {str(n): n for n in range(1000)},
)
_TOKENS = (b"", b"\0", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"[" * 100_000,
    b"9" * 400, b"{", b"}", b'"', b"\n", b"NaN", b"-", b"1e999", b"\\ud800", b"\x80\x04",
    b"PK\x03\x04")  # fmt: skip


def odd(dice: random.Random) -> Any:
    """A value that few programs expect."""
    return copy.deepcopy(dice.choice((*NAMES, *NUMBERS, *OTHERS)))


def changed_bytes(data: bytes, dice: random.Random) -> bytes:
    """Some of it is something else."""
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at, many = dice.randrange(len(data) + 1), dice.choice((1, 1, 4, 16, 300))
        kind = dice.randrange(7)
        if kind <= 1 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
        elif kind == 2:  # something more
            data = data[:at] + dice.choice(_TOKENS) + data[at:]
        elif kind == 3:  # something else
            token = dice.choice(_TOKENS) or bytes(many)
            data = data[:at] + token + data[at + len(token) :]
        elif kind == 4:
            data = data[:at] + data[at + many :]
        elif kind == 5:  # of the file itself, elsewhere
            start = dice.randrange(len(data) + 1)
            data = (
                data[:at]
                + data[start : start + many]
                + data[at + (many if dice.randrange(2) else 0) :]
            )
        else:
            data = data[:at]
    return data


def changed_json(data: bytes, dice: random.Random) -> bytes:
    """A document in which values, keys or bytes are others; bytes where it is none."""
    try:
        value = json.loads(data)
    except ValueError:
        return changed_bytes(data, dice)
    if dice.randrange(5) == 0:
        return changed_bytes(data, dice)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        value = _changed(value, dice)
    return as_json(value)


def as_json(value: Any) -> bytes:
    """With what stands for other text replaced by it."""
    text = json.dumps(value, sort_keys=True).encode()
    text = text.replace(b'"@deep@"', b"[" * 50_000 + b"]" * 50_000).replace(b'"@long@"', b"9" * 400)
    return text.replace(b"@torn@", b"a\xff\xc3")


def _changed(value: Any, dice: random.Random) -> Any:
    found_dirs = list(_spots(value))
    if not found_dirs:
        return odd(dice)
    holder, key = dice.choice(found_dirs)
    kind = dice.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:  # a value from elsewhere in it
        other, at = dice.choice(found_dirs)
        holder[key] = json.loads(json.dumps(other[at]))
    elif kind == 2 and isinstance(holder, dict):
        holder[str(odd(dice))] = holder[key]
    elif kind == 3 and isinstance(holder, list):
        holder.insert(key, holder[dice.randrange(len(holder))])
    elif kind == 4 and isinstance(holder[key], str):
        text = holder[key]
        at = dice.randrange(len(text) + 1)
        holder[key] = text[:at] + str(dice.choice(NAMES)) + text[at + dice.randrange(3) :]
    elif kind == 5 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] + dice.choice((-1, 1, 8, -(1 << 40)))
    else:
        holder[key] = odd(dice)
    return value


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every location in it, as the list or dictionary and the index or key."""
    waiting = [value]
    while waiting:
        at = waiting.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in keys:
            yield at, key
            waiting.append(at[key])
