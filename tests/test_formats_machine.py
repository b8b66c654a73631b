"""The pickle machine against Python's own pickler, and against what it must refuse."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.inert import loads
from ckptsync.formats.machine import Machine
from ckptsync.formats.opcodes import run

PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())


def nested(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner) | st.tuples(inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(KEYS, inner)

    return st.recursive(scalars, grow, max_leaves=30)


VALUES = nested(PLAIN | st.binary() | st.frozensets(st.integers()) | st.sets(st.text()))


@given(nested(PLAIN), st.integers(2, 3))
def test_plain_values_are_read_as_the_old_protocols_wrote_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert loads(data, {}) == (value, len(data))


@given(VALUES, st.integers(4, 5))
def test_plain_values_are_read_as_the_new_protocols_wrote_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert loads(data, {}) == (value, len(data))


def test_shared_and_cyclic_values_keep_their_identity() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    found, _ = loads(pickle.dumps([shared, shared]), {})
    assert found[0] is found[1]
    assert found[0][1] is found[0]


@given(st.binary(max_size=60))
def test_noise_is_refused_and_never_crashes(data: bytes) -> None:
    with contextlib.suppress(Unsupported, Corrupt):
        loads(data, {})


@given(VALUES, st.data())
def test_a_pickle_cut_short_is_corrupt(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value, 4)
    with pytest.raises(Corrupt):
        loads(whole[: data.draw(st.integers(0, len(whole) - 1))], {})


@pytest.mark.parametrize(
    "opcode", [b"i", b"o", b"P", b"\x82", b"\x83", b"\x84", b"\x92", b"\x96", b"\x97", b"2", b"S", b"U", b"T", b"\xff"]
)
def test_opcodes_that_no_checkpoint_has_are_refused(opcode: bytes) -> None:
    with pytest.raises(Corrupt, match="opcode"):
        loads(b"\x80\x02(" + opcode + b"os\nsystem\n.", {})


def test_a_tuple_of_tuples_is_no_dictionary_key() -> None:
    with pytest.raises(Corrupt, match="key"):
        loads(pickle.dumps({(("a",),): 1}), {})


def test_what_is_left_on_the_stack_is_refused() -> None:
    with pytest.raises(Corrupt, match="one value"):
        loads(b"\x80\x02NN.", {})
    with pytest.raises(Corrupt, match="one value"):
        loads(b"\x80\x02(N.", {})


def test_a_machine_can_say_where_it_stopped() -> None:
    machine = Machine(b"\x80\x02N.rest", {}, None)
    assert run(machine) is None
    assert machine.at == 4


def test_a_number_too_long_to_print_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="a number of 2000 bytes"):
        loads(b"\x80\x02\x8b\xd0\x07\x00\x00" + b"\x01" * 2000 + b".", {})
