from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptsync.stores.posix.ways import MOST, Ways


@pytest.fixture
def ways(tmp_path: Path) -> Ways:
    return Ways(str(tmp_path))


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories that fsync is called for."""
    found: list[str] = []

    def fsync(fd: int) -> None:
        found.append(str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix(str(tmp_path)) or "/")

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def make(ways: Ways, *way: str) -> None:
    with ways.made(way) as made:
        ways.secure(way, made)


def test_each_directory_on_the_way_is_durable_once(ways: Ways, synced: list[str], tmp_path: Path) -> None:
    make(ways, "a", "b")
    make(ways, "a", "b")
    make(ways, "a", "c")
    make(ways)
    assert synced == ["/", "/a", "/a"]
    assert (tmp_path / "a/b").is_dir()


def test_a_directory_that_was_there_may_be_another_writers_who_dies_before_its_fsync(
    ways: Ways, synced: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    make(ways, "a")
    assert synced == ["/"]


def test_a_directory_made_again_by_somebody_else_is_another_one(ways: Ways, synced: list[str], tmp_path: Path) -> None:
    make(ways, "a", "b")
    for _ in range(3):
        (tmp_path / "a/b").rmdir()
        (tmp_path / "a").rmdir()
        (tmp_path / "a/b").mkdir(parents=True)
        synced.clear()
        make(ways, "a", "b")
        assert synced == ["/", "/a"]


def test_a_delete_is_durable_and_takes_what_it_leaves_empty(ways: Ways, synced: list[str], tmp_path: Path) -> None:
    make(ways, "a", "b", "c")
    (tmp_path / "a/file").touch()
    synced.clear()
    ways.after_delete(["a", "b", "c"])
    assert synced == ["/a/b/c"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["file"]
    ways.after_delete(["nowhere", "at", "all"])


def test_a_directory_with_a_file_in_it_is_secured_although_others_delete_all_that_is_empty(ways: Ways, tmp_path: Path) -> None:
    with ways.made(["a", "b"]) as made:
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=made[-1]))
        with pytest.raises(OSError, match="not empty"):
            (tmp_path / "a/b").rmdir()
        ways.secure(["a", "b"], made)


def test_no_link_is_followed(ways: Ways, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/tmp")
    with pytest.raises(NotADirectoryError):
        make(ways, "a", "b")


def test_few_directories_are_kept_open_and_not_for_long(ways: Ways, tmp_path: Path) -> None:
    def kept() -> int:
        return sum(os.path.realpath(fd).startswith(f"{tmp_path}/") for fd in Path("/proc/self/fd").iterdir())

    for n in range(2 * MOST):
        make(ways, str(n))
    assert kept() == MOST
    ways.forget_older(0.0)
    assert kept() == 0
