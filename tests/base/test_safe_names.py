from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.safe_names import checked_path

PLAIN = [
    "a",
    "a/b",
    ".metadata",
    "pytorch_model_fsdp_0/__0_0.distcp",
    "..a",
    "a..",
    "...",
    " ",
    "ü/日本",
    "~",
    "a:b",
    "-rf",
    "x" * 255,
]
NOT_PLAIN = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/.",
    "a/..",
    "../a",
    "a/../b",
    "a\\b",
    "a\0",
    "a\nb",
    "a\x7fb",
    "a\x1b[2J",
    "x" * 256,
]


@pytest.mark.parametrize("path", PLAIN)
def test_a_plain_relative_path_is_itself(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize("path", NOT_PLAIN)
def test_any_other_path_is_refused(path: str) -> None:
    with pytest.raises(Corrupt):
        checked_path(path)


def test_lengths_are_counted_in_bytes() -> None:
    assert checked_path("ü" * 127)
    with pytest.raises(Corrupt):
        checked_path("ü" * 128)
    assert checked_path("/".join(["x" * 255] * 16)[:4096])
    with pytest.raises(Corrupt):
        checked_path("/".join(["x" * 255] * 17))


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(Corrupt):
        checked_path(b"a\xff".decode("utf-8", "surrogateescape"))


def test_a_refusal_shows_the_name_without_its_control_characters() -> None:
    with pytest.raises(Corrupt) as caught:
        checked_path("a\x1b[2J\n")
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
