"""An unpickler that runs nothing: it rebuilds the shape of a pickle, and none of its behaviour.

No name in a pickle is imported.  A caller gives the exact names it accepts and, for each, a constructor of plain values;
any other name, opcode, persistent id or odd dictionary key is refused.  It is a small machine of its own, and not a
subclass of `pickle.Unpickler`, because that one allocates by the numbers it is given (a memo index of four bytes can ask for
gigabytes) and hashes whatever stands as a key (nested tuples hash in exponential time).

Opcodes: CPython's ``pickletools``; protocols 2 to 5 as ``torch.save`` and ``pickle.dump`` write them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats import frequent
from ckptsync.formats.machine import Machine, ordered
from ckptsync.formats.mentioned import Build, Made, Name, Stated, Unknown

MAX_BYTES = 256 << 20


def loads(data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any] | None = None) -> tuple[Any, int]:
    """The value in ``data`` and the number of bytes that its pickle takes.

    Raises Unsupported for a name that is not ``allowed``, Corrupt for anything that is no pickle of a checkpoint.
    """
    if len(data) > MAX_BYTES:
        raise Corrupt(f"pickle: {len(data)} bytes, at most {MAX_BYTES} expected")
    machine = Machine(data, allowed, persistent)
    try:
        return frequent.run(machine), machine.at
    except (
        IndexError,
        ValueError,
        TypeError,
        KeyError,
        struct.error,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as e:
        raise Corrupt(f"pickle: damaged at byte {machine.at}: {type(e).__name__}: {e}") from e


def brief(value: Any) -> str:
    """A value of a pickle for an error's text: a number or a short text as it is, anything else by its kind.

    Never ``repr``: nested tuples that share their parts print for ever, deep ones overflow the stack, and integers may be endless.
    """
    if value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() <= 64):
        return repr(value)
    if type(value) is str:
        return repr(value[:60])
    if type(value) in (tuple, list) and len(value) <= 4 and not any(type(v) in (tuple, list) for v in value):
        return f"({', '.join(map(brief, value))})"
    return f"a {type(value).__name__}"


def made(name: Name, args: tuple[Any, ...]) -> Made:
    """The constructor for names that need none: keep the arguments."""
    return Made(name, args)


class Anybodys(dict[Name, Build]):
    """Names that are known, and any other for a script's own class: kept as a word, as everything is, and never imported."""

    def get(self, name: Name, _: object = None) -> Build:  # no default is wanted: every name is here
        """The constructor."""
        return super().get(name) or _unknown


def with_unknown(value: dict[Any, Any]) -> set[Any]:
    """Keys under which an object of nobody's class lies, at any depth; each value is looked at once, however often it is mentioned."""
    waiting: list[Any] = [value]
    seen, holders = {id(value)}, dict[int, list[int]]()  # value → those that it lies in
    odd: list[int] = []
    while waiting:
        at = waiting.pop()
        inner = [at.args, at.state] if isinstance(at, Made) else [*at, *at.values()] if isinstance(at, dict) else at
        for one in inner:
            if not isinstance(one, (dict, list, tuple, set, frozenset, Made)):
                continue
            holders.setdefault(id(one), []).append(id(at))
            if id(one) not in seen:
                seen.add(id(one))
                waiting.append(one)
                if isinstance(one, Unknown):
                    odd.append(id(one))
    reached = set(odd)
    while odd:
        for holder in holders.get(odd.pop(), ()):
            if holder not in reached:
                reached.add(holder)
                odd.append(holder)
    return {key for key, inner in value.items() if id(inner) in reached or id(key) in reached}


def _unknown(name: Name, args: tuple[Any, ...]) -> Unknown:
    return Unknown(name, args)


__all__ = [
    "MAX_BYTES",
    "Anybodys",
    "Build",
    "Made",
    "Name",
    "Stated",
    "Unknown",
    "brief",
    "loads",
    "made",
    "ordered",
    "with_unknown",
]
