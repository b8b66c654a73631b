from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.stores.openfiles import OpenFile, OpenFiles


def opener(root: Path, opened: list[str]) -> OpenFiles:
    def open_file(name: str) -> int:
        opened.append(name)
        return os.open(root / name, os.O_RDONLY)

    for name in "abc":
        (root / name).write_bytes(name.encode())
    return OpenFiles(open_file, most=2)


def open_in(root: Path) -> list[str]:
    """What this process has open below ``root``."""
    targets = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    return sorted(Path(t).name for t in targets if t.startswith(str(root)))


def content(file: OpenFile) -> bytes:
    out = bytearray(9)
    return bytes(out[: file.read_at(0, memoryview(out))])


def test_a_file_is_opened_once_until_others_push_it_out(tmp_path: Path) -> None:
    opened: list[str] = []
    files = opener(tmp_path, opened)
    for name in "abaacbc":  # c pushes out b, which was used longest ago; b then a
        files.get(name)
    assert opened == ["a", "b", "c", "b"]


def test_a_file_dropped_while_it_is_used_stays_open_for_its_user(tmp_path: Path) -> None:
    files = opener(tmp_path, [])
    used = files.get("a")
    files.forget("a")
    files.get("b")
    assert content(used) == b"a"
    del used
    assert open_in(tmp_path) == ["b"]


def test_a_reading_thread_keeps_its_file_open_while_others_push_it_out(tmp_path: Path) -> None:
    files = opener(tmp_path, [])
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: content(files.get("abc"[n % 3])) == b"%c" % "abc"[n % 3].encode(), range(3000)))


def test_reopening_and_age_let_go_of_the_old_file(tmp_path: Path) -> None:
    files = opener(tmp_path, [])
    old = files.get("a")
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(tmp_path / "a")
    assert (content(files.get("a")), old.links()) == (b"a", 0)
    assert (content(files.reopen("a")), files.get("a").links()) == (b"new", 1)
    del old
    files.forget_older(1000)
    assert open_in(tmp_path) == ["a"]
    files.forget_older(-1)
    assert open_in(tmp_path) == []


def test_a_file_that_cannot_be_opened_is_not_remembered(tmp_path: Path) -> None:
    files = opener(tmp_path, [])
    with pytest.raises(FileNotFoundError):
        files.get("d")
    (tmp_path / "d").write_bytes(b"d")
    assert content(files.get("d")) == b"d"
