"""Read pickles without running them: rebuild their values, and call none of their classes.

No name in a pickle is imported.  A caller gives the exact names that it accepts and, for each, a
constructor of plain values; any other name, opcode, persistent id or odd dictionary key is refused.
The machine is not a subclass of `pickle.Unpickler`, because that one allocates by the numbers that
it is given (a memo index of four bytes can ask for gigabytes) and hashes whatever stands as a key
(nested tuples hash in exponential time).  Memory and work are bounded by the size of the file:
values, copies and dictionary keys are charged to `_Machine.room`.

It is one loop.  A ``.metadata`` of 100,000 chunks has eight million opcodes, so frequent opcodes
are done in the loop itself, and three things are read at once: a ``torch.Size``, an object whose
bytes were read before (what the memo remembers never changes, so that the same bytes mean the same
values), and entries of a dictionary that differ in the values of attributes alone (`_Entries`).

Opcodes: CPython's ``pickletools``; protocols 2 to 5 as ``torch.save`` and ``pickle.dump`` write
them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, ClassVar

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.gc_pause import paused

MAX_BYTES = 256 << 20
# Bytes that all values of one pickle may take, those that it drops included, so that work is
# bounded too: so many whatever its size, so many for each of its bytes (real ones take 3 to 16),
# and at most.  `.metadata` of a million chunks takes 3.4 for each.
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
    # how the pickle of one may end, if many are the same byte for byte: these share one object
    alike: ClassVar[tuple[bytes, ...]] = ()
    # whether a dictionary has them by the million as keys, with values that are `Stated` too
    is_key: ClassVar[bool] = False

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

    @classmethod
    def several(cls, names: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Return objects that have values for the same names, as `take` makes them.

        The first value of each column is for the first object.
        """
        made = []
        for values in zip(*columns, strict=True):
            one = cls()
            one.take([of_pair for pair in zip(names, values, strict=True) for of_pair in pair])
            made.append(one)
        return made


Build = Callable[[Name, tuple[Any, ...]], Any] | type[Stated]
"""A constructor.  One that returns a tuple once always does: then equal arguments may share it."""


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
_MENTION, _SMALL = rb"(?:h.|j....)", rb"(?:K.|M..|J....)"
_NUMBERS = (
    b"(?:"
    + b"|".join(_SMALL * n + code for n, code in ((1, rb"\x85"), (2, rb"\x86"), (3, rb"\x87")))
    + b")"
)
# behind a name and a tuple: it is called with that tuple alone, as torch.Size is
_CALLED = rb"\x94\x85\x94R\x94"
_SIZE = re.compile(b"(" + _NUMBERS + b")" + _CALLED, re.DOTALL).match
_EACH = re.compile(_SMALL, re.DOTALL).findall
_LONG = struct.Struct("<I").unpack_from
_SIGNED = struct.Struct("<i").unpack_from
# bytes that are searched for the end of an object, near first
_REACHES = (1 << 9, 1 << 12, 1 << 15)
# values of each sort that are kept because they may come again, and searches in vain
_MOST_KEPT = 4096


class _Machine:
    """The machine that reads one pickle.

    ``at`` counts bytes read; ``marks`` are the stacks below the marks; ``room`` is the memory that
    is left for values.
    """

    def __init__(
        self, data: bytes, allowed: Mapping[Name, Build], persistent: Callable[[Any], Any]
    ) -> None:
        self.data, self.allowed, self.persistent = data, allowed, persistent
        self.at, self.room, self.wasted = 0, min(MOST, FLOOR + FACTOR * len(data)), 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        # every mention of a name is one object, and its id finds what to do with it
        self.names: dict[Name, Name] = {}
        self.builds: dict[int, Callable[[Name, tuple[Any, ...]], Any]] = {}
        self.kinds: dict[int, type[Stated]] = {}
        # objects without attributes yet, where these begin, and the memo then
        self.unset: dict[int, tuple[Stated, int, int]] = {}
        # keys whose hashes anyone can choose, by these
        self.alike: dict[int, list[Any]] = {}
        # by name: pickled numbers → them, the arguments, the tuple
        self.sizes: dict[int, dict[bytes, tuple[Any, ...]]] = {}
        # pickled attributes → how many bytes, the object, the memo's share
        self.same: dict[bytes, tuple[int, Any, list[Any]]] = {}

    def run(self) -> Any:  # noqa: PLR0915
        """Return the value; ``at`` is then behind its end."""
        data, size, memo, marks = self.data, len(self.data), self.memo, self.marks
        builds, kinds = self.builds, self.kinds
        persistent, entries = self.persistent, _Entries(self)
        stack, at, spent = self.stack, 0, 0
        sized: Any = None  # the name that made a tuple last: torch.Size
        value: Any
        try:
            while True:
                for _ in repeat(None, _PAUSE):
                    code = data[at]
                    at += 1
                    if code == _GET4 or code == _GET1:  # noqa: PLR1714, SIM109  a tuple would be made at each turn
                        if code == _GET1:
                            value = memo[data[at]]
                            at += 1
                        else:
                            value = memo[_LONG(data, at)[0]]
                            at += 4
                        if value is sized:
                            found = _SIZE(data, at)
                            if found:
                                at = found.end()
                                known = self.size(value, found[1])
                                memo += known
                                value = known[2]
                        elif value is _GONE:
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
                    elif code == _MEMOIZE:
                        memo.append(stack[-1])
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
                        if (
                            data[at] == _NEWOBJ
                            and data[at : at + 5] == _ATTRIBUTES
                            and id(stack[-1]) in kinds
                        ):
                            kind = kinds[id(stack[-1])]
                            start = at + 5
                            if kind.is_key:
                                at = entries.read(start, stack)
                            else:
                                at = self.again(start, kind, stack)
                            if at == start:
                                stack[-1] = value = self.new(stack[-1], (), at)
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
                            self.finish(stack[-1], items, at)
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
                    elif code == _REDUCE or code == _NEWOBJ:  # noqa: PLR1714, SIM109
                        args, name = stack.pop(), stack[-1]
                        if type(args) is not tuple or id(name) not in builds:
                            raise Corrupt(
                                "pickle: calls something that is not a known name, or with"
                                " arguments that are not a tuple"
                            )
                        stack[-1] = value = builds[id(name)](name, args)
                        spent += _OBJECT
                        if type(value) is tuple:
                            spent += _REFERENCE * len(value)
                            sized = name
                            self.sizes.setdefault(id(name), {})
                    elif code == _PERSISTENT:
                        stack[-1] = persistent(stack[-1])
                        spent += _OBJECT
                    elif code == _TUPLE1:
                        stack.append((stack.pop(),))
                        spent += _TUPLE
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

    # what is read at once

    def size(self, name: Name, code: bytes) -> tuple[Any, ...]:
        """Return a pickled tuple, the arguments ``(numbers,)``, and what ``name`` makes of them."""
        kept = self.sizes[id(name)]
        known = kept.get(code)
        if known is None:
            numbers = tuple([_number(one) for one in _EACH(code, 0, len(code) - 1)])
            args = (numbers,)
            known = numbers, args, self.builds[id(name)](name, args)
            self.room -= 2 * _TUPLE + _OBJECT + 3 * _REFERENCE
            if len(kept) < _MOST_KEPT:
                kept[code] = known
        return known

    def again(self, at: int, kind: type[Stated], stack: list[Any]) -> int:
        """Put an object onto the stack whose attributes were read before; return their end.

        Its attributes begin at ``at``. Return ``at`` if no such object was read.
        """
        if not kind.alike or self.wasted >= _MOST_KEPT:
            return at
        found = self.same.get(self.data[at : _end(self.data, at, kind)])
        if found is None:
            self.wasted += 1
            return at
        self.wasted -= 1
        length, stack[-1], share = found
        self.memo += share
        return at + length

    def new(self, name: Name, args: tuple[Any, ...], at: int = 0) -> Stated:
        """Return a new object of a declared class, whose attributes begin at ``at``."""
        if args:
            raise Corrupt(f"pickle: {name} is called with arguments")
        value = self.kinds[id(name)]()
        self.unset[id(value)] = value, at, len(self.memo)
        self.room -= _ENTRY  # until it has its attributes
        return value

    def finish(self, value: Stated, items: list[Any], end: int = 0) -> None:
        """Give an object its attributes, whose bytes end at ``end`` where they may come again."""
        if id(value) not in self.unset:
            raise Corrupt("pickle: an object's attributes are set twice")
        _, start, before = self.unset.pop(id(value))
        self.room += _ENTRY
        value.take(items)
        self.spend(_REFERENCE * value.count())
        if value.alike and len(self.same) < _MOST_KEPT and 0 < end - start < _REACHES[-1]:
            self.room -= end - start
            # could be added to
            share = [_GONE if type(one) in (list, dict, set) else one for one in self.memo[before:]]
            self.same[self.data[start:end]] = end - start, value, share

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


def _number(code: bytes) -> int:
    if len(code) <= 3:
        return int.from_bytes(code[1:], "little")
    return int.from_bytes(code[1 if len(code) == 5 else 2 :], "little", signed=True)


def _end(data: bytes, at: int, kind: type[Stated]) -> int:
    """Guess where an object of this kind ends whose attributes begin at ``at``."""
    for reach in _REACHES:
        for ending in kind.alike:
            end = data.find(ending, at, at + reach)
            if end >= 0:
                return end + len(ending)
    return at


# Entries of a dictionary: a value's pattern by its sort, and what stands behind it.
_SORTS = {
    "text": (rb"\x8c.[^\x94]*\x94", b""),
    "sized": (_NUMBERS, _CALLED),  # a name is called with them
    "mention": (_MENTION, b""),
    "number": (_SMALL + rb"|\x8a\x05.{5}|\x8a\x06.{6}", b""),
}
# a class, an object of it, and its attributes begin
_BEGIN = re.compile(b"(" + _MENTION + rb")\)\x81\x94}\x94\(", re.DOTALL).match
_ATTRIBUTE = re.compile(
    b"("
    + _MENTION
    + b")(?:(?P<text>%b%b)|(%b)(?P<sized>%b)%b|(?P<mention>%b%b)|(?P<number>%b)%b)"
    % (*_SORTS["text"], _MENTION, *_SORTS["sized"], *_SORTS["mention"], *_SORTS["number"]),
    re.DOTALL,
).match
_FIXED = struct.Struct("<xi")
_MOST_PATTERNS, _MOST_WASTED, _MOST_ATTRIBUTES = 64, 1000, 16
_WINDOW = 1 << 16  # bytes that are read at once: a pickler's frame has as many
# each one's name, the sort of its values, and the name that these call
_Attributes = list[tuple[Any, str, Any]]
# entries' pattern, whose last group is what follows them
_Like = tuple[re.Pattern[bytes], list[tuple[type[Stated], _Attributes]]]


class _Entries:
    """Read the entries of a dictionary that has millions of them, each like the one before.

    Keys and values are objects.

    The bytes of two such entries differ in the values of attributes alone.  So one entry is taken
    apart, and a pattern is made of its bytes with a gap for every value: it finds all that follow,
    and their values are read column by column.  What does not fit is left to the machine's loop;
    what fits has the same outcome there, memo included.
    """

    def __init__(self, machine: _Machine) -> None:
        self.machine, self.known, self.last = machine, dict[bytes, _Like](), list[_Like]()
        self.wasted = 0  # searches that found nothing, less the entries that others found

    def read(self, at: int, stack: list[Any]) -> int:
        """Put entries onto the stack and return their end.

        They replace the class of the first key, whose attributes begin at ``at``.

        It is ``at`` if there are none that can be read so: then nothing has changed.
        """
        data, start = self.machine.data, self.start(at, stack[-1])
        if start is None or self.wasted >= _MOST_WASTED:
            return at
        for like in chain(self.last, self.learn(start)):
            limit = min(start + _WINDOW, len(data))
            rows = like[0].findall(data, start, limit)
            rest = len(rows[-1][-1]) if rows else 0
            if rest:
                rows.pop()
            if rows and self.make(like, rows, stack):
                self.wasted -= len(rows)
                self.last = [like]
                return limit - rest
        self.wasted += 1
        return at

    def start(self, at: int, name: Any) -> int | None:
        """Return the offset of the class reference of the object with attributes at ``at``."""
        for start in (at - 11, at - 8):
            begin = _BEGIN(self.machine.data, max(start, 0))
            if begin and begin.end() == at and self.recall(begin[1]) is name:
                return start
        return None

    def learn(self, at: int) -> Iterator[_Like]:
        """Yield the pattern of the entry at ``at``, unless it has attributes of unknown sorts."""
        data, pattern, objects = self.machine.data, b"", []
        for _ in ("key", "value"):
            begin = _BEGIN(data, at)
            kind = self.machine.kinds.get(id(self.recall(begin[1]))) if begin else None
            if not begin or not kind or kind.alike:
                return
            pattern, at = pattern + re.escape(begin[0]), begin.end()
            attributes: _Attributes = []
            while data[at : at + 2] != b"ub":
                found = _ATTRIBUTE(data, at)
                if not found or len(attributes) >= _MOST_ATTRIBUTES:
                    return
                sort, called = found.lastgroup or "", found[3] or b""
                name, call = self.recall(found[1]), self.recall(called) if called else None
                if name is _GONE or (called and id(call) not in self.machine.sizes):
                    return
                attributes.append((name, sort, call))
                pattern += re.escape(found[1] + called) + b"(%b)%b" % _SORTS[sort]
                at = found.end()
            objects.append((kind, attributes))
            pattern, at = pattern + b"ub", at + 2
        if pattern not in self.known and len(self.known) < _MOST_PATTERNS:
            self.known[pattern] = re.compile(pattern + b"|(.+)", re.DOTALL), objects
        if pattern in self.known:
            yield self.known[pattern]

    def make(self, like: _Like, rows: list[tuple[bytes, ...]], stack: list[Any]) -> bool:
        """Put the rows' objects onto stack and memo; False, and no change, if deceived."""
        groups = iter(zip(*rows, strict=True))
        stacked: list[Sequence[Any]] = []
        shares: list[Sequence[Any]] = []
        for kind, attributes in like[1]:
            columns = [self.column(sort, call, next(groups)) for _, sort, call in attributes]
            if None in columns:
                return False
            made = kind.several(
                [name for name, _, _ in attributes], [column[-1] for column in columns if column]
            )
            stacked.append(made)
            shares += made, [_GONE] * len(rows)
            shares += chain.from_iterable(
                column
                for column, (_, sort, _) in zip(columns, attributes, strict=True)
                if column and sort in ("text", "sized")
            )
        stack[-1:] = _by_turns(stacked)
        self.machine.memo += _by_turns(shares)
        self.machine.spend(_OBJECT * len(stacked) * len(rows))
        return True

    def column(
        self, sort: str, call: Any, codes: Sequence[bytes]
    ) -> tuple[Sequence[Any], ...] | None:
        """Return an attribute's values, behind what else goes to the memo; None if deceived."""
        machine = self.machine
        if sort == "text":
            if any(code[1] != len(code) - 3 for code in codes):
                return None
            machine.room -= sum(map(len, codes)) + _TUPLE * len(codes)
            return ([code[2:-1].decode("utf-8", "surrogatepass") for code in codes],)
        if sort == "number" and set(map(len, codes)) == {_FIXED.size}:
            machine.room -= _NUMBER * len(codes)
            return ([number for (number,) in _FIXED.iter_unpack(b"".join(codes))],)
        known: dict[bytes, Any]
        if sort == "sized":
            known = {code: machine.size(call, code) for code in set(codes)}
            return (*zip(*[known[code] for code in codes], strict=True),)
        if sort == "mention":
            known = {code: self.recall(code) for code in set(codes)}
            if _GONE in known.values():
                return None
        else:
            known = {code: _number(code) for code in set(codes)}
            machine.room -= _NUMBER * len(known)
        return ([known[code] for code in codes],)

    def recall(self, mention: bytes) -> Any:
        """Return what the memo has for a mention, `_GONE` if it has nothing."""
        index = mention[1] if len(mention) == 2 else _LONG(mention, 1)[0]
        return self.machine.memo[index] if index < len(self.machine.memo) else _GONE


def _by_turns(columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the first of each, the second of each, …"""
    found: list[Any] = [None] * (len(columns) * len(columns[0]))
    for number, column in enumerate(columns):
        found[number :: len(columns)] = column
    return found
