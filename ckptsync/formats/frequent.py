"""The opcodes that a large checkpoint has by the million, in one loop; everything else step by step, as `opcodes` has it.

A ``.metadata`` of 100,000 chunks has eight million opcodes.  So what always comes together (a value and its MEMOIZE, an object
and its attributes, a ``torch.Size``) is recognised by the bytes that follow and done at once, and the machine's state is kept
in local variables.  The outcome is that of `ckptsync.formats.opcodes.run`, with one difference: the dictionary of a `Stated`
object's attributes is not made, and a pickle that mentions it again, which no pickler writes, is refused.
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.machine import GONE, LIST, NUMBER, OBJECT, REFERENCE, TUPLE, Machine, recalled
from ckptsync.formats.mentioned import Made
from ckptsync.formats.opcodes import STOP, TABLE

_LONG = struct.Struct("<I").unpack_from
_SIGNED = struct.Struct("<i").unpack_from
_PAUSE = 1 << 16  # steps between two looks at the memory that references take
_MARK, _EMPTY_TUPLE, _NONE, _FALSE = b"()N\x89"
_BINGET, _LONG_BINGET, _LONG_BINPUT, _MEMOIZE = b"hjr\x94"
_BININT, _BININT1, _BININT2 = b"JKM"
_SHORT_TEXT, _TEXT = _TEXTS = b"\x8cX"
_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = b"t\x85\x86\x87"
_BUILD, _NEWOBJ, _SETITEMS = b"b\x81u"
_ATTRIBUTES = b"\x81\x94}\x94("  # behind a class and (): an object without arguments, and its attributes begin
_SIZE = b"\x94\x85\x94R\x94"  # behind a name and a tuple: it is called with that tuple alone, as torch.Size is


def run(machine: Machine) -> Any:  # noqa: PLR0915  one loop: a call for each opcode would cost more than all else
    """As `ckptsync.formats.opcodes.run`."""
    data, size = machine.data, len(machine.data)
    stack, marks, memo, at = machine.stack, machine.marks, machine.memo, machine.at
    kinds, builds = machine.kinds, machine.builds
    value: Any
    spent = 0
    try:
        while True:
            for _ in repeat(None, _PAUSE):
                code = data[at]
                at += 1
                if code == _LONG_BINGET:
                    value = memo[_LONG(data, at)[0]]
                    at += 4
                    if value is GONE:
                        recalled(value)
                    stack.append(value)
                elif code == _BININT1:
                    stack.append(data[at])
                    at += 1
                elif code == _BINGET:
                    value = memo[data[at]]
                    at += 1
                    if value is GONE:
                        recalled(value)
                    stack.append(value)
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
                        stack[-1] = value = builds[id(stack[-1])](stack[-1], args)
                        memo.append(value)
                        spent += 2 * TUPLE
                    else:
                        stack.append(value)
                        spent += TUPLE
                elif code == _EMPTY_TUPLE:
                    if data[at : at + 5] == _ATTRIBUTES and id(stack[-1]) in kinds:
                        at += 5
                        stack[-1] = value = kinds[id(stack[-1])]()
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
                    stack.append(data[start:at].decode("utf-8", "surrogatepass"))
                    spent += TUPLE + at - start
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
                    stack, memo, at = machine.stack, machine.memo, machine.at
            machine.stack = stack
            machine.room -= spent
            machine.check_room()
            spent = 0
    finally:
        machine.at = max(machine.at, at)
