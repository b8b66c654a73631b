"""Pickles are read as Python reads them, and nothing in them is run.

What no checkpoint has is refused, soon and in little memory.
"""

from __future__ import annotations

import collections
import gc
import io
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats import pickles
from ckptsync.formats.pickles import (
    AnyClass,
    Build,
    Name,
    PickledObject,
    Stated,
    Unknown,
    brief,
    loads,
    made,
    ordered,
    with_unknown,
)
from tests.hostile import expensive_pickles
from tests.support.exhaustive import sampled
from tests.support.files_in_memory import Call, Global, torch_pickle

ROOT = Path(__file__).parents[2]


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
)
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())


def nested(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.lists(inner)
            | st.tuples(inner)
            | st.tuples(inner, inner, inner, inner)
            | st.dictionaries(KEYS, inner)
        )

    return st.recursive(scalars, grow, max_leaves=30)


VALUES = nested(PLAIN | st.binary() | st.frozensets(st.integers()) | st.sets(st.text()))


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


class Key(Thing):
    """The same, as a dictionary's key."""


class Other(Thing):
    """One of which no `Stated` is made."""


NAMES: dict[Name, Build] = {
    Name(__name__, "Size"): lambda _, args: ("size", *args),
    Name(__name__, "Thing"): Point,
    Name(__name__, "Key"): Point,
    Name(__name__, "Other"): made,
}
SIZES = st.lists(st.integers(0, 70000), max_size=4).map(Size)
# numbers at which the opcode changes, and texts that hold opcodes
NUMBERS = st.sampled_from([0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**39, 2**47, 2**63, -1])
TEXTS = st.sampled_from(["__0_0.distcp", "", "ä\u0094", "\x94", "x" * 300, "\ud800"])
ATTRIBUTES = st.dictionaries(
    st.sampled_from("abcdefg"), SIZES | TEXTS | NUMBERS | st.integers(-(2**60), 2**60) | st.none()
)
STATED = ATTRIBUTES.filter(bool)
THINGS = STATED.map(lambda a: Thing(**a)) | ATTRIBUTES.map(lambda a: Other(**a))
NESTED = st.recursive(
    VALUES | SIZES | THINGS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.lists(st.tuples(STATED.map(lambda a: Key(**a)), inner)).map(dict)
    ),
    max_leaves=20,
)


def by_python(value: Any, protocol: int) -> bytes:
    """As the pickler that is written in Python writes it, which frames otherwise and mentions
    more.
    """
    out = io.BytesIO()
    pickle._Pickler(out, protocol).dump(value)
    return out.getvalue()


def plain(value: Any) -> Any:
    """For comparing, with what Python makes of the same pickle too: objects as their attributes,
    dictionaries in their order.
    """
    if isinstance(value, Point):
        return (
            "object",
            {key: plain(one) for key, one in zip(value.items[::2], value.items[1::2], strict=True)},
        )
    if isinstance(value, PickledObject):
        return ("object", value.state and plain_attributes(value.state))
    if isinstance(value, Thing):
        return (
            "object",
            (
                plain_attributes(value.__dict__)
                if vars(value) or not isinstance(value, Other)
                else None
            ),
        )
    if isinstance(value, Size):
        return ("size", tuple(value))
    if isinstance(value, dict):
        return ("dict", [(plain(key), plain(one)) for key, one in value.items()])
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def plain_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(one) for key, one in attributes.items()}


def outcome(data: bytes, names: dict[Name, Build] = NAMES) -> Any:
    """Value and end, or the kind of error."""
    try:
        value, end = loads(data, names)
        return plain(value), end
    except CkptsyncError as e:
        return type(e)
    except RecursionError:  # of `plain`: a changed byte made a value contain itself
        return "endless"


class _Python(pickle._Unpickler):
    """Python's own, in Python: C's allocates by a number in the file."""

    def find_class(self, module: str, name: str) -> Any:
        if Name(module, name) not in NAMES:
            raise pickle.UnpicklingError(name)
        return globals()[name]


def python(data: bytes) -> Any:
    """Python's value and end, or None."""
    file = io.BytesIO(data)
    try:
        value = _Python(file).load()
        return plain(value), len(data)
    except RecursionError:
        return "endless"
    except Exception:  # noqa: BLE001  it raises anything
        return None


def test_shared_and_cyclic_values_keep_their_identity() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    found, _ = loads(pickle.dumps([shared, shared]), {})
    assert found[0] is found[1]
    assert found[0][1] is found[0]


@pytest.mark.parametrize("opcode", b"ioP\x82\x83\x84\x92\x96\x972SUT\xff")
def test_opcodes_that_no_checkpoint_has_are_refused(opcode: int) -> None:
    with pytest.raises(Corrupt, match="opcode"):
        loads(b"\x80\x02(" + bytes([opcode]) + b"os\nsystem\n.", {})


THING = b"\x80\x02c" + f"{__name__}\nThing\n".encode()
REFUSED: dict[bytes, str] = {
    pickle.dumps({(("a",),): 1}): "key",
    b"\x80\x06N.": "protocol 6",
    b"\x80\x02NN.": "one value",
    b"\x80\x02(N.": "one value",
    b"\x80\x02\x8b\xd0\x07\x00\x00" + b"\x01" * 2000 + b".": "a number of 2000 bytes",
    # only names can be called, and a name is matched whole
    b"\x80\x02K\x01)R.": "",
    b"\x80\x02]K\x01R.": "",
    THING + b"K\x01R.": "",
    torch_pickle(Global(__name__, "Thing.__class__")): "",
    torch_pickle(Global(f"{__name__}.Thing", "")): "",
    torch_pickle(Global("builtins", "getattr")): "",
    torch_pickle(Global(__name__, "thing")): "",
    b"\x80\x02X\x01\x00\x00\x00aQ.": "persistent",
    # a memo's index is given once, and not out of reach
    b"\x80\x02Nr\xff\xff\xff\xff.": "",
    b"\x80\x02Nq\x000Nq\x00.": "",
    b"\x80\x02Nq\x01h\x00.": "",
    # attributes are set, and set once; a declared class takes no arguments
    THING + b")\x81.": "",
    THING + b")\x81}K\x01b}K\x01b.": "",
    THING + b")\x81}b}b.": "",
    THING + b"K\x01\x85R.": "",
    b"\x80\x02c" + f"{__name__}\nOther\n".encode() + b")R}b}b.": "state for something",
    b"\x80\x02]}b.": "state for something",
}


@pytest.mark.parametrize("data", REFUSED)
def test_what_no_checkpoint_has_is_refused(data: bytes) -> None:
    with pytest.raises((Corrupt, Unsupported), match=REFUSED[data] or "pickle"):
        loads(data, NAMES)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_where_anybodys_names_are_words_nothing_is_run_either(
    tmp_path: Path, protocol: int
) -> None:
    canary = tmp_path / "ran"
    odd = [
        collections.deque([1]),
        collections.defaultdict(int, {"a": 1}),
        collections.Counter("ab"),
        canary,
    ]
    found, _ = loads(pickle.dumps({"weights": Payload(canary), "odd": odd}, protocol), AnyClass())
    assert not canary.exists()
    assert isinstance(found["weights"], Unknown)
    assert (found["weights"].name.name, found["weights"].args) == ("system", (f"touch {canary}",))
    assert [one.name.name for one in found["odd"]] == [
        "deque",
        "defaultdict",
        "Counter",
        "PosixPath",
    ]


def test_an_object_of_nobodys_class_is_found_however_deep_it_lies() -> None:
    odd, known = Unknown(Name("own", "Class"), ()), Name("a", "b")
    for value in (
        odd,
        [1, (odd,)],
        {"a": {2: odd}},
        {odd: 1},
        PickledObject(known, (odd,)),
        PickledObject(known, (), {"x": odd}),
        {odd},
    ):
        assert with_unknown({"ours": [1], "odd": value, "same": value}) == {"odd", "same"}
    endless: list[object] = [PickledObject(known, (), {"x": {1}}), "text"]
    endless.append(endless)
    assert not with_unknown({"endless": endless})
    endless.append(odd)
    assert with_unknown({"endless": endless, odd: 1, "ours": 2}) == {"endless", odd}


def test_a_name_that_is_known_becomes_its_arguments_and_is_never_anybodys() -> None:
    data = torch_pickle([Call(Global("a.b", "C"), 1, "x"), Call(Global("a.b", "D"))])
    known, other = loads(data, AnyClass({Name("a.b", "C"): made}))[0]
    assert (type(known), str(known.name), known.args) == (PickledObject, "a.b.C", (1, "x"))
    assert type(other) is Unknown
    with pytest.raises(Corrupt):
        # an item for what takes none
        loads(b"\x80\x02ca\nC\n)RK\x01a.", AnyClass({Name("a", "C"): made}))


def test_memo_indices_begin_at_one_and_ordered_dictionaries_are_pairs_in_python_2() -> None:
    assert loads(b"\x80\x02]q\x01(K\x05h\x01e.", {})[0][0] == 5
    data = torch_pickle(Call(Global("collections", "OrderedDict"), [["b", 1], ["a", 2]]))
    pairs, _ = loads(data, {Name("collections", "OrderedDict"): ordered})
    assert list(pairs.items()) == [("b", 1), ("a", 2)]


def test_a_value_is_shown_without_walking_into_it() -> None:
    endless: tuple[object, ...] = ()
    for _ in range(200):
        endless = (endless, endless)
    assert brief(endless) == "a tuple"
    assert brief((1, "x", None, 2.5)) == "(1, 'x', None, 2.5)"
    assert brief((1, 2, 3, 4, 5)) == "a tuple"
    assert brief(10**5000) == "a int"
    assert len(brief("x" * 10**6)) < 100


def test_hostile_pickles_end_soon_and_take_memory_in_proportion_to_their_size() -> None:
    tried = sampled(expensive_pickles.MAKE, 16)
    program = [sys.executable, "-m", "tests.hostile.expensive_pickles", *tried]
    found = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    rows = [line.split("\t") for line in found.stdout.splitlines()]
    assert [row[0] for row in rows] == tried
    assert not [row for row in rows if row[-1].startswith("died")]
    assert not [
        row for row in rows if int(row[3]) > 2 * pickles.FLOOR + pickles.FACTOR * int(row[1])
    ]
    assert not [row for row in rows if row[-1] != "read" and not row[-1].startswith("Corrupt")]


def test_what_read_a_pickle_needs_no_collector_to_go() -> None:
    """A merge freezes what there is: the memo of a large pickle would stay as long as it runs."""
    gc.collect()
    gc.disable()
    try:
        found, _ = loads(pickle.dumps([Thing(a=1), Thing(a=2)]), NAMES)
        assert not [one for one in gc.get_objects() if type(one) is pickles._Machine]
        assert [one.items for one in found] == [["a", 1], ["a", 2]]
    finally:
        gc.enable()


@given(NESTED, st.integers(2, 5), st.booleans())
@example([Thing(a=1), Thing(a=1)], 4, False)  # noqa: FBT003
@example((Other(), {}, (1, 2, 3, 4)), 4, False)  # noqa: FBT003
@example([Size((1, 2)), Size((3,)), Size((1, 2, 3)), Size(()), Size((1, 2))], 4, True)  # noqa: FBT003
def test_objects_are_read_as_python_reads_them(value: Any, protocol: int, in_python: bool) -> None:  # noqa: FBT001
    data = by_python(value, protocol) if in_python else pickle.dumps(value, protocol)
    # bytes and sets are calls of codecs and builtins before protocol 4
    expected = python(data) or Unsupported
    assert expected is not Unsupported or protocol < 4
    assert outcome(data) == expected


def like(count: int) -> dict[Any, Any]:
    """Entries of a ``storage_data`` that differ as those of a large model do."""
    return {
        Key(fqn=f"layer.{n}", index=n % 4, offset=Size((n // 9, 70000))): Thing(
            file=f"__{n % 3}", start=1200 * n, length=1700
        )
        for n in range(count)
    }


@pytest.mark.parametrize("value", ["objects", "entries"])
def test_a_change_of_any_byte_is_read_as_python_does_or_refused(value: str) -> None:
    random.seed(5)
    thing = {
        "x": [Thing(a=Size((1, 2)), b="text", c=300), Thing(a=Size((1, 2)), b="text", c=70000)],
        "y": Other(d=(1, 2, 3, 4)),
    }
    data = pickle.dumps([thing] * 2 if value == "objects" else [like(7), "later"], 4)
    alike = 0
    for at in sampled(range(len(data)), 2):
        for changed in {data[at] ^ (1 << bit) for bit in range(8)} | {random.randrange(256)}:
            damaged = data[:at] + bytes([changed]) + data[at + 1 :]
            expected = outcome(damaged)
            theirs = python(damaged)
            if isinstance(expected, tuple) and isinstance(theirs, tuple):
                assert repr(expected[0]) == repr(theirs[0]), at  # NaN is not itself
                alike += 1
    assert alike > len(data) // 2


def test_an_end_anywhere_is_corrupt() -> None:
    things = [Thing(a=Size((1, 2)), b="text"), Thing(a=Size((1, 2)), b="text")]
    data = pickle.dumps([things, like(6)], 4)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            loads(data[:size], NAMES)


def test_attributes_that_are_mentioned_again_are_refused() -> None:
    thing = Thing(a=1, b=2)
    with pytest.raises(Corrupt, match="mentioned again"):
        loads(pickle.dumps([thing, thing.__dict__], 4), NAMES)


UNITS = [b"}", b"]", b"(", b"N", b"h\x00", b"\x94", b"(N", b"}NNs", b"M\x00\xff", b")\x85", b"\x8f"]


@pytest.mark.parametrize("unit", UNITS)
def test_values_that_take_too_much_memory_are_refused_and_small_ones_are_not(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MOST", 1 << 20)
    with pytest.raises(Corrupt, match=r"take more than|within each other"):
        loads(b"\x80\x04N\x94" + unit * 300_000 + b".", NAMES)
    with pytest.raises(Corrupt, match="one value"):
        loads(b"\x80\x04" + b"N" * 30_000 + b".", NAMES)
