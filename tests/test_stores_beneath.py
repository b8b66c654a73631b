from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from ckptsync.stores import beneath


def listed(root: Path, prefix: str = "") -> list[str]:
    return [name for name, _ in beneath.walk(str(root), prefix, lambda part: part.startswith("skip"))]


def test_a_walk_is_sorted_as_whole_paths_and_asks_about_every_part(tmp_path: Path) -> None:
    for name in ["a.b", "a/b", "a/skip", "skip/x", "a-b/c", "ab"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert listed(tmp_path) == sorted(listed(tmp_path)) == ["a-b/c", "a.b", "a/b", "ab"]
    assert listed(tmp_path, "a/") == ["a/b"]
    assert listed(tmp_path, "nowhere/") == listed(tmp_path, "a.b/") == []


def test_a_walk_of_a_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        listed(tmp_path / "nowhere")


def test_what_vanishes_during_a_walk_was_never_there(tmp_path: Path) -> None:
    for name in ["a", "b", "c"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"x")
    found = []
    for name, _ in beneath.walk(str(tmp_path), "", lambda _: False):
        found.append(name)
        if name == "a/x":
            (tmp_path / "b/x").unlink()
            (tmp_path / "b").rmdir()
    assert found == ["a/x", "c/x"]


def test_reading_at_the_end_says_how_much_there_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    fd = beneath.open_file(str(tmp_path), "a")
    out = bytearray(4)
    assert beneath.read_at(fd, 8, memoryview(out)) == 2
    assert out == b"89\0\0"
    assert beneath.read_at(fd, 8, memoryview(bytearray())) == 0
    os.close(fd)


@pytest.mark.parametrize("name", ["link", "dir", "pipe", "gone", "linked/a", "a/b"])
def test_what_is_no_regular_file_is_an_absence_and_leaks_no_descriptor(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "linked").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    gc.collect()  # other tests' files are closed when they are collected, which must not happen in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    for call in (beneath.open_file, beneath.stat_file):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # which one is what is_absence is about
            call(str(tmp_path), name)
        assert beneath.is_absence(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_refused_permission_is_no_absence() -> None:
    assert not beneath.is_absence(PermissionError(13, "x"))
