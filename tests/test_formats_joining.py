from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.formats.joining import inside, join

PART = st.text("ab.", min_size=1, max_size=3)
PATH = st.lists(PART, max_size=3).map("/".join)


@given(PATH, PART)
def test_what_is_joined_to_a_root_is_inside_it(root: str, name: str) -> None:
    assert inside([join(root, name)], root) == {name: join(root, name)}


def test_the_root_itself_has_no_name() -> None:
    assert join("", "latest") == "latest"
    assert join("a/b", "latest") == "a/b/latest"


def test_what_lies_deeper_or_elsewhere_is_not_inside() -> None:
    names = ["latest", "a/latest", "a/b/latest", "aa/latest", "a"]
    assert inside(names, "a") == {"latest": "a/latest"}
    assert inside(names, "") == {"latest": "latest", "a": "a"}
    assert inside(names, "b") == {}
