"""The plain way to run a pickle; `test_formats_frequent` holds the fast one to it."""

from __future__ import annotations

import pickle

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.machine import Machine
from ckptsync.formats.opcodes import STOP, TABLE, run


def test_a_value_is_read_to_its_stop() -> None:
    data = pickle.dumps({"a": [1, (2, 3)]}, 4)
    machine = Machine(data + b"rest", {}, None)
    assert run(machine) == {"a": [1, (2, 3)]}
    assert machine.at == len(data)


def test_every_byte_has_a_row_and_those_of_no_checkpoint_refuse() -> None:
    refuse = TABLE[255]
    assert len(TABLE) == 256
    assert TABLE[STOP] is refuse
    assert all(TABLE[code] is refuse for code in b"io P\x82\x83\x84\x92\x96\x97\x98")


def test_an_unknown_opcode_is_told_with_its_place() -> None:
    with pytest.raises(Corrupt, match="byte 2"):
        run(Machine(b"\x80\x02\xff.", {}, None))


def test_a_name_that_is_not_allowed_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"posix\.system"):
        run(Machine(b"\x80\x02cposix\nsystem\n.", {}, None))
