"""The pickle machine: one method an opcode, one row of a table each, and no way to call anything but what was given.

See `ckptsync.formats.inert`, which is its door.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.mentioned import Build, Made, Name

LONGEST = 255  # bytes of a whole number: a message that tells it must be able to print it
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})


class _Stop(Exception):
    """The STOP opcode."""


class Machine:
    __slots__ = ("_allowed", "_data", "_marks", "_memo", "_persistent", "_stack", "at")

    def __init__(self, data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any] | None) -> None:
        self._data, self._allowed, self._persistent = data, allowed, persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.at = 0

    def run(self) -> Any:
        data, table = self._data, _TABLE
        try:
            while True:
                code = data[self.at]
                self.at += 1
                table[code](self)
        except _Stop:
            if len(self._stack) != 1 or self._marks:
                raise Corrupt("pickle: does not end in one value") from None
            return self._stack[0]

    # reading arguments

    def do_take(self, count: int) -> bytes:
        start = self.at
        self.at = start + count
        if self.at > len(self._data):
            raise Corrupt(f"pickle: ends at byte {len(self._data)}, {self.at} wanted")
        return self._data[start : self.at]

    def do_line(self) -> str:
        end = self._data.index(b"\n", self.at)
        line = self.do_take(end - self.at)
        self.at += 1
        return line.decode()

    def do_number(self, width: int) -> int:
        return int.from_bytes(self.do_take(width), "little")

    def do_protocol(self) -> None:
        number = self.do_number(1)
        if number > 5:
            raise Unsupported(f"pickle: protocol {number}, at most 5 is known")

    def do_skip(self, count: int) -> None:
        self.do_take(count)

    # values

    def do_push(self, value: Any) -> None:
        self._stack.append(value)

    def do_text(self, width: int) -> None:
        self.do_push(self.do_take(self.do_number(width)).decode("utf-8", "surrogatepass"))

    def do_bytes(self, width: int) -> None:
        self.do_push(self.do_take(self.do_number(width)))

    def do_int(self) -> None:
        self.do_push(int.from_bytes(self.do_take(4), "little", signed=True))

    def do_long(self, width: int) -> None:
        count = self.do_number(width)
        if count > LONGEST:
            raise Corrupt(f"pickle: a number of {count} bytes at byte {self.at}")
        self.do_push(int.from_bytes(self.do_take(count), "little", signed=True))

    def do_decimal(self) -> None:
        line = self.do_line()
        self.do_push({"00": False, "01": True}.get(line) if line in ("00", "01") else int(line))

    def do_float(self) -> None:
        self.do_push(struct.unpack(">d", self.do_take(8))[0])

    # memo, marks

    def do_memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def do_put(self, width: int) -> None:
        self._memo[self.do_number(width)] = self._stack[-1]

    def do_get(self, width: int) -> None:
        self.do_push(self._memo[self.do_number(width)])

    def do_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def do_pop(self) -> None:
        self._stack.pop()

    def do_pop_mark(self) -> None:
        self.do_since_mark()

    def do_since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    # containers

    def do_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise Corrupt("pickle: a tuple of more than there is")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def do_tuple_from_mark(self) -> None:
        self.do_push(tuple(self.do_since_mark()))

    def do_list_from_mark(self) -> None:
        self.do_push(self.do_since_mark())

    def do_append(self) -> None:
        value = self._stack.pop()
        _as(self._stack[-1], list).append(value)

    def do_appends(self) -> None:
        items = self.do_since_mark()
        _as(self._stack[-1], list).extend(items)

    def do_dict_from_mark(self) -> None:
        items = self.do_since_mark()
        self.do_push({})
        self.do_set(items)

    def do_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.do_set([key, value])

    def do_setitems(self) -> None:
        self.do_set(self.do_since_mark())

    def do_set(self, items: list[Any]) -> None:
        target = _as(self._stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_checked_key(key)] = value

    def do_additems(self) -> None:
        items = self.do_since_mark()
        _as(self._stack[-1], set).update(map(_checked_key, items))

    def do_frozenset(self) -> None:
        self.do_push(frozenset(map(_checked_key, self.do_since_mark())))

    # names and calls

    def do_name(self, name: Name) -> None:
        if name not in self._allowed:
            raise Unsupported(
                f"pickle: names {_word(name.module)}.{_word(name.name)}, which is not among the names that this format has",
                hint="nothing in it was run; if you trust the file and know its format, report the name",
            )
        self.do_push(name)

    def do_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.do_name(Name(_as(module, str), _as(name, str)))

    def do_call(self) -> None:
        args, name = _as(self._stack.pop(), tuple), _as(self._stack.pop(), Name)
        self.do_push(self._allowed[name](name, args))

    def do_build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict's attributes (torch sets `_metadata`) say nothing about tensors
            raise Corrupt("pickle: state for something that has none")

    def do_persid(self) -> None:
        if self._persistent is None:
            raise Unsupported("pickle: has persistent ids where this format has none")
        self.do_push(self._persistent(self._stack.pop()))

    def do_stop(self) -> None:
        raise _Stop


def _word(text: str) -> str:
    """For an error's one line."""
    return text[:100].encode("unicode_escape").decode()


def _as(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise Corrupt(f"pickle: a {type(value).__name__} where a {kind.__name__} is due")
    return value


def _checked_key(key: Any) -> Any:
    kinds = set(map(type, key)) if type(key) is tuple else {type(key)}
    if not kinds <= _KEYS | {Made, Name}:
        raise Corrupt("pickle: a dictionary key that no checkpoint has")
    return key


def _refuse(machine: Machine) -> None:
    # no framework writes one: bytes that were damaged, or made by hand
    raise Corrupt(f"pickle: the opcode at byte {machine.at - 1} is not one that checkpoints use")


Step = Callable[[Machine], None]

# One row an opcode, under its letter in CPython's pickle.py.
_STEPS: dict[bytes, Step] = {
    b"\x80": lambda s: s.do_protocol(),
    b"\x95": lambda s: s.do_skip(8),
    b".": lambda s: s.do_stop(),
    b"(": lambda s: s.do_mark(),
    b"0": lambda s: s.do_pop(),
    b"1": lambda s: s.do_pop_mark(),
    b"N": lambda s: s.do_push(None),
    b"\x88": lambda s: s.do_push(True),  # noqa: FBT003
    b"\x89": lambda s: s.do_push(False),  # noqa: FBT003
    b"I": lambda s: s.do_decimal(),
    b"J": lambda s: s.do_int(),
    b"K": lambda s: s.do_push(s.do_number(1)),
    b"M": lambda s: s.do_push(s.do_number(2)),
    b"\x8a": lambda s: s.do_long(1),
    b"\x8b": lambda s: s.do_long(4),
    b"G": lambda s: s.do_float(),
    b"X": lambda s: s.do_text(4),
    b"\x8c": lambda s: s.do_text(1),
    b"\x8d": lambda s: s.do_text(8),
    b"B": lambda s: s.do_bytes(4),
    b"C": lambda s: s.do_bytes(1),
    b"\x8e": lambda s: s.do_bytes(8),
    b"]": lambda s: s.do_push([]),
    b"a": lambda s: s.do_append(),
    b"e": lambda s: s.do_appends(),
    b"l": lambda s: s.do_list_from_mark(),
    b")": lambda s: s.do_push(()),
    b"t": lambda s: s.do_tuple_from_mark(),
    b"\x85": lambda s: s.do_tuple(1),
    b"\x86": lambda s: s.do_tuple(2),
    b"\x87": lambda s: s.do_tuple(3),
    b"}": lambda s: s.do_push({}),
    b"d": lambda s: s.do_dict_from_mark(),
    b"s": lambda s: s.do_setitem(),
    b"u": lambda s: s.do_setitems(),
    b"\x8f": lambda s: s.do_push(set()),
    b"\x90": lambda s: s.do_additems(),
    b"\x91": lambda s: s.do_frozenset(),
    b"c": lambda s: s.do_name(Name(s.do_line(), s.do_line())),
    b"\x93": lambda s: s.do_stack_global(),
    b"R": lambda s: s.do_call(),
    b"\x81": lambda s: s.do_call(),
    b"b": lambda s: s.do_build(),
    b"Q": lambda s: s.do_persid(),
    b"q": lambda s: s.do_put(1),
    b"r": lambda s: s.do_put(4),
    b"h": lambda s: s.do_get(1),
    b"j": lambda s: s.do_get(4),
    b"\x94": lambda s: s.do_memoize(),
}
_TABLE: list[Step] = [_STEPS.get(bytes([code]), _refuse) for code in range(256)]
