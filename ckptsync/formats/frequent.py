"""The opcodes that a large checkpoint has by the million, in one loop; everything else step by step, as `opcodes` has it.

A ``.metadata`` of 100,000 chunks has eight million opcodes.  So what always comes together (a value and its MEMOIZE, an object
and its attributes, a ``torch.Size``) is recognised by the bytes that follow and done at once, and the machine's state is kept
in local variables.  The outcome is that of `ckptsync.formats.opcodes.run`, with one difference: the dictionary of a `Stated`
object's attributes is not made, and a pickle that mentions it again, which no pickler writes, is refused.

Tensors of one shape that are cut alike are described by the same bytes: whatever is read from bytes that were read before, mentions
included, is the same, since what the memo remembers never changes.  So it is not read again.
"""

from __future__ import annotations

import re
import struct
from itertools import repeat
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats import opcodes
from ckptsync.formats.entries import Entries
from ckptsync.formats.machine import GONE, LIST, NUMBER, OBJECT, REFERENCE, TUPLE, WIDE, Machine, recalled
from ckptsync.formats.mentioned import Made, Stated
from ckptsync.formats.opcodes import PAUSE, STOP, TABLE

_LONG = struct.Struct("<I").unpack_from
_SIGNED = struct.Struct("<i").unpack_from
_MARK, _EMPTY_TUPLE, _NONE, _FALSE = b"()N\x89"
_BINGET, _LONG_BINGET, _LONG_BINPUT, _MEMOIZE = b"hjr\x94"
_BININT, _BININT1, _BININT2 = b"JKM"
_SHORT_TEXT, _TEXT = _TEXTS = b"\x8cX"
_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = b"t\x85\x86\x87"
_BUILD, _NEWOBJ, _PERSISTENT, _REDUCE, _SETITEMS = b"b\x81QRu"
_ATTRIBUTES = b"\x81\x94}\x94("  # behind a class and (): an object without arguments, and its attributes begin
_SIZE = b"\x94\x85\x94R\x94"  # behind a name and a tuple: it is called with that tuple alone, as torch.Size is
_NUMBERS = re.compile(rb"(?s:K.|M..|J....){1,3}[\x85-\x87]").fullmatch
_LONGEST_SIZE = 32  # bytes that are looked through for the end of one
_MOST = 4096  # things of each sort that are kept because they come again
_REACHES = (1 << 9, 1 << 12, 1 << 15)  # bytes that are looked through for the end of one, near first


def run(machine: Machine) -> Any:  # noqa: PLR0915  one loop: a call for each opcode would cost more than all else
    """As `ckptsync.formats.opcodes.run`."""
    data, size = machine.data, len(machine.data)
    stack, marks, memo, at = machine.stack, machine.marks, machine.memo, machine.at
    if not isinstance(memo, list):
        return opcodes.run(machine)
    kinds, builds, persistent, entries = machine.kinds, machine.builds, machine.persistent, Entries(machine)
    value: Any
    spent = first = wasted = 0
    sized: Any = None  # the name that was called with numbers last: torch.Size
    sizes: dict[bytes, tuple[Any, ...]] = {}  # its numbers, pickled → what the memo gets of them, the last being the size
    begun: list[tuple[int, int]] = []  # objects that may come again: where their attributes begin, and the memo
    same: dict[bytes, tuple[int, Any, list[Any]]] = {}  # their attributes, pickled → how many bytes, the object, the memo's share
    try:
        while True:
            for _ in repeat(None, PAUSE):
                code = data[at]
                at += 1
                if code == _LONG_BINGET or code == _BINGET:  # noqa: PLR1714, SIM109  a tuple would be made at each turn
                    if code == _BINGET:
                        value = memo[data[at]]
                        at += 1
                    else:
                        value = memo[_LONG(data, at)[0]]
                        at += 4
                    if value is GONE:
                        recalled(value)
                    elif value is sized:
                        first, end = at, data.find(_SIZE, at, at + _LONGEST_SIZE)
                        known = sizes.get(data[at : max(at, end)])
                        if known:
                            at = end + 5
                            memo += known
                            value = known[2]
                    stack.append(value)
                elif code == _BININT1:
                    stack.append(data[at])
                    at += 1
                elif _TUPLE1 <= code <= _TUPLE3:
                    value = stack.pop()
                    if code == _TUPLE2:
                        value = (stack.pop(), value)
                    elif code == _TUPLE1:
                        value = (value,)
                    else:
                        second = stack.pop()
                        value = (stack.pop(), second, value)
                    if data[at : at + 5] == _SIZE:
                        at += 5
                        args = (value,)
                        memo.append(value)
                        memo.append(args)
                        if stack[-1] is not sized:
                            first, sized, sizes = at, stack[-1], {}
                        stack[-1] = value = builds[id(sized)](sized, args)
                        memo.append(value)
                        spent += 2 * TUPLE
                        if len(sizes) < _MOST and type(value) is tuple and _NUMBERS(data, first, at - 5):
                            sizes[data[first : at - 5]] = (*memo[-3:],)
                    else:
                        stack.append(value)
                        spent += TUPLE
                elif code == _EMPTY_TUPLE:
                    if data[at : at + 5] == _ATTRIBUTES and id(stack[-1]) in kinds:
                        at += 5
                        kind = kinds[id(stack[-1])]
                        if kind.alike:
                            alike = same.get(data[at : _end(data, at, kind)]) if wasted < _MOST else None
                            if alike:
                                wasted -= 1
                                at += alike[0]
                                stack[-1] = alike[1]
                                memo += alike[2]
                                continue
                            wasted += 1
                            begun.append((at, len(memo)))
                        elif kind.is_key:
                            first = at
                            at = entries.read(at, stack, memo)
                            if at != first:
                                continue
                        stack[-1] = value = kind()
                        stack.append(GONE)
                        memo.append(value)
                        memo.append(GONE)
                        marks.append(stack)
                        stack = []
                        spent += OBJECT
                    elif data[at] == _NEWOBJ and id(stack[-1]) in builds:
                        at += 1
                        stack[-1] = builds[id(stack[-1])](stack[-1], ())
                        spent += OBJECT
                    else:
                        stack.append(())
                elif code == _SETITEMS:
                    items, stack = stack, marks.pop()
                    if stack[-1] is GONE and data[at] == _BUILD:
                        at += 1
                        del stack[-1]
                        value = stack[-1]
                        value.take(items)
                        if value.alike:
                            first, before = begun.pop()
                            machine.spend(REFERENCE * value.count())
                            if len(same) < _MOST and at - first < _REACHES[-1]:
                                spent += at - first
                                same[data[first:at]] = at - first, value, _lasting(memo[before:])
                    else:
                        machine.stack = stack
                        machine.set_items(items)
                elif code == _MEMOIZE:
                    memo.append(stack[-1])
                elif code == _LONG_BINPUT and _LONG(data, at)[0] == len(memo):
                    memo.append(stack[-1])
                    at += 4
                elif code in _TEXTS:
                    if code == _SHORT_TEXT:
                        start = at + 1
                        at = start + data[at]
                    else:
                        start = at + 4
                        at = start + _LONG(data, at)[0]
                    if at > size:
                        raise Corrupt(f"pickle: ends at byte {size}, {at} wanted")
                    value = data[start:at].decode("utf-8", "surrogatepass")
                    stack.append(value)
                    spent += TUPLE + at - start
                    if not value.isascii():
                        spent += WIDE * len(value)
                    if data[at] == _MEMOIZE:
                        at += 1
                        memo.append(value)
                elif code == _BININT:
                    stack.append(_SIGNED(data, at)[0])
                    at += 4
                    spent += NUMBER
                elif code == _BININT2:
                    stack.append(data[at] | data[at + 1] << 8)
                    at += 2
                    spent += NUMBER
                elif code == _MARK:
                    marks.append(stack)
                    stack = []
                    spent += LIST
                elif code == _TUPLE:
                    value = tuple(stack)
                    stack = marks.pop()
                    if stack and stack[-1] is GONE:
                        raise Corrupt("pickle: an object's attributes are not set")
                    stack.append(value)
                    spent += TUPLE + REFERENCE * len(value)
                elif code == _BUILD and type(stack[-2]) is Made:
                    value = stack.pop()
                    stack[-1].state = value
                elif code == _REDUCE and type(stack[-1]) is tuple and id(stack[-2]) in builds:
                    value, args = stack[-2], stack.pop()
                    stack[-1] = value = builds[id(value)](value, args)
                    spent += OBJECT + REFERENCE * len(value) if type(value) is tuple else OBJECT
                elif code == _PERSISTENT and persistent:
                    stack[-1] = persistent(stack[-1])
                    spent += OBJECT
                elif code == _NONE:
                    stack.append(None)
                elif code == _FALSE:
                    stack.append(False)
                else:
                    machine.stack, machine.at = stack, at
                    if code == STOP:
                        machine.room -= spent
                        return machine.result()
                    TABLE[code](machine)
                    stack, at = machine.stack, machine.at
                    if machine.memo is not memo:  # it has holes, which no pickler leaves
                        machine.room -= spent
                        return opcodes.run(machine)
            machine.stack = stack
            machine.room -= spent
            machine.check_room()
            spent = 0
    finally:
        machine.at = max(machine.at, at)


def _end(data: bytes, at: int, kind: type[Stated]) -> int:
    """Where an object of this kind may end whose attributes begin at ``at``: a guess, but what is the same up to there ends there."""
    for reach in _REACHES:
        for ending in kind.alike:
            end = data.find(ending, at, at + reach)
            if end >= 0:
                return end + len(ending)
    return at


def _lasting(values: list[Any]) -> list[Any]:
    """For the memo, of an object that comes again: a list could be added to, so that one is not shared."""
    return [GONE if type(value) is list else value for value in values]
