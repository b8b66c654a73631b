"""The opcodes of pickles, one row of a table each, and the plain way to run them: what `ckptsync.formats.frequent` must do too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.machine import DICT, LIST, Machine
from ckptsync.formats.mentioned import Name

STOP = ord(".")
PAUSE = 1 << 16  # steps between two looks at the memory that values take
Step = Callable[[Machine], object]


def run(machine: Machine) -> Any:
    """The value of the pickle, opcode by opcode; ``machine.at`` is then behind its end."""
    data = machine.data
    while True:
        for _ in repeat(None, PAUSE):
            code = data[machine.at]
            machine.at += 1
            if code == STOP:
                return machine.result()
            TABLE[code](machine)
        machine.check_room()


def _refuse(machine: Machine) -> None:
    # no framework writes one: bytes that were damaged, or made by hand
    raise Corrupt(f"pickle: the opcode at byte {machine.at - 1} is not one that checkpoints use")


# One row an opcode, under its letter in CPython's pickle.py.
_STEPS: dict[bytes, Step] = {
    b"\x80": lambda s: s.do_protocol(),
    b"\x95": lambda s: s.do_take(8),
    b"(": lambda s: s.do_mark(),
    b"0": lambda s: s.do_pop(),
    b"1": lambda s: s.do_since_mark(),
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
    b"]": lambda s: s.do_push([], LIST),
    b"a": lambda s: s.do_append(),
    b"e": lambda s: s.do_appends(),
    b"l": lambda s: s.do_list_from_mark(),
    b")": lambda s: s.do_push(()),
    b"t": lambda s: s.do_tuple_from_mark(),
    b"\x85": lambda s: s.do_tuple(1),
    b"\x86": lambda s: s.do_tuple(2),
    b"\x87": lambda s: s.do_tuple(3),
    b"}": lambda s: s.do_push({}, DICT),
    b"d": lambda s: s.do_dict_from_mark(),
    b"s": lambda s: s.do_setitem(),
    b"u": lambda s: s.do_setitems(),
    b"\x8f": lambda s: s.do_push(set(), DICT),
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
TABLE: list[Step] = [_STEPS.get(bytes([code]), _refuse) for code in range(256)]
