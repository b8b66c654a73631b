from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.safe_names import checked_path

PLAIN = ["a", "a/b", ".metadata", "..a", "a..", "...", " ", "ü/日本", "~", "a:b", "-rf", "x" * 255]
PLAIN += ["ü" * 127, "/".join(["x" * 255] * 16)[:4096]]

NOT_PLAIN = ["", "/", "/a", "a/", "a//b", ".", "..", "a/.", "a/..", "../a", "a/../b", "a\\b"]
NOT_PLAIN += ["a\0", "a\nb", "a\x7fb", "a\x1b[2J\n", "x" * 256, "a\udcff"]
# lengths are counted in bytes
NOT_PLAIN += ["ü" * 128, "/".join(["x" * 255] * 17)]


@pytest.mark.parametrize("path", PLAIN)
def test_a_plain_relative_path_is_itself(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize("path", NOT_PLAIN)
def test_any_other_path_is_refused_without_its_control_characters(path: str) -> None:
    with pytest.raises(Corrupt) as caught:
        checked_path(path)
    assert str(caught.value).isprintable()


@given(st.text(st.sampled_from("a./\\\n\0~ü"), max_size=12))
def test_what_is_let_through_stays_below_where_it_is_joined(path: str) -> None:
    try:
        checked_path(path)
    except Corrupt:
        return
    joined = Path("/root/below") / path
    assert joined.parts[:3] == ("/", "root", "below")
    assert ".." not in joined.parts
    assert len(joined.parts) == 3 + len(path.split("/"))
