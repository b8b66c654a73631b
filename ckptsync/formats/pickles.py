"""Read pickles without running them: rebuild their values, and call none of their classes.

No name in a pickle is imported. A caller passes the exact names that it accepts and, for each, a
constructor of plain values; any other name, opcode, persistent id or odd dictionary key is refused.
The machine is not a subclass of `pickle.Unpickler`, which allocates by the numbers in the file (a
memo index of four bytes can ask for gigabytes) and hashes any key (nested tuples hash in
exponential time). Memory and work are bounded by the size of the file: values, copies and
dictionary keys are charged to `_Machine.room`.

The machine is one loop, for speed. A ``.metadata`` of 100,000 chunks has eight million opcodes, so
the loop itself does frequent opcodes, and objects that exist by the million are made without the
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
# Bytes that all values of one pickle may take, also those that it drops, so that work is bounded,
# too: FLOOR + FACTOR for each byte of the pickle, at most MOST. Real pickles take 3 to 16 for each
# byte; a `.metadata` takes 6 to 7, so that one of at least 700,000 chunks is read.
FLOOR, FACTOR, MOST = 64 << 20, 32, 1 << 30
ALIKE = 64  # keys of one hash: each is compared with all of them
_DEEPEST = 10_000
_LONGEST_NUMBER = 255  # bytes of a whole number: an error that names it must be able to print it
_LONGEST_KEY = 64  # elements of a tuple that is a key
# whole numbers below this are their own hashes; larger ones may be chosen to have equal hashes
_OWN_HASH = (1 << 61) - 1
_DAMAGES = (
    *(IndexError, ValueError, TypeError, KeyError, struct.error, AttributeError),
    *(OverflowError, MemoryError, RecursionError),
)
_PAUSE = 1 << 16  # steps between two checks of the memory that values take
# Bytes that values take at most in CPython, with their share of the spare room of a container.
_REFERENCE, _NUMBER, _TUPLE, _LIST, _OBJECT, _DICT = 8, 40, 64, 72, 64, 232
_ENTRY, _WIDE, _NAME = 100, 3, 400


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a pickle mentions: module and name as text, not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledObject:
    """The arguments and the state with which a pickle would make a ``name``, as plain values."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None


class Unknown(PickledObject):
    """A `PickledObject` of an unknown class.

    List, set and dictionary items added to it are dropped.
    """

    __slots__ = ()


class Stated:
    """The base of classes whose objects a pickle makes without arguments and then gives attributes.

    A layout that has such objects by the million derives a class and declares it in place of a
    constructor. The machine makes it with no arguments and calls `take` once, with names and values
    in turn; the dictionary that held them is not kept.
    """

    __slots__ = ()

    def take(self, items: list[Any]) -> None:
        """Set the attributes from ``[name, value, name, value, …]``.

        Raise Corrupt if they do not fit.

        Names are not checked yet: they may be anything that a pickle can hold, or be repeated, and
        must not be hashed before their type is checked.
        """
        raise NotImplementedError

    def count(self) -> int:
        """Return the length of the list that the object took: a shared list is charged again."""
        return 0


Build = Callable[[Name, tuple[Any, ...]], Any] | type[Stated]
"""A constructor: a function of the name and its arguments, or a class."""


def made(name: Name, args: tuple[Any, ...]) -> PickledObject:
    """Return a `PickledObject` without state: the constructor for names that need no other."""
    return PickledObject(name, args)


def all_made(names: Mapping[str, Sequence[str]]) -> dict[Name, Build]:
    """Return a table in which `made` is the constructor of the names of each module."""
    return {Name(module, name): made for module, members in names.items() for name in members}


def ordered(_: Name, args: tuple[Any, ...]) -> dict[Any, Any]:
    """Stand for ``collections.OrderedDict`` in a table; the machine uses its own method instead.

    Raises Corrupt if it is called.
    """
    raise Corrupt(f"pickle: an OrderedDict of {len(args)} values, outside a pickle")


class AnyClass(dict[Name, Build]):
    """A table of known names that has `Unknown` as the constructor of all others."""

    def get(self, name: Name, _: object = None) -> Build:
        """Return the constructor of a name; `Unknown` if the table has none."""
        return super().get(name) or Unknown


def loads(
    data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, int]:
    """Return the value in ``data``, and the number of bytes that its pickle takes.

    Bytes after its end are ignored. ``persistent`` makes values of persistent ids. The garbage
    collector is paused meanwhile. Raise Unsupported for a name that is not ``allowed``, a protocol
    above 5, or a persistent id without ``persistent``; Corrupt for damage, an opcode or key that no
    checkpoint has, and for what exceeds `MAX_BYTES` or the memory limit.
    """
    if len(data) > MAX_BYTES:
        raise Corrupt(f"pickle: {len(data)} bytes, at most {MAX_BYTES} expected")
    machine = _Machine(data, allowed, persistent or _no_persistent)
    try:
        with paused():
            return machine.run(), machine.position
    except _DAMAGES as e:
        raise Corrupt(f"pickle: damaged at byte {machine.position}: {type(e).__name__}: {e}") from e
    finally:
        machine.builds.clear()  # its methods refer to the machine, and so to its memo


def brief(value: Any) -> str:
    """Return a value of a pickle as short text, for an error.

    None, bools, floats, integers of at most 64 bits and the first 60 characters of a text are shown
    by ``repr``. So are the elements of a list or tuple of at most 4, none of them a list or tuple.
    Anything else is shown by its type: ``repr`` of nested or huge values may not end.
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
    """Return the keys of a dictionary whose key or value is or contains an `Unknown`.

    Containers and `PickledObject` are searched at any depth, cycles too; `Stated` objects are not.
    """
    waiting: list[Any] = [value]
    visited, holders = {id(value)}, dict[int, list[int]]()  # value → those that it lies in
    unknowns: list[int] = []
    while waiting:
        container = waiting.pop()
        inner = (
            [container.args, container.state]
            if isinstance(container, PickledObject)
            else [*container, *container.values()]
            if isinstance(container, dict)
            else container
        )
        for item in inner:
            if not isinstance(item, (dict, list, tuple, set, frozenset, PickledObject)):
                continue
            holders.setdefault(id(item), []).append(id(container))
            if id(item) not in visited:
                visited.add(id(item))
                waiting.append(item)
                if isinstance(item, Unknown):
                    unknowns.append(id(item))
    reached = set(unknowns)
    while unknowns:
        for holder in holders.get(unknowns.pop(), ()):
            if holder not in reached:
                reached.add(holder)
                unknowns.append(holder)
    return {key for key, item in value.items() if id(item) in reached or id(key) in reached}


# in memo and stack, in place of a dropped value: the dictionary of a `Stated` object's attributes
_GONE: Any = object()
_KEYS = frozenset({str, int, float, bool, bytes, type(None), PickledObject, Name, Unknown})
_STOP, _MARK, _EMPTY_TUPLE, _EMPTY_DICT, _EMPTY_LIST, _NONE, _FALSE = b".()}]N\x89"
_GET1, _GET4, _PUT1, _PUT4, _MEMOIZE = b"hjqr\x94"
_INT4, _INT1, _INT2, _TEXT1, _TEXT4 = b"JKM\x8cX"
_TUPLE_FROM_MARK, _TUPLE1, _TUPLE2 = b"t\x85\x86"
_BUILD, _NEWOBJ, _PERSISTENT, _REDUCE, _SETITEMS = b"b\x81QRu"
# the opcodes after a class and (): make the object, and begin its attributes
_ATTRIBUTES = b"\x81\x94}\x94("
_LONG = struct.Struct("<I").unpack_from
_SIGNED = struct.Struct("<i").unpack_from


class _Machine:
    """The machine that reads one pickle.

    ``position`` counts the bytes read; ``marks`` are the stacks below the marks; ``room`` is the
    memory that is left for values. Its methods raise Corrupt, or Unsupported for a name or protocol
    that is not known.
    """

    def __init__(
        self, data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any]
    ) -> None:
        self.data, self.allowed, self.persistent = data, allowed, persistent
        self.position, self.room = 0, min(MOST, FLOOR + FACTOR * len(data))
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        # all mentions of a name are one object; its id finds the constructor
        self.names: dict[Name, Name] = {}
        self.builds: dict[int, Callable[[Name, tuple[Any, ...]], Any]] = {}
        self.kinds: dict[int, type[Stated]] = {}
        # objects that have no attributes yet, by their ids
        self.unset: dict[int, Stated] = {}
        # keys whose hashes a hostile file can choose, by hash
        self.equal_hashes: dict[int, list[Any]] = {}

    def run(self) -> Any:  # noqa: PLR0915
        """Return the value; ``position`` is then behind the STOP opcode, or where an error arose.

        Call it once. Raise Corrupt or Unsupported for what no checkpoint has, Corrupt if values
        exceed ``room`` (checked every `_PAUSE` opcodes), and `_DAMAGES` for damage.
        """
        data, size, memo, marks = self.data, len(self.data), self.memo, self.marks
        builds, kinds = self.builds, self.kinds
        persistent = self.persistent
        stack, position, spent = self.stack, 0, 0
        value: Any
        try:
            while True:
                for _ in repeat(None, _PAUSE):
                    code = data[position]
                    position += 1
                    if code == _MEMOIZE:
                        memo.append(stack[-1])
                    elif code == _GET4 or code == _GET1:  # noqa: PLR1714, SIM109  `in` makes a tuple each time
                        if code == _GET1:
                            value = memo[data[position]]
                            position += 1
                        else:
                            value = memo[_LONG(data, position)[0]]
                            position += 4
                        if value is _GONE:
                            raise Corrupt("pickle: the attributes of an object are mentioned again")
                        stack.append(value)
                    elif code == _PUT4 or code == _PUT1:  # noqa: PLR1714, SIM109
                        if code == _PUT1:
                            index = data[position]
                            position += 1
                        else:
                            index = _LONG(data, position)[0]
                            position += 4
                        if index != len(memo):
                            self.skip(index)
                        memo.append(stack[-1])
                    elif code == _INT1:
                        stack.append(data[position])
                        position += 1
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
                            start = position + 1
                            position = start + data[position]
                        else:
                            start = position + 4
                            position = start + _LONG(data, position)[0]
                        if position > size:
                            raise Corrupt(
                                f"pickle: ends at byte {size}, expected at least {position}"
                            )
                        value = data[start:position].decode("utf-8", "surrogatepass")
                        stack.append(value)
                        spent += _TUPLE + position - start
                        if not value.isascii():
                            spent += _WIDE * len(value)
                        if data[position] == _MEMOIZE:
                            position += 1
                            memo.append(value)
                    elif code == _EMPTY_TUPLE:
                        if data[position : position + 5] == _ATTRIBUTES and id(stack[-1]) in kinds:
                            position += 5
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
                        if value is _GONE and data[position] == _BUILD:
                            position += 1
                            del stack[-1]
                            self.finish(stack[-1], items)
                        else:
                            self.stack = stack
                            self.set_items(items)
                    elif code == _INT4:
                        stack.append(_SIGNED(data, position)[0])
                        position += 4
                        spent += _NUMBER
                    elif code == _INT2:
                        stack.append(data[position] | data[position + 1] << 8)
                        position += 2
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
                        self.stack, self.position = stack, position
                        if code == _STOP:
                            self.room -= spent
                            return self.result()
                        _RARE[code](self)
                        stack, position = self.stack, self.position
                self.stack = stack
                self.room -= spent
                spent = 0
                self.check_room()
        finally:
            self.position = max(self.position, position)

    def result(self) -> Any:
        """Return the only value on the stack; raise Corrupt if not alone, not ready, or no room."""
        self.check_room()
        if len(self.stack) != 1 or self.marks:
            raise Corrupt("pickle: does not end in one value")
        if self.unset:
            raise Corrupt("pickle: an object's attributes are not set")
        return self.stack[0]

    def check_room(self) -> None:
        """Raise Corrupt if references exceed ``room``, or more than `_DEEPEST` marks are open."""
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
        """Take ``cost`` bytes from ``room``; raise Corrupt if it becomes negative."""
        self.room -= cost
        if self.room < 0:
            self.check_room()

    # objects of declared classes

    def new(self, name: Name, args: tuple[Any, ...]) -> Stated:
        """Return a new object and record it in ``unset``; raise Corrupt if there are arguments."""
        if args:
            raise Corrupt(f"pickle: {name} is called with arguments")
        value = self.kinds[id(name)]()
        self.unset[id(value)] = value
        self.room -= _ENTRY  # until it has its attributes
        return value

    def finish(self, value: Stated, items: list[Any]) -> None:
        """Give an object its attributes, names and values in turn, and remove it from ``unset``.

        Raise Corrupt if its attributes are set already, do not fit, or if there is no room.
        """
        if self.unset.pop(id(value), None) is None:
            raise Corrupt("pickle: an object's attributes are set twice")
        self.room += _ENTRY
        value.take(items)
        self.spend(_REFERENCE * value.count())

    # arguments of opcodes

    def take(self, count: int) -> bytes:
        """Return the next bytes, and move behind them; raise Corrupt if the data end before."""
        start = self.position
        self.position = start + count
        if self.position > len(self.data):
            raise Corrupt(
                f"pickle: ends at byte {len(self.data)}, expected at least {self.position}"
            )
        return self.data[start : self.position]

    def line(self) -> str:
        """Return the next line without newline, and move behind it; raise ValueError if none."""
        line = self.take(self.data.index(b"\n", self.position) - self.position)
        self.position += 1
        return line.decode()

    def count(self, width: int) -> int:
        """Return the next unsigned, little-endian number of ``width`` bytes; raise as `take`."""
        return int.from_bytes(self.take(width), "little")

    # opcodes that are rare

    def protocol(self) -> None:
        """Read the number of the protocol; raise Unsupported if it is above 5."""
        number = self.count(1)
        if number > 5:
            raise Unsupported(f"pickle: protocol {number}, at most 5 is known")

    def push(self, value: Any, cost: int = _REFERENCE) -> None:
        """Put a value on the stack, and charge for it without checking ``room``."""
        self.stack.append(value)
        self.room -= cost

    def bytestring(self, width: int) -> None:
        """Push bytes whose length is a number of ``width`` bytes; raise Corrupt if data end."""
        value = self.take(self.count(width))
        self.push(value, _NUMBER + len(value))

    def long(self, width: int) -> None:
        """Read a length of ``width`` bytes, and push the signed number of as many bytes behind it.

        Raise Corrupt if it has more than `_LONGEST_NUMBER` bytes, or if the data end.
        """
        count = self.count(width)
        if count > _LONGEST_NUMBER:
            raise Corrupt(f"pickle: a number of {count} bytes at byte {self.position}")
        self.push(int.from_bytes(self.take(count), "little", signed=True), _NUMBER + 2 * count)

    def decimal(self) -> None:
        """Push the number on the next line, or a bool for ``00`` and ``01``; raise ValueError."""
        line = self.line()
        self.push(
            {"00": False, "01": True}[line] if line in ("00", "01") else int(line),
            _NUMBER + len(line),
        )

    def skip(self, index: int) -> None:
        """Fill the memo with `_GONE` below ``index``; raise Corrupt if it is in use, or no room."""
        if index < len(self.memo):
            raise Corrupt(f"pickle: the memo's index {index} is given twice")
        self.spend(_REFERENCE * (index - len(self.memo)))
        self.memo += [_GONE] * (index - len(self.memo))

    def since_mark(self) -> list[Any]:
        """Remove the last mark and the values above it, which are returned; raise IndexError."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def popped(self, count: int) -> list[Any]:
        """Return the last ``count`` values of the stack, at least one, and remove them.

        Raise Corrupt if there are fewer.
        """
        items = self.stack[-count:]
        if len(items) < count:
            raise Corrupt("pickle: an opcode takes more values than there are")
        del self.stack[-count:]
        return items

    def extend(self, items: list[Any]) -> None:
        """Append values to the list on top of the stack, and charge for them; drop an `Unknown`'s.

        Raise Corrupt for any other target.
        """
        _into(self.stack[-1], list).extend(items)
        self.room -= _REFERENCE * len(items)

    def set_items(self, items: list[Any]) -> None:
        """Put ``[key, value, …]`` into the dictionary on top of the stack; drop an `Unknown`'s.

        Raise Corrupt for any other target and as `check_keys`, ValueError for a key without value.
        """
        target, keys = _into(self.stack[-1], dict), items[::2]
        self.check_keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        """Add values to the set on top of the stack; drop an `Unknown`'s; raise as `set_items`."""
        self.check_keys(items)
        _into(self.stack[-1], set).update(items)

    def frozenset(self, items: list[Any]) -> None:
        """Push a frozenset of values; raise as `check_keys`."""
        self.check_keys(items)
        self.push(frozenset(items), _DICT)

    def check_keys(self, keys: list[Any]) -> None:
        """Charge for keys before they are hashed; raise Corrupt if there is no room.

        Keys that are not all text, or all of `Stated` classes, are checked by `check_key`.
        """
        kinds = set(map(type, keys))
        if kinds == {str}:
            self.spend(_ENTRY * len(keys) + sum(map(len, keys)))
        elif all(issubclass(kind, Stated) for kind in kinds):
            self.spend(_ENTRY * len(keys))
        else:
            for key in keys:
                self.check_key(key)

    def check_key(self, key: Any) -> None:
        """Charge for one key, and record it in ``equal_hashes`` if a file can choose its hash.

        Raise Corrupt if it is neither of `_KEYS`, nor `Stated`, nor a tuple of at most
        `_LONGEST_KEY` of these; if more than `ALIKE` keys have its hash; or if there is no room.
        """
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
            equal_hash = self.equal_hashes.setdefault(hash(key), [])
            if key not in equal_hash:
                equal_hash.append(key)
                self.spend(_ENTRY + _LIST)
            if len(equal_hash) > ALIKE:
                raise Corrupt(
                    f"pickle: more than {ALIKE} dictionary keys of one hash",
                    hint="the file may be malicious: it would keep a reader busy for very long",
                )

    # names, calls and state

    def name(self, name: Name) -> None:
        """Push the first mention of an equal name, and set its constructor in ``builds``.

        Raise Unsupported if the name is not allowed.
        """
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
        first_mention = self.names.setdefault(name, name)
        if isinstance(build, type) and issubclass(build, Stated):
            self.kinds[id(first_mention)], build = build, self.new
        self.builds[id(first_mention)] = self.ordered if build is ordered else build
        self.push(first_mention, _NAME)

    def ordered(self, _: Name, args: tuple[Any, ...]) -> dict[Any, Any]:
        """Return a copy of a dictionary, or one made of a list of pairs; empty without arguments.

        Raise Corrupt for anything else, and as `check_keys`.
        """
        if not args:
            self.room -= _DICT
            return {}
        content = args[0]
        self.spend(_DICT + 2 * _REFERENCE * len(content))
        pairs = list(content.items()) if type(content) is dict else _as(content, list)
        if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            raise Corrupt("pickle: an OrderedDict of something else than pairs")
        self.check_keys([key for key, _ in pairs])
        return dict(pairs)

    def build(self) -> None:
        """Pop a state, and give it to the object below, which stays; a dictionary drops it.

        Raise Corrupt if the object takes no state or has one, or if no dictionary is a state.
        """
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
    """Raise Corrupt for an opcode that no framework writes."""
    raise Corrupt(
        f"pickle: the opcode at byte {machine.position - 1} is not one that checkpoints use"
    )


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
    """Raise Unsupported: the caller of `loads` expects no persistent ids."""
    raise Unsupported("pickle: has persistent ids where this format has none")


def _word(text: str) -> str:
    """Return a name cut at 100 characters and escaped to ASCII, for an error of one line."""
    return text[:100].encode("unicode_escape").decode()


def _as(value: Any, kind: type[Any]) -> Any:
    """Return ``value`` if its type is ``kind``; raise Corrupt if not."""
    if type(value) is not kind:
        raise Corrupt(f"pickle: a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _into(target: Any, kind: type[Any]) -> Any:
    """Return ``target`` if its type is ``kind``; an empty ``kind`` to drop for an `Unknown`.

    Raise Corrupt for others.
    """
    return kind() if type(target) is Unknown else _as(target, kind)
