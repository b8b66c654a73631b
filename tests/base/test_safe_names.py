from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.safe_names import checked_path, checked_run_name, find_alike, is_ours

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


OURS = [
    ".ckptsync",
    ".CkptSync.",
    "consolidated",
    "Consolidated. ",
    "con\u200bsolidated",
    "ckptsy~1",
]


def test_what_any_file_system_could_take_for_a_directory_of_ours_is_ours() -> None:
    assert all(map(is_ours, OURS))
    assert not any(map(is_ours, ["ckptsync", "consolidated2", "consol~x", "checkpoint-4"]))


def test_a_run_is_one_directory_that_is_not_reserved() -> None:
    assert checked_run_name("run.1") == "run.1"
    for name in ("a/b", ".run", "_run", "consolidated", ""):
        with pytest.raises(Corrupt):
            checked_run_name(name)


def test_paths_that_some_file_systems_do_not_tell_apart_are_paired() -> None:
    assert find_alike(["a", "A", "b"]) == [("a", "A")]
    assert find_alike(["\xe9", "e\u0301"]) == [("\xe9", "e\u0301")]
    assert find_alike(["A", "a/b"]) == [("A", "a/b")]
    assert find_alike(["a/b", "a/c", "ab"]) == []
