"""Entries by the hundred against the plain loop: the same values, the same memo, the same end, or both refuse."""

from __future__ import annotations

import pickle
import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.formats import entries, frequent, machine, opcodes
from ckptsync.formats.inert import Build, Made, Name, loads
from ckptsync.formats.machine import GONE, Machine
from tests.test_formats_frequent import ALLOWED, Point, Size, Thing, by_python


class Key(Thing):
    """Pickles as a dataclass does, and is a dictionary's key."""


class Found(Point):
    """A key."""

    __slots__ = ()
    is_key = True


NAMES: dict[Name, Build] = {**ALLOWED, Name(__name__, "Key"): Found}
ONE_BY_ONE: dict[Name, Build] = {**ALLOWED, Name(__name__, "Key"): Point}
SIZES = st.lists(st.integers(0, 70000), max_size=4).map(Size)
NUMBERS = st.sampled_from([0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**39, 2**47, 2**63, -1]) | st.integers(-(2**60), 2**60)
TEXTS = st.sampled_from(["__0_0.distcp", "", "ä\u0094", "\x94", "x" * 300, "\ud800"]) | st.text(max_size=5)
VALUES = TEXTS | NUMBERS | SIZES | st.none()
ENTRIES = st.lists(st.tuples(TEXTS, st.none() | NUMBERS, SIZES, VALUES, NUMBERS, st.booleans()), max_size=30)


def storage(rows: list[tuple[Any, ...]]) -> dict[Any, Any]:
    """Like ``storage_data`` of a `.metadata`."""
    found = {}
    for name, number, size, file, start, has_more in rows:
        more = {"more": 1} if has_more else {}
        found[Key(fqn=name, index=number, offset=size)] = Thing(file=file, start=start, length=1700, **more)
    return found


def like(count: int) -> dict[Any, Any]:
    """Entries that differ as those of a large model do."""
    return storage([(f"layer.{n}", n % 4, Size((n // 9, 70000)), f"__{n % 3}", 1200 * n, False) for n in range(count)])


def outcome(run: Any, data: bytes, names: dict[Name, Build] = NAMES) -> Any:
    """Values, memo and end, or the kind of error."""
    one = Machine(data, names, None)
    try:
        found = _plain(run(one))
        return found, [GONE if value is GONE or type(value) is dict else _plain(value) for value in one.memo], one.at
    except CkptsyncError as e:
        return type(e)
    except RecursionError:  # of `plain`: a changed byte made a value contain itself
        return "endless"
    except (IndexError, ValueError, TypeError, KeyError, struct.error, AttributeError):
        return Corrupt


def _plain(value: Any) -> Any:
    """For comparing: objects as their attributes, as keys of a dictionary too."""
    if isinstance(value, Point):
        return ("point", {key: _plain(one) for key, one in zip(value.items[::2], value.items[1::2], strict=True)})
    if isinstance(value, Made):
        return ("made", value.name, _plain(value.args), _plain(value.state))
    if isinstance(value, dict):
        return ("dict", [(_plain(key), _plain(one)) for key, one in value.items()])
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def taken(data: bytes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were read at once, each time."""
    lengths = []
    read = entries.Entries.read

    def counted(self: entries.Entries, at: int, stack: list[Any], memo: list[Any]) -> int:
        end = read(self, at, stack, memo)
        lengths.append(end - at)
        return end

    with monkeypatch.context() as patched:
        patched.setattr(entries.Entries, "read", counted)
        loads(data, NAMES)
    return lengths


@given(ENTRIES, st.integers(2, 5), st.booleans())
def test_entries_are_read_as_by_the_plain_loop(rows: Any, protocol: int, in_python: bool) -> None:  # noqa: FBT001
    value = [storage(rows), "later", storage(rows[:3])]
    data = by_python(value, protocol) if in_python else pickle.dumps(value, protocol)
    assert outcome(frequent.run, data) == outcome(opcodes.run, data)


@pytest.mark.parametrize("shared", [False, True])
def test_a_thousand_entries_are_read_in_a_few_looks(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    value = like(1000)
    if shared:
        for one in value.values():
            one.file = "the same"
    data = pickle.dumps([value, value], 4)
    assert outcome(frequent.run, data) == outcome(opcodes.run, data)
    lengths = taken(data, monkeypatch)
    assert len(lengths) < 60
    assert sum(lengths) > 0.8 * len(data)


def test_a_change_of_any_byte_is_read_alike_or_refused_by_both() -> None:
    random.seed(5)
    data = pickle.dumps([like(7), "later"], 4) + b"...."
    for at in range(len(data)):
        for changed in {data[at] ^ (1 << bit) for bit in range(8)} | {random.randrange(256)}:
            damaged = data[:at] + bytes([changed]) + data[at + 1 :]
            fast, slow = outcome(frequent.run, damaged), outcome(opcodes.run, damaged)
            assert fast == slow or fast is Corrupt, at
            assert fast == outcome(frequent.run, damaged, ONE_BY_ONE), at


def test_an_end_anywhere_is_corrupt() -> None:
    data = pickle.dumps(like(6), 4)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            loads(data[:size], NAMES)


def test_bytes_of_another_length_than_told_are_no_text() -> None:
    data = pickle.dumps(like(9), 4)
    at = data.rindex(b"\x8c\x07layer.") + 1
    for length in (6, 8, 200):
        damaged = data[:at] + bytes([length]) + data[at + 1 :]
        assert outcome(frequent.run, damaged) == outcome(opcodes.run, damaged)


def test_a_class_whose_call_gives_no_tuple_is_left_to_the_plain_loop() -> None:
    names: dict[Name, Build] = {**NAMES, Name(Size.__module__, "Size"): lambda _, args: list(args)}
    data = pickle.dumps([like(9), "later"], 4)
    assert outcome(frequent.run, data, names) == outcome(opcodes.run, data, names)
    sizes = [key.items[5] for key in loads(data, names)[0][0]]
    assert len(set(map(id, sizes))) == len(sizes)


def test_an_object_without_end_is_not_made_a_pattern() -> None:
    many = {f"a{n}": n for n in range(200)}
    data = pickle.dumps({Key(**many): Thing(b=1) for _ in range(5)}, 4)
    assert outcome(frequent.run, data) == outcome(opcodes.run, data)


def test_values_of_entries_that_take_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(like(3000), 4)
    loads(data, NAMES)
    monkeypatch.setattr(machine, "MOST", 1 << 18)
    with pytest.raises(Corrupt, match="take more than"):
        loads(data, NAMES)


def test_entries_are_taken_to_need_no_more_memory_than_one_by_one() -> None:
    data = pickle.dumps(like(20_000), 4)
    rooms = []
    for names in (NAMES, ONE_BY_ONE):
        one = Machine(data, names, None)
        frequent.run(one)
        rooms.append(Machine(data, names, None).room - one.room)
    assert 0.8 * rooms[1] < rooms[0] < 1.1 * rooms[1]
