"""Walking what somebody else writes: links, partial files, depth, and what vanishes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.walk import DEEPEST, Stat, open_checkpoint_file, stat_open, walk


def test_a_walk_lists_regular_files_and_says_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__0_0.distcp").write_bytes(b"abc")
    for name in (".tmpAb3xYz", "sub/.metadata.tmp", "model.part", "checkpoint-is-incomplete.txt"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "folder").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "_ckptsync").mkdir()
    (tmp_path / "_ckptsync" / "x").touch()

    found = walk(tmp_path)

    assert [(f.path, f.size) for f in found.files] == [("sub/__0_0.distcp", 3)]
    assert {f.path for f in found.partial} == {
        ".tmpAb3xYz",
        "sub/.metadata.tmp",
        "model.part",
        "checkpoint-is-incomplete.txt",
    }
    assert found.others == ("_ckptsync", "folder", "link", "pipe")


def test_the_root_itself_may_not_be_a_link_nor_need_it_exist(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").touch()
    (tmp_path / "link").symlink_to("real")
    assert walk(tmp_path / "link").files == ()
    assert walk(tmp_path / "nothing").files == ()
    assert len(walk(tmp_path / "real").files) == 1


def test_a_tree_without_a_bottom_is_refused(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*["d"] * DEEPEST)
    deepest.mkdir(parents=True)
    assert walk(tmp_path).files == ()
    (deepest / "d").mkdir()
    with pytest.raises(Corrupt, match="directories deep"):
        walk(tmp_path)


def test_no_component_of_a_name_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_text("x")
    (tmp_path / "d").symlink_to("real")
    (tmp_path / "f").symlink_to("real/f")
    os.mkfifo(tmp_path / "pipe")
    for name in ("d/f", "f", "pipe", "nothing", "real"):
        with pytest.raises(Incomplete):
            open_checkpoint_file(tmp_path, name)
    fd = open_checkpoint_file(tmp_path, "real/f")
    (listed,) = walk(tmp_path / "real").files
    assert stat_open(fd, listed.path) == listed
    os.close(fd)


def test_a_time_that_was_set_back_is_a_touch_and_a_name_more_or_less_is_none() -> None:
    before = Stat("x", 1, 5, 7, 0, ctime=100, links=2)
    assert not before.was_touched(before)
    assert before.was_touched(replace(before, ctime=101))
    assert not before.was_touched(replace(before, ctime=101, links=1))
    assert before.was_touched(replace(before, size=2))
    assert before.is_file_of(replace(before, ctime=101, mtime=6))
    assert before.is_file_of(replace(before, inode=8))  # a reflink
    assert not before.is_file_of(replace(before, device=1, mtime=6))
    assert before == replace(before, ctime=101, links=1)


def test_only_the_names_that_are_asked_for_are_seen_with_what_is_below(tmp_path: Path) -> None:
    for name in ("a", "b", ".tmpabcdef", "d/a", "e/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link").symlink_to("a")
    below = walk(tmp_path, ("a", "gone", "d", "link", ".tmpabcdef"))
    assert ([s.path for s in below.files], [s.path for s in below.partial], below.others) == (
        ["a", "d/a"],
        [".tmpabcdef"],
        ("link",),
    )
    assert below.files[0] in walk(tmp_path).files
