"""The fast loop against the plain one, and against Python's own unpickler."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.formats import frequent, machine, opcodes
from ckptsync.formats.inert import Build, Made, Name, Stated, loads, made
from ckptsync.formats.machine import Machine
from tests.test_formats_machine import VALUES


class Point(Stated):
    """Keeps what it is given, so that two of them can be compared."""

    __slots__ = ("items",)

    def take(self, items: list[Any]) -> None:
        if not all(isinstance(name, str) for name in items[::2]) or len(items) % 2:
            raise Corrupt("a name that is no text")
        self.items = items


class Size(tuple):  # type: ignore[type-arg]
    """Pickles as torch.Size does: a call with a tuple."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return Size, (tuple(self),)


class Thing:
    """Pickles as a dataclass does."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


class Other(Thing):
    """One of which no `Stated` is made."""


ALLOWED: dict[Name, Build] = {
    Name(__name__, "Size"): lambda _, args: ("size", *args),
    Name(__name__, "Thing"): Point,
    Name(__name__, "Other"): made,
}
SIZES = st.lists(st.integers(0, 70000), max_size=4).map(Size)
ATTRIBUTES = st.dictionaries(st.sampled_from("abcdefg"), SIZES | st.text() | st.integers(-(2**40), 2**40) | st.none())
THINGS = ATTRIBUTES.filter(bool).map(lambda a: Thing(**a)) | ATTRIBUTES.map(lambda a: Other(**a))
NESTED = st.recursive(
    VALUES | SIZES | THINGS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def by_python(value: Any, protocol: int) -> bytes:
    """As the pickler that is written in Python writes it, which frames otherwise and mentions more."""
    out = io.BytesIO()
    pickle._Pickler(out, protocol).dump(value)
    return out.getvalue()


def plain(value: Any) -> Any:
    """For comparing: objects as their attributes."""
    if isinstance(value, Point):
        return ("point", {key: plain(one) for key, one in zip(value.items[::2], value.items[1::2], strict=True)})
    if isinstance(value, Made):
        return ("made", value.name, plain(value.args), plain(value.state))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def both(data: bytes) -> tuple[Any, Any]:
    """What the fast loop and the plain one make of it: value and end, or the kind of error."""
    return _outcome(frequent.run, data), _outcome(opcodes.run, data)


def _outcome(run: Any, data: bytes) -> Any:
    one = Machine(data, ALLOWED, lambda pid: ("persistent", pid))
    try:
        return plain(run(one)), one.at
    except CkptsyncError as e:
        return type(e)
    except RecursionError:  # of `plain`: a changed byte made a value contain itself
        return "endless"
    except (IndexError, ValueError, TypeError, KeyError, struct.error, AttributeError):
        return Corrupt


@given(NESTED, st.integers(2, 5), st.booleans())
@example([Thing(a=1), Thing(a=1)], 4, False)  # noqa: FBT003
@example((Other(), {}, (1, 2, 3, 4)), 4, False)  # noqa: FBT003
@example([Size((1, 2)), Size((3,)), Size((1, 2, 3)), Size(())], 4, True)  # noqa: FBT003
def test_both_ways_read_the_same(value: Any, protocol: int, in_python: bool) -> None:  # noqa: FBT001
    data = by_python(value, protocol) if in_python else pickle.dumps(value, protocol)
    fast, slow = both(data)
    assert fast == slow
    assert protocol < 4 or fast[1] == len(data)  # bytes and sets are calls of codecs and builtins before


@given(st.lists(VALUES), st.integers(4, 5))
def test_python_reads_the_same(value: Any, protocol: int) -> None:
    data = by_python(value, protocol)
    assert both(data)[0] == (pickle.loads(data), len(data))


def test_a_change_of_any_byte_is_read_alike_or_refused_by_both() -> None:
    random.seed(3)
    value = {"x": [Thing(a=Size((1, 2)), b="text", c=300), Thing(a=Size((1, 2)), b="text", c=70000)], "y": Other(d=(1, 2, 3, 4))}
    data = pickle.dumps([value] * 2, 4) + b"...."
    for at in range(len(data)):
        for changed in {data[at] ^ (1 << bit) for bit in range(8)} | {random.randrange(256)}:
            fast, slow = both(data[:at] + bytes([changed]) + data[at + 1 :])
            assert fast == slow, at


def test_an_end_anywhere_is_corrupt() -> None:
    data = pickle.dumps([Thing(a=Size((1, 2)), b="text"), Thing(a=Size((1, 2)), b="text")], 4)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            loads(data[:size], ALLOWED)


def test_attributes_that_are_mentioned_again_are_refused() -> None:
    thing = Thing(a=1, b=2)
    with pytest.raises(Corrupt, match="mentioned again"):
        loads(pickle.dumps([thing, thing.__dict__], 4), ALLOWED)


@pytest.mark.parametrize("attributes", [b"", b"}K\x01b}K\x01b"])
def test_attributes_are_set_once(attributes: bytes) -> None:
    data = b"\x80\x02c" + f"{__name__}\nThing\n".encode() + b")\x81" + attributes + b"."
    assert both(data) == (Corrupt, Corrupt)


def test_a_class_that_is_declared_takes_no_arguments() -> None:
    data = b"\x80\x02c" + f"{__name__}\nThing\n".encode() + b"K\x01\x85R."
    assert both(data) == (Corrupt, Corrupt)


@pytest.mark.parametrize("unit", [b"}", b"]", b"(", b"N", b"K\x01", b"h\x00", b"\x94", b"(N", b"}NNs", b"M\x00\xff", b")\x85"])
def test_values_that_take_too_much_memory_are_refused(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST", 1 << 20)
    with contextlib.suppress(MemoryError), pytest.raises(Corrupt, match=r"take more than|within each other"):
        loads(b"\x80\x04N\x94" + unit * 300_000 + b".", ALLOWED)


@pytest.mark.parametrize("unit", [b"}", b"]", b"\x8f", b"M\x00\xff", b")\x85"])
def test_what_values_take_is_counted_and_not_how_many_there_are(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST", 3 << 20)
    with pytest.raises(Corrupt, match="take more than"):
        loads(b"\x80\x04" + unit * 100_000 + b".", ALLOWED)
    with pytest.raises(Corrupt, match="one value"):
        loads(b"\x80\x04" + b"N" * 100_000 + b".", ALLOWED)


def test_what_comes_again_is_read_as_if_it_did_not() -> None:
    class Box(Point):
        __slots__ = ()
        alike = (b"ub",)

    names: dict[Name, Build] = {**ALLOWED, Name(__name__, "Thing"): Box}
    value = [Thing(a=Size((1, 2)), b=Size((300, 70000))) for _ in range(5)] + [Thing(a=Size((1, 2)), b=Size((2, 1)))]
    found, _ = loads(pickle.dumps([value, "later", value[3]], 4), names)
    assert [plain(one) for one in found[0]] == [
        ("point", {"a": ("size", s), "b": ("size", t)}) for s, t in [((1, 2), (300, 70000))] * 5 + [((1, 2), (2, 1))]
    ]
    assert found[1] == "later"
    assert plain(found[2]) == plain(found[0][3])


def test_two_classes_called_with_the_same_numbers_stay_apart() -> None:
    names: dict[Name, Build] = {Name("m", "one"): lambda _, args: ("one", *args), Name("m", "two"): lambda _, args: ("two", *args)}
    size = b"K\x01K\x02\x86\x94\x85\x94R\x94"
    data = b"\x80\x04]\x94(cm\none\n\x94" + size + b"cm\ntwo\n\x94" + size + (b"h\x01" + size) * 3 + (b"h\x05" + size) * 3 + b"e."
    one, two = ("one", (1, 2)), ("two", (1, 2))
    assert loads(data, names)[0] == [one, two, one, one, one, two, two, two]
