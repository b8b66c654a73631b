"""Files beneath a directory, reached over no link, and a few kept open."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from ckptsync import safe_open
from ckptsync.safe_open import OpenFile, OpenFiles


def listed(root: Path, prefix: str = "") -> list[str]:
    return [
        name
        for name, _ in safe_open.files_below(
            str(root), prefix, lambda part: part.startswith("skip")
        )
    ]


def test_a_walk_is_sorted_as_whole_paths_and_asks_about_every_part(tmp_path: Path) -> None:
    for name in ["a.b", "a/b", "a/skip", "skip/x", "a-b/c", "ab"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert listed(tmp_path) == sorted(listed(tmp_path)) == ["a-b/c", "a.b", "a/b", "ab"]
    assert listed(tmp_path, "a/") == ["a/b"]
    assert listed(tmp_path, "nowhere/") == listed(tmp_path, "a.b/") == []


def test_what_vanishes_during_a_walk_was_never_there(tmp_path: Path) -> None:
    for name in ["a", "b", "c"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"x")
    found = []
    for name, _ in safe_open.files_below(str(tmp_path), "", lambda _: False):
        found.append(name)
        if name == "a/x":
            (tmp_path / "b/x").unlink()
            (tmp_path / "b").rmdir()
    assert found == ["a/x", "c/x"]


def test_one_name_that_cannot_be_asked_about_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a directory does not say what its names are, each is asked about; on NFS one may be
    stale.
    """

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.stat, self._entry = entry.name, entry.stat, entry

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            if self.name == "b":
                raise OSError(errno.ESTALE, "stale")
            return self._entry.is_dir(follow_symlinks=follow_symlinks)

    @contextlib.contextmanager
    def scandir(fd: int) -> Iterator[list[Entry]]:
        with real(fd) as entries:
            yield sorted(map(Entry, entries), key=attrgetter("name"))

    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
    real, errors = os.scandir, list[str]()
    monkeypatch.setattr(os, "scandir", scandir)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        found = safe_open.tree(fd, "", lambda *_: False, lambda _, path: errors.append(path))
        assert [name for name, _ in found] == ["a", "c"]
    finally:
        os.close(fd)
    assert errors == ["b"]


def test_a_walk_that_nobody_ends_leaves_no_directory_open(tmp_path: Path) -> None:
    for name in ["a/b/x", "a/b/y"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def opened_below() -> list[str]:
        targets = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                targets.append(str(fd.readlink()))
        return [target for target in targets if target.startswith(str(tmp_path.resolve()))]

    files = safe_open.files_below(str(tmp_path), "", lambda _: False)
    assert next(files)[0] == "a/b/x"
    assert len(opened_below()) == 3
    del files
    assert opened_below() == []


def test_a_directory_that_became_a_link_during_a_walk_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_bytes(b"x")
    for name in ["store/a/x", "store/b/x"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x")
    found = []
    for name, _ in safe_open.files_below(str(tmp_path / "store"), "", lambda _: False):
        found.append(name)
        if name == "a/x":
            (tmp_path / "store/b").rename(tmp_path / "aside")
            (tmp_path / "store/b").symlink_to(tmp_path / "elsewhere")
    assert found == ["a/x"]


def test_reading_at_the_end_says_how_much_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    fd = safe_open.open_file(str(tmp_path), "a")
    out = bytearray(4)
    assert safe_open.read_at(fd, 8, memoryview(out)) == 2
    assert out == b"89\0\0"
    assert safe_open.read_at(fd, 8, memoryview(bytearray())) == 0
    preadv = os.preadv  # a read may return less than there is
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    assert safe_open.read_at(fd, 2, memoryview(whole := bytearray(9))) == 8
    assert whole == b"23456789\0"
    os.close(fd)


@pytest.mark.parametrize("name", ["link", "dir", "pipe", "gone", "linked/a", "a/b"])
def test_what_is_no_regular_file_is_an_absence_and_leaks_no_descriptor(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "linked").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    # other tests' files are closed when they are collected, which must not happen in between
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for call in (safe_open.open_file, safe_open.stat_file):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # which one is what is_absence is about
            call(str(tmp_path), name)
        assert safe_open.is_absence(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_named_file_is_replaced_whole_for_everybody_to_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.symlink_to("elsewhere")
    safe_open.replace_named(path, b"x")
    assert not path.is_symlink()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"x", 0o644)
    (tmp_path / "dir" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="dir"):
        safe_open.replace_named(tmp_path / "dir", b"x")
    assert {left.name for left in tmp_path.iterdir()} == {"a", "dir"}


class Opener:
    """Files that are kept open, at most two; and the names of those that were opened."""

    def __init__(self, root: Path) -> None:
        self.files, self.opened, self._root = OpenFiles(most=2), list[str](), root
        for name in "abc":
            (root / name).write_bytes(name.encode())

    def get(self, name: str) -> OpenFile:
        return self.files.get(name) or self.open(name)

    def open(self, name: str) -> OpenFile:
        self.opened.append(name)
        return self.files.put(name, os.open(self._root / name, os.O_RDONLY))


def open_in(root: Path) -> list[str]:
    """What this process has open below ``root``."""
    targets = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    return sorted(Path(t).name for t in targets if t.startswith(str(root)))


def content(file: OpenFile) -> bytes:
    out = bytearray(9)
    return bytes(out[: file.read_at(0, memoryview(out))])


def test_a_file_is_opened_once_until_others_push_it_out(tmp_path: Path) -> None:
    files = Opener(tmp_path)
    for name in "abaacbc":  # c pushes out b, which was used longest ago; b then a
        files.get(name)
    assert files.opened == ["a", "b", "c", "b"]


def test_a_file_dropped_while_it_is_used_stays_open_for_its_user(tmp_path: Path) -> None:
    files = Opener(tmp_path)
    used = files.get("a")
    files.files.forget("a")
    files.get("b")
    assert content(used) == b"a"
    del used
    assert open_in(tmp_path) == ["b"]


def test_reopening_and_age_let_go_of_the_old_file(tmp_path: Path) -> None:
    files = Opener(tmp_path)
    old = files.get("a")
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(tmp_path / "a")
    assert (content(files.get("a")), old.links()) == (b"a", 0)
    assert (content(files.open("a")), files.get("a").links()) == (b"new", 1)
    del old
    files.files.forget_older(1000)
    assert open_in(tmp_path) == ["a"]
    files.files.forget_older(-1)
    assert open_in(tmp_path) == []
