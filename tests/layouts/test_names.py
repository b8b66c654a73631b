from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Incomplete
from ckptsync.layouts.names import Within, home, inside, join
from ckptsync.model import read_whole
from tests.plain_files import MemoryFiles

PART = st.text("ab.", min_size=1, max_size=3)
PATH = st.lists(PART, max_size=3).map("/".join)


@given(PATH, PART)
def test_what_is_joined_to_a_root_is_inside_it(root: str, name: str) -> None:
    assert inside([join(root, name)], root) == {name: join(root, name)}


def test_the_root_itself_has_no_name() -> None:
    assert join("", "latest") == "latest"
    assert join("a/b", "latest") == "a/b/latest"


def test_a_model_lies_at_the_top_or_in_the_first_directory_of_those_that_frameworks_use() -> None:
    found = [
        home(names, {"m"}.intersection) for names in (["m", "model/m"], ["hf_model/m", "model/m", "a/m"], ["a/m", "a/model/m"], [])
    ]
    assert found == [("",), ("model",), (), ()]


def test_what_lies_deeper_or_elsewhere_is_not_inside() -> None:
    names = ["latest", "a/latest", "a/b/latest", "aa/latest", "a"]
    assert inside(names, "a") == {"latest": "a/latest"}
    assert inside(names, "") == {"latest": "latest", "a": "a"}
    assert inside(names, "b") == {}


def test_a_directory_is_seen_as_if_it_were_all() -> None:
    files = Within(MemoryFiles({"a/config.json": b"{}", "a/b/config.json": b"[]", "config.json": b"3"}), "a")
    assert files.sizes() == {"config.json": 2}
    assert read_whole(files, "config.json") == b"{}"
    with pytest.raises(Incomplete, match="b: not there"):
        files.read_into("b", 0, memoryview(bytearray(1)))
