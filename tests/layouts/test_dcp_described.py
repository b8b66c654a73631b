"""Objects of a `.metadata`: several at once are as one after the other, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.formats.pickles import Stated
from ckptsync.layouts.dcp_described import Box, Described, Index, Item

JUNK: st.SearchStrategy[Any] = st.sampled_from([None, 5, -1, "text", (), (0, 4), (1, -1), (True,), [], True, 1 << 70])
NAMES = {Item: ("relative_path", "offset", "length"), Index: ("fqn", "index", "offset"), Box: ("offsets", "sizes")}


def outcome(kind: type[Stated], names: Any, columns: Any, several: Any) -> Any:
    """Every attribute of every object, or that they were refused."""
    slots: tuple[str, ...] = kind.__slots__
    try:
        made = several(kind, names, columns)
    except Corrupt:
        return Corrupt
    return [[getattr(one, slot) for slot in slots] for one in made]


def one_by_one(kind: type[Stated], names: Any, columns: Any) -> Any:
    return Stated.several.__func__(kind, names, columns)  # type: ignore[attr-defined]


def at_once(kind: type[Stated], names: Any, columns: Any) -> Any:
    return kind.several(names, columns)


@pytest.mark.parametrize("kind", NAMES)
@given(data=st.data())
def test_several_are_as_one_after_the_other(kind: Any, data: st.DataObject) -> None:
    names = list(data.draw(st.just(NAMES[kind]) | st.permutations(NAMES[kind])))
    usual = {"relative_path": "file", "fqn": "name", "offset": (0, 4) if kind is Index else 7}
    rows = data.draw(st.lists(st.tuples(*[st.just(usual.get(name, 3)) | JUNK for name in names]), min_size=1, max_size=4))
    columns = list(zip(*rows, strict=True))
    assert outcome(kind, names, columns, at_once) == outcome(kind, names, columns, one_by_one)


@pytest.mark.parametrize("start", [-1, True, "0", None])
def test_an_item_that_lies_nowhere_is_refused_among_several(start: object) -> None:
    with pytest.raises(Corrupt, match="without a file"):
        Item.several(["relative_path", "offset", "length"], [["a", "b"], [0, start], [4, 4]])


def test_an_offset_that_is_none_is_refused_among_several() -> None:
    with pytest.raises(Corrupt, match="natural numbers"):
        Index.several(["fqn", "index", "offset"], [["a", "b"], [0, 0], [(0, 1), (0, -1)]])


def test_an_index_without_an_offset_is_of_the_whole_tensor() -> None:
    found = Index.several(["fqn", "index", "offset"], [["a", "b"], [None, 0], [None, (1,)]])
    assert [one.key for one in found] == [("a", ()), ("b", (1,))]


def test_a_box_has_as_many_axes_as_its_tensor() -> None:
    box, described = Box(), Described()
    box.take(["offsets", (0, 0), "sizes", (1, 1)])
    with pytest.raises(Corrupt):
        described.take(["properties", None, "size", (4,), "chunks", [box]])
