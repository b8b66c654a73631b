"""The pickle machine: a stack, a memo, what each opcode does to them, and no way to call anything but what was given.

See `ckptsync.formats.inert`, which is its door, and `ckptsync.formats.opcodes`, which feeds it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.mentioned import Build, Made, Name, Stated, Unknown

LONGEST = 255  # bytes of a whole number: a message that tells it must be able to print it
# Bytes that all values of one pickle may take, those that it lets go of included, so that work is bounded too: so many whatever its
# size, so many for each of its bytes (real ones take 3 to 16), and at most.  `.metadata` of a million chunks takes 3.4 for each.
FLOOR, FACTOR, MOST = 64 << 20, 32, 1 << 30
DEEPEST = 10_000
LONGEST_KEY = 64  # elements of a tuple that is a key
ALIKE = 64  # keys of one hash: each is compared with all others
_OWN_HASH = (1 << 61) - 1  # whole numbers below this are their own hashes, those from there on may be chosen to have any
# What values take at most in CPython, in bytes, with their share of what a container keeps free for more.
REFERENCE, NUMBER, TUPLE, LIST, OBJECT, DICT, ENTRY, WIDE, NAME = 8, 40, 64, 72, 64, 232, 100, 3, 400
_KEYS = frozenset({str, int, float, bool, bytes, type(None), Made, Name, Unknown})


class _Gone:
    """Stands in memo and stack for a state's dictionary that was never made; see `ckptsync.formats.frequent`."""


GONE = _Gone()


class Sparse(dict[int, Any]):
    """A memo whose indices have holes: no pickler writes one, and a list would allocate by a number in the file."""

    def append(self, value: Any) -> None:
        """As MEMOIZE counts."""
        self[len(self)] = value


def ordered(_: Name, args: tuple[Any, ...]) -> dict[Any, Any]:
    """Stand for ``collections.OrderedDict`` among the names that are allowed: what it is called with, the machine itself checks."""
    raise Corrupt(f"pickle: an OrderedDict of {len(args)} values, outside a pickle")


class Machine:
    """``at`` counts bytes read; ``marks`` are the stacks below the marks; ``room`` is what is left for values."""

    __slots__ = (
        "alike",
        "allowed",
        "at",
        "builds",
        "data",
        "kinds",
        "marks",
        "memo",
        "names",
        "persistent",
        "room",
        "stack",
        "unset",
    )

    def __init__(self, data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.allowed, self.persistent = data, allowed, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] | Sparse = []
        self.names: dict[Name, Name] = {}  # so that every mention of a name is one object, and its id finds what to do with it
        self.builds: dict[int, Callable[[Name, tuple[Any, ...]], Any]] = {}
        self.kinds: dict[int, type[Stated]] = {}
        self.unset: dict[int, Stated] = {}  # by their ids: made, and not given their attributes yet
        self.alike: dict[int, list[Any]] = {}  # keys whose hashes anyone can choose, by these
        self.room = min(MOST, FLOOR + FACTOR * len(data))
        self.at = 0

    def result(self) -> Any:
        """The value, behind the STOP opcode."""
        self.check_room()
        if len(self.stack) != 1 or self.marks:
            raise Corrupt("pickle: does not end in one value")
        if self.unset:
            raise Corrupt("pickle: an object's attributes are not set")
        return self.stack[0]

    def check_room(self) -> None:
        """Raise Corrupt if the values take more memory than those of any checkpoint, or begin more than they end."""
        if len(self.marks) > DEEPEST:
            raise Corrupt(f"pickle: {len(self.marks)} values within each other, at most {DEEPEST} expected")
        if self.room < REFERENCE * (len(self.memo) + len(self.stack) + sum(map(len, self.marks))):
            most = min(MOST, FLOOR + FACTOR * len(self.data))
            raise Corrupt(
                f"pickle: its values take more than {most >> 20} MiB, of {len(self.data)} bytes", hint="no checkpoint's do"
            )

    def spend(self, cost: int) -> None:
        """Take from the room what something may need much of at once: memory, or as much work."""
        self.room -= cost
        if self.room < 0:
            self.check_room()

    # reading arguments

    def do_take(self, count: int) -> bytes:
        start = self.at
        self.at = start + count
        if self.at > len(self.data):
            raise Corrupt(f"pickle: ends at byte {len(self.data)}, {self.at} wanted")
        return self.data[start : self.at]

    def do_line(self) -> str:
        end = self.data.index(b"\n", self.at)
        line = self.do_take(end - self.at)
        self.at += 1
        return line.decode()

    def do_number(self, width: int) -> int:
        return int.from_bytes(self.do_take(width), "little")

    def do_protocol(self) -> None:
        number = self.do_number(1)
        if number > 5:
            raise Unsupported(f"pickle: protocol {number}, at most 5 is known")

    # values

    def do_push(self, value: Any, cost: int = REFERENCE) -> None:
        self.stack.append(value)
        self.room -= cost

    def do_text(self, width: int) -> None:
        data = self.do_take(self.do_number(width))
        text = data.decode("utf-8", "surrogatepass")
        self.do_push(text, TUPLE + len(data) + (0 if text.isascii() else WIDE * len(text)))

    def do_bytes(self, width: int) -> None:
        value = self.do_take(self.do_number(width))
        self.do_push(value, NUMBER + len(value))

    def do_int(self) -> None:
        self.do_push(int.from_bytes(self.do_take(4), "little", signed=True), NUMBER)

    def do_long(self, width: int) -> None:
        count = self.do_number(width)
        if count > LONGEST:
            raise Corrupt(f"pickle: a number of {count} bytes at byte {self.at}")
        self.do_push(int.from_bytes(self.do_take(count), "little", signed=True), NUMBER + 2 * count)

    def do_decimal(self) -> None:
        line = self.do_line()
        self.do_push({"00": False, "01": True}.get(line) if line in ("00", "01") else int(line), NUMBER + len(line))

    def do_float(self) -> None:
        self.do_push(struct.unpack(">d", self.do_take(8))[0], NUMBER)

    # memo, marks

    def do_memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def do_put(self, width: int) -> None:
        self.put(self.do_number(width))

    def put(self, index: int) -> None:
        """Remember the top of the stack.  What a list remembers never changes."""
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
            return
        if type(self.memo) is list:
            self.memo = Sparse(enumerate(self.memo))
        self.memo[index] = self.stack[-1]
        self.room -= ENTRY

    def do_get(self, width: int) -> None:
        self.do_push(recalled(self.memo[self.do_number(width)]))

    def do_mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []
        self.room -= LIST

    def do_pop(self) -> None:
        self.stack.pop()

    def do_since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        if self.stack and self.stack[-1] is GONE:
            raise Corrupt("pickle: an object's attributes are not set")
        return items

    # containers

    def do_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise Corrupt("pickle: a tuple of more than there is")
        self.stack[-count:] = [tuple(self.stack[-count:])]
        self.room -= TUPLE

    def do_tuple_from_mark(self) -> None:
        items = self.do_since_mark()
        self.do_push(tuple(items), TUPLE + REFERENCE * len(items))

    def do_list_from_mark(self) -> None:
        items = self.do_since_mark()
        self.do_push(items, LIST + REFERENCE * len(items))

    def do_append(self) -> None:
        value = self.stack.pop()
        _into(self.stack[-1], list).append(value)
        self.room -= REFERENCE

    def do_appends(self) -> None:
        items = self.do_since_mark()
        _into(self.stack[-1], list).extend(items)
        self.room -= REFERENCE * len(items)

    def do_dict_from_mark(self) -> None:
        items = self.do_since_mark()
        self.do_push({}, DICT)
        self.set_items(items)

    def do_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def do_setitems(self) -> None:
        self.set_items(self.do_since_mark())

    def set_items(self, items: list[Any]) -> None:
        """``[key, value, key, value, …]`` into the dictionary on top of the stack."""
        target = _into(self.stack[-1], dict)
        keys = items[::2]
        self.check_keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def do_additems(self) -> None:
        items = self.do_since_mark()
        self.check_keys(items)
        _into(self.stack[-1], set).update(items)

    def do_frozenset(self) -> None:
        items = self.do_since_mark()
        self.check_keys(items)
        self.do_push(frozenset(items), DICT)

    def check_keys(self, keys: list[Any]) -> None:
        """Raise Corrupt for what no checkpoint has as a key, before it is hashed; pay for entries, and for what is hashed and compared."""
        kinds = set(map(type, keys))
        if kinds == {str}:
            self.spend(ENTRY * len(keys) + sum(map(len, keys)))
        elif all(issubclass(kind, Stated) for kind in kinds):
            self.spend(ENTRY * len(keys))
        else:
            for key in keys:
                self._check_key(key)

    def _check_key(self, key: Any) -> None:
        parts = key if type(key) is tuple else (key,)
        if len(parts) > LONGEST_KEY or not all(map(_is_key, set(map(type, parts)))):
            raise Corrupt("pickle: a dictionary key that no checkpoint has")
        self.spend(ENTRY + REFERENCE * len(parts) + sum(len(part) for part in parts if type(part) in (str, bytes)))
        if type(key) is tuple or (type(key) is int and abs(key) >= _OWN_HASH):
            alike = self.alike.setdefault(hash(key), [])
            if key not in alike:
                alike.append(key)
                self.spend(ENTRY + LIST)
            if len(alike) > ALIKE:
                raise Corrupt(f"pickle: more than {ALIKE} dictionary keys of one hash", hint="it was made to keep its reader busy")

    # names and calls

    def do_name(self, name: Name) -> None:
        build = self.allowed.get(name)
        if build is None:
            raise Unsupported(
                f"pickle: names {_word(name.module)}.{_word(name.name)}, which is not among the names that this format has",
                hint="nothing in it was run; if you trust the file and know its format, report the name",
            )
        known = self.names.setdefault(name, name)
        if isinstance(build, type) and issubclass(build, Stated):
            self.kinds[id(known)] = build
        else:
            self.builds[id(known)] = self._ordered if build is ordered else build
        self.do_push(known, NAME)

    def do_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.do_name(Name(_as(module, str), _as(name, str)))

    def do_call(self) -> None:
        args, name = _as(self.stack.pop(), tuple), _as(self.stack.pop(), Name)
        kind = self.kinds.get(id(name))
        if kind is None:
            value = self.builds[id(name)](name, args)
            self.do_push(value, OBJECT + (REFERENCE * len(value) if type(value) is tuple else 0))
        elif args:
            raise Corrupt(f"pickle: {name} is called with arguments")
        else:
            made = kind()
            self.unset[id(made)] = made
            self.do_push(made, OBJECT + ENTRY)

    def _ordered(self, _: Name, args: tuple[Any, ...]) -> dict[Any, Any]:
        """A copy of a dictionary, or one of pairs, as Python 2 wrote it."""
        given = args[0] if args else {}
        if type(given) is dict:
            self.spend(DICT + ENTRY * len(given))
            return dict(given)
        self.spend(DICT + 2 * REFERENCE * len(_as(given, list)))
        if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in given):
            raise Corrupt("pickle: an OrderedDict of something else than pairs")
        keys = [key for key, _ in given]
        self.check_keys(keys)
        return dict(zip(keys, [value for _, value in given], strict=True))

    def do_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Made) and target.state is None:
            target.state = state
        elif isinstance(target, Stated):
            if self.unset.pop(id(target), None) is None:
                raise Corrupt("pickle: an object's attributes are set twice")
            self.spend(ENTRY * len(_as(state, dict)))
            target.take([one for pair in state.items() for one in pair])
            self.spend(REFERENCE * target.count())
        elif not (
            isinstance(target, dict) and isinstance(state, dict)
        ):  # an OrderedDict's attributes (torch sets `_metadata`) say nothing about tensors
            raise Corrupt("pickle: state for something that has none")

    def do_persid(self) -> None:
        if self.persistent is None:
            raise Unsupported("pickle: has persistent ids where this format has none")
        self.do_push(self.persistent(self.stack.pop()), OBJECT)


def recalled(value: Any) -> Any:
    """What the memo had; raises Corrupt if that was not kept."""
    if value is GONE:
        raise Corrupt("pickle: the attributes of an object are mentioned again")
    return value


def _word(text: str) -> str:
    """For an error's one line."""
    return text[:100].encode("unicode_escape").decode()


def _as(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise Corrupt(f"pickle: a {type(value).__name__} where a {kind.__name__} is due")
    return value


def _into(target: Any, kind: type[Any]) -> Any:
    """What items go into: of an unknown class nobody asks for them."""
    return kind() if type(target) is Unknown else _as(target, kind)


def _is_key(kind: type[Any]) -> bool:
    return kind in _KEYS or issubclass(kind, Stated)
