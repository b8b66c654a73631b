"""Read pickles without running them: rebuild their values, and call none of their classes.

No name in a pickle is imported.  A caller gives the exact names that it accepts and, for each, a
constructor of plain values; any other name, opcode, persistent id or odd dictionary key is refused.
The machine is not a subclass of `pickle.Unpickler`, because that one allocates by the numbers that
it is given (a memo index of four bytes can ask for gigabytes) and hashes whatever stands as a key
(nested tuples hash in exponential time).  Memory and work are bounded by the size of the file:
values, copies and dictionary keys are charged to `_Machine.room`.

It is one loop.  A ``.metadata`` of 100,000 chunks has eight million opcodes, so frequent opcodes
are done in the loop itself, and objects that are there by the million are made without the
dictionary of their attributes (`Stated`).

Opcodes: CPython's ``pickletools``; protocols 2 to 5 as ``torch.save`` and ``pickle.dump`` write
them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.gc_pause import paused

MAX_BYTES = 256 << 20
# Bytes that all values of one pickle may take, those that it drops included, so that work is
# bounded too: so many whatever its size, so many for each of its bytes (real ones take 3 to 16),
# and at most.  A `.metadata` takes 6 to 7, so that one of 700,000 chunks is read, at least.
FLOOR, FACTOR, MOST = 64 << 20, 32, 1 << 30
ALIKE = 64  # keys of one hash: each is compared with all others
_DEEPEST = 10_000
_LONGEST_NUMBER = 255  # bytes of a whole number: an error that names it must be able to print it
_LONGEST_KEY = 64  # elements of a tuple that is a key
# whole numbers below this are their own hashes, those from there on may be chosen to have any
_OWN_HASH = (1 << 61) - 1
_DAMAGES = (
    *(IndexError, ValueError, TypeError, KeyError, struct.error, AttributeError),
    *(OverflowError, MemoryError, RecursionError),
)
_PAUSE = 1 << 16  # steps between two checks of the memory that values take
# What values take at most in CPython, in bytes, with their share of what a container keeps free for
# more.
_REFERENCE, _NUMBER, _TUPLE, _LIST, _OBJECT, _DICT = 8, 40, 64, 72, 64, 232
_ENTRY, _WIDE, _NAME = 100, 3, 400


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a pickle mentions, as words."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledObject:
    """The arguments and the state with which a pickle would call ``name``, as plain values."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None


class Unknown(PickledObject):
    """A `PickledObject` of an unknown class; what the pickle adds to it afterwards is dropped."""

    __slots__ = ()


class Stated:
    """The base of classes whose objects are made without arguments and then get attributes.

    A layout that has such objects by the million derives a class and declares it in place of a
    constructor.  The machine makes it with no arguments and calls `take` with names and values by
    turns, once; the dictionary that held them is not kept.
    """

    __slots__ = ()

    def take(self, items: list[Any]) -> None:
        """Become what ``[name, value, name, value, …]`` says.

        Raises Corrupt if that is not what the class has.

        Names are not checked yet: they may be anything that a pickle can hold, or given twice, and
        must not be hashed before.
        """
        raise NotImplementedError

    def count(self) -> int:
        """Return the length of the list that the object took; a shared one is counted again."""
        return 0


Build = Callable[[Name, tuple[Any, ...]], Any] | type[Stated]
"""A constructor: a function of the name and its arguments, or a class."""


def made(name: Name, args: tuple[Any, ...]) -> PickledObject:
    """Return the arguments as they are: the constructor for names that need none."""
    return PickledObject(name, args)


def all_made(names: Mapping[str, Sequence[str]]) -> dict[Name, Build]:
    """Return `made` for the names of each module."""
    return {Name(module, name): made for module, each in names.items() for name in each}


def ordered(_: Name, args: tuple[Any, ...]) -> dict[Any, Any]:
    """Stand for ``collections.OrderedDict`` among the allowed names; the machine makes it."""
    raise Corrupt(f"pickle: an OrderedDict of {len(args)} values, outside a pickle")


class AnyClass(dict[Name, Build]):
    """Known names with their constructors, and `Unknown` for a script's own classes."""

    def get(self, name: Name, _: object = None) -> Build:
        """Return the constructor; there is one for every name, so no default is used."""
        return super().get(name) or Unknown


def loads(
    data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, int]:
    """Return the value in ``data`` and the number of bytes that its pickle takes.

    Raises Unsupported for a name that is not ``allowed``, Corrupt for anything that is no pickle of
    a checkpoint.
    """
    if len(data) > MAX_BYTES:
        raise Corrupt(f"pickle: {len(data)} bytes, at most {MAX_BYTES} expected")
    machine = _Machine(data, allowed, persistent or _no_persistent)
    try:
        with paused():
            return machine.run(), machine.at
    except _DAMAGES as e:
        raise Corrupt(f"pickle: damaged at byte {machine.at}: {type(e).__name__}: {e}") from e
    finally:
        machine.builds.clear()  # it holds methods of the machine, which would keep its memo


def brief(value: Any) -> str:
    """Return a value of a pickle for an error's text.

    A number or a short text is shown as it is, anything else by its kind.

    Never ``repr``: nested tuples that share their parts print for ever, deep ones overflow the
    stack, and integers may be endless.
    """
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int and value.bit_length() <= 64:
        return repr(value)
    if type(value) is str:
        return repr(value[:60])
    if (
        type(value) in (tuple, list)
        and len(value) <= 4
        and not any(type(v) in (tuple, list) for v in value)
    ):
        return f"({', '.join(map(brief, value))})"
    return f"a {type(value).__name__}"


def with_unknown(value: dict[Any, Any]) -> set[Any]:
    """Return the keys under which an `Unknown` lies, at any depth."""
    waiting: list[Any] = [value]
    seen, holders = {id(value)}, dict[int, list[int]]()  # value → those that it lies in
    odd: list[int] = []
    while waiting:
        at = waiting.pop()
        inner = (
            [at.args, at.state]
            if isinstance(at, PickledObject)
            else [*at, *at.values()]
            if isinstance(at, dict)
            else at
        )
        for one in inner:
            if not isinstance(one, (dict, list, tuple, set, frozenset, PickledObject)):
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


# in memo and stack, for a value that was dropped: the dictionary of a `Stated` object's attributes
_GONE: Any = object()
_KEYS = frozenset({str, int, float, bool, bytes, type(None), PickledObject, Name, Unknown})
_STOP, _MARK, _EMPTY_TUPLE, _EMPTY_DICT, _EMPTY_LIST, _NONE, _FALSE = b".()}]N\x89"
_GET1, _GET4, _PUT1, _PUT4, _MEMOIZE = b"hjqr\x94"
_INT4, _INT1, _INT2, _TEXT1, _TEXT4 = b"JKM\x8cX"
_TUPLE_FROM_MARK, _TUPLE1, _TUPLE2 = b"t\x85\x86"
_BUILD, _NEWOBJ, _PERSISTENT, _REDUCE, _SETITEMS = b"b\x81QRu"
# behind a class and (): an object without arguments, and its attributes begin
_ATTRIBUTES = b"\x81\x94}\x94("
_LONG = struct.Struct("<I").unpack_from
_SIGNED = struct.Struct("<i").unpack_from


class _Machine:
    """The machine that reads one pickle.

    ``at`` counts bytes read; ``marks`` are the stacks below the marks; ``room`` is the memory that
    is left for values.
    """

    def __init__(
        self, data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any]
    ) -> None:
        self.data, self.allowed, self.persistent = data, allowed, persistent
        self.at, self.room = 0, min(MOST, FLOOR + FACTOR * len(data))
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        # every mention of a name is one object, and its id finds what to do with it
        self.names: dict[Name, Name] = {}
        self.builds: dict[int, Callable[[Name, tuple[Any, ...]], Any]] = {}
        self.kinds: dict[int, type[Stated]] = {}
        # objects without attributes yet, by their ids
        self.unset: dict[int, Stated] = {}
        # keys whose hashes anyone can choose, by these
        self.alike: dict[int, list[Any]] = {}

    def run(self) -> Any:  # noqa: PLR0915
        """Return the value; ``at`` is then behind its end."""
        data, size, memo, marks = self.data, len(self.data), self.memo, self.marks
        builds, kinds = self.builds, self.kinds
        persistent = self.persistent
        stack, at, spent = self.stack, 0, 0
        value: Any
        try:
            while True:
                for _ in repeat(None, _PAUSE):
                    code = data[at]
                    at += 1
                    if code == _MEMOIZE:
                        memo.append(stack[-1])
                    elif code == _GET4 or code == _GET1:  # noqa: PLR1714, SIM109  a tuple would be made at each turn
                        if code == _GET1:
                            value = memo[data[at]]
                            at += 1
                        else:
                            value = memo[_LONG(data, at)[0]]
                            at += 4
                        if value is _GONE:
                            raise Corrupt("pickle: the attributes of an object are mentioned again")
                        stack.append(value)
                    elif code == _PUT4 or code == _PUT1:  # noqa: PLR1714, SIM109
                        if code == _PUT1:
                            index = data[at]
                            at += 1
                        else:
                            index = _LONG(data, at)[0]
                            at += 4
                        if index != len(memo):
                            self.skip(index)
                        memo.append(stack[-1])
                    elif code == _INT1:
                        stack.append(data[at])
                        at += 1
                    elif code == _TUPLE2:
                        value = stack.pop()
                        stack.append((stack.pop(), value))
                        spent += _TUPLE
                    elif code == _TUPLE1:
                        stack.append((stack.pop(),))
                        spent += _TUPLE
                    elif code == _REDUCE or code == _NEWOBJ:  # noqa: PLR1714, SIM109
                        args, name = stack.pop(), stack[-1]
                        if type(args) is not tuple or id(name) not in builds:
                            raise Corrupt(
                                "pickle: calls something that is not a known name, or with"
                                " arguments that are not a tuple"
                            )
                        stack[-1] = value = builds[id(name)](name, args)
                        if type(value) is not tuple:
                            spent += _OBJECT
                        elif not args or value is not args[0]:  # else a torch.Size of a tuple
                            spent += _OBJECT + _REFERENCE * len(value)
                    elif code == _TEXT1 or code == _TEXT4:  # noqa: PLR1714, SIM109
                        if code == _TEXT1:
                            start = at + 1
                            at = start + data[at]
                        else:
                            start = at + 4
                            at = start + _LONG(data, at)[0]
                        if at > size:
                            raise Corrupt(f"pickle: ends at byte {size}, expected at least {at}")
                        value = data[start:at].decode("utf-8", "surrogatepass")
                        stack.append(value)
                        spent += _TUPLE + at - start
                        if not value.isascii():
                            spent += _WIDE * len(value)
                        if data[at] == _MEMOIZE:
                            at += 1
                            memo.append(value)
                    elif code == _EMPTY_TUPLE:
                        if data[at : at + 5] == _ATTRIBUTES and id(stack[-1]) in kinds:
                            at += 5
                            stack[-1] = value = self.new(stack[-1], ())
                            stack.append(_GONE)
                            memo += value, _GONE
                            spent += _OBJECT
                            marks.append(stack)
                            stack = []
                        else:
                            stack.append(())
                    elif code == _SETITEMS:
                        items, stack = stack, marks.pop()
                        value = stack[-1]
                        if value is _GONE and data[at] == _BUILD:
                            at += 1
                            del stack[-1]
                            self.finish(stack[-1], items)
                        else:
                            self.stack = stack
                            self.set_items(items)
                    elif code == _INT4:
                        stack.append(_SIGNED(data, at)[0])
                        at += 4
                        spent += _NUMBER
                    elif code == _INT2:
                        stack.append(data[at] | data[at + 1] << 8)
                        at += 2
                        spent += _NUMBER
                    elif code == _MARK:
                        marks.append(stack)
                        stack = []
                        spent += _LIST
                    elif code == _TUPLE_FROM_MARK:
                        value = tuple(stack)
                        stack = marks.pop()
                        stack.append(value)
                        spent += _TUPLE + _REFERENCE * len(value)
                    elif code == _PERSISTENT:
                        stack[-1] = persistent(stack[-1])
                        spent += _OBJECT
                    elif code == _NONE:
                        stack.append(None)
                    elif code == _FALSE:
                        stack.append(False)
                    elif code == _EMPTY_DICT:
                        stack.append({})
                        spent += _DICT
                    elif code == _EMPTY_LIST:
                        stack.append([])
                        spent += _LIST
                    else:
                        self.stack, self.at = stack, at
                        if code == _STOP:
                            self.room -= spent
                            return self.result()
                        _RARE[code](self)
                        stack, at = self.stack, self.at
                self.stack = stack
                self.room -= spent
                spent = 0
                self.check_room()
        finally:
            self.at = max(self.at, at)

    def result(self) -> Any:
        """Return the value, behind the STOP opcode."""
        self.check_room()
        if len(self.stack) != 1 or self.marks:
            raise Corrupt("pickle: does not end in one value")
        if self.unset:
            raise Corrupt("pickle: an object's attributes are not set")
        return self.stack[0]

    def check_room(self) -> None:
        """Raise Corrupt if the values take too much memory or are nested too deeply."""
        if len(self.marks) > _DEEPEST:
            raise Corrupt(
                f"pickle: {len(self.marks)} values within each other, at most {_DEEPEST} expected"
            )
        if self.room < _REFERENCE * (len(self.memo) + len(self.stack) + sum(map(len, self.marks))):
            most = min(MOST, FLOOR + FACTOR * len(self.data))
            raise Corrupt(
                f"pickle: its values take more than {most >> 20} MiB, of {len(self.data)} bytes",
                hint="no real checkpoint needs that much memory; the file may be malicious",
            )

    def spend(self, cost: int) -> None:
        """Take from the room what something may need much of at once: memory, or as much work."""
        self.room -= cost
        if self.room < 0:
            self.check_room()

    # objects of declared classes

    def new(self, name: Name, args: tuple[Any, ...]) -> Stated:
        """Return a new object, which has no attributes yet."""
        if args:
            raise Corrupt(f"pickle: {name} is called with arguments")
        value = self.kinds[id(name)]()
        self.unset[id(value)] = value
        self.room -= _ENTRY  # until it has its attributes
        return value

    def finish(self, value: Stated, items: list[Any]) -> None:
        """Give an object its attributes, by names and values in turn."""
        if self.unset.pop(id(value), None) is None:
            raise Corrupt("pickle: an object's attributes are set twice")
        self.room += _ENTRY
        value.take(items)
        self.spend(_REFERENCE * value.count())

    # arguments of opcodes

    def take(self, count: int) -> bytes:
        start = self.at
        self.at = start + count
        if self.at > len(self.data):
            raise Corrupt(f"pickle: ends at byte {len(self.data)}, expected at least {self.at}")
        return self.data[start : self.at]

    def line(self) -> str:
        line = self.take(self.data.index(b"\n", self.at) - self.at)
        self.at += 1
        return line.decode()

    def count(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    # opcodes that are rare

    def protocol(self) -> None:
        number = self.count(1)
        if number > 5:
            raise Unsupported(f"pickle: protocol {number}, at most 5 is known")

    def push(self, value: Any, cost: int = _REFERENCE) -> None:
        self.stack.append(value)
        self.room -= cost

    def bytestring(self, width: int) -> None:
        value = self.take(self.count(width))
        self.push(value, _NUMBER + len(value))

    def long(self, width: int) -> None:
        count = self.count(width)
        if count > _LONGEST_NUMBER:
            raise Corrupt(f"pickle: a number of {count} bytes at byte {self.at}")
        self.push(int.from_bytes(self.take(count), "little", signed=True), _NUMBER + 2 * count)

    def decimal(self) -> None:
        line = self.line()
        self.push(
            {"00": False, "01": True}[line] if line in ("00", "01") else int(line),
            _NUMBER + len(line),
        )

    def skip(self, index: int) -> None:
        """Leave out memo entries before ``index``: Python 2 counts from 1."""
        if index < len(self.memo):
            raise Corrupt(f"pickle: the memo's index {index} is given twice")
        self.spend(_REFERENCE * (index - len(self.memo)))
        self.memo += [_GONE] * (index - len(self.memo))

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def popped(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count:
            raise Corrupt("pickle: an opcode takes more values than there are")
        del self.stack[-count:]
        return items

    def extend(self, items: list[Any]) -> None:
        _into(self.stack[-1], list).extend(items)
        self.room -= _REFERENCE * len(items)

    def set_items(self, items: list[Any]) -> None:
        """Put ``[key, value, key, value, …]`` into the dictionary on top of the stack."""
        target, keys = _into(self.stack[-1], dict), items[::2]
        self.check_keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        self.check_keys(items)
        _into(self.stack[-1], set).update(items)

    def frozenset(self, items: list[Any]) -> None:
        self.check_keys(items)
        self.push(frozenset(items), _DICT)

    def check_keys(self, keys: list[Any]) -> None:
        """Raise Corrupt for what no checkpoint has as a key, before it is hashed; charge for it."""
        kinds = set(map(type, keys))
        if kinds == {str}:
            self.spend(_ENTRY * len(keys) + sum(map(len, keys)))
        elif all(issubclass(kind, Stated) for kind in kinds):
            self.spend(_ENTRY * len(keys))
        else:
            for key in keys:
                self.check_key(key)

    def check_key(self, key: Any) -> None:
        parts = key if type(key) is tuple else (key,)
        if len(parts) > _LONGEST_KEY or not all(
            kind in _KEYS or issubclass(kind, Stated) for kind in set(map(type, parts))
        ):
            raise Corrupt("pickle: a dictionary key that no checkpoint has")
        self.spend(
            _ENTRY
            + _REFERENCE * len(parts)
            + sum(len(part) for part in parts if type(part) in (str, bytes))
        )
        if type(key) is tuple or (type(key) is int and abs(key) >= _OWN_HASH):
            alike = self.alike.setdefault(hash(key), [])
            if key not in alike:
                alike.append(key)
                self.spend(_ENTRY + _LIST)
            if len(alike) > ALIKE:
                raise Corrupt(
                    f"pickle: more than {ALIKE} dictionary keys of one hash",
                    hint="the file may be malicious: it would keep a reader busy for very long",
                )

    # names, calls and state

    def name(self, name: Name) -> None:
        build = self.allowed.get(name)
        if build is None:
            raise Unsupported(
                f"pickle: uses {_word(name.module)}.{_word(name.name)}, which this format does"
                " not allow",
                hint=(
                    "nothing in it was run; save plain tensors, numbers and text alone, or report"
                    " the name if a framework writes such files"
                ),
            )
        known = self.names.setdefault(name, name)
        if isinstance(build, type) and issubclass(build, Stated):
            self.kinds[id(known)], build = build, self.new
        self.builds[id(known)] = self.ordered if build is ordered else build
        self.push(known, _NAME)

    def ordered(self, _: Name, args: tuple[Any, ...]) -> dict[Any, Any]:
        """Copy a dictionary, or make one of pairs, as Python 2 wrote it."""
        if not args:
            self.room -= _DICT
            return {}
        given = args[0]
        self.spend(_DICT + 2 * _REFERENCE * len(given))
        pairs = list(given.items()) if type(given) is dict else _as(given, list)
        if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            raise Corrupt("pickle: an OrderedDict of something else than pairs")
        self.check_keys([key for key, _ in pairs])
        return dict(pairs)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, PickledObject) and target.state is None:
            target.state = state
        elif isinstance(target, Stated):
            self.spend(_ENTRY * len(_as(state, dict)))
            self.finish(target, [*chain.from_iterable(state.items())])
        # an OrderedDict's attributes say nothing about tensors
        elif type(target) is not dict or type(state) is not dict:
            raise Corrupt("pickle: state for something that has none")


def _refuse(machine: _Machine) -> None:
    # no framework writes one: bytes that were damaged, or made by hand
    raise Corrupt(f"pickle: the opcode at byte {machine.at - 1} is not one that checkpoints use")


# Opcodes that the loop leaves to methods, each under its letter in CPython's pickle.py.
_OPCODES: dict[bytes, Callable[[_Machine], object]] = {
    b"\x80": _Machine.protocol,
    b"\x95": lambda m: m.take(8),
    b"0": lambda m: m.popped(1),
    b"1": _Machine.since_mark,
    b"\x88": lambda m: m.push(True),  # noqa: FBT003
    b"I": _Machine.decimal,
    b"\x8a": lambda m: m.long(1),
    b"\x8b": lambda m: m.long(4),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0], _NUMBER),
    b"B": lambda m: m.bytestring(4),
    b"C": lambda m: m.bytestring(1),
    b"\x87": lambda m: m.push(tuple(m.popped(3)), _TUPLE),
    b"a": lambda m: m.extend(m.popped(1)),
    b"e": lambda m: m.extend(m.since_mark()),
    b"s": lambda m: m.set_items(m.popped(2)),
    b"\x8f": lambda m: m.push(set(), _DICT),
    b"\x90": lambda m: m.add_items(m.since_mark()),
    b"\x91": lambda m: m.frozenset(m.since_mark()),
    b"c": lambda m: m.name(Name(m.line(), m.line())),
    b"\x93": lambda m: m.name(Name(*[_as(word, str) for word in m.popped(2)])),
    b"b": _Machine.build,
}
_RARE = [_OPCODES.get(bytes([code]), _refuse) for code in range(256)]


def _no_persistent(_: Any) -> Any:
    raise Unsupported("pickle: has persistent ids where this format has none")


def _word(text: str) -> str:
    """Return a name for an error's one line."""
    return text[:100].encode("unicode_escape").decode()


def _as(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise Corrupt(f"pickle: a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _into(target: Any, kind: type[Any]) -> Any:
    """Return the container to fill; a throwaway one for an unknown class."""
    return kind() if type(target) is Unknown else _as(target, kind)
