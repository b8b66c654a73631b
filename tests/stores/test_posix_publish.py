"""The step that gives a file its name, and the directories on its way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.stores.posix import publish as posix_commit
from ckptsync.stores.posix.publish import _MOST, DurableDirectories


@pytest.fixture
def at(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def made(path: Path, content: bytes) -> os.stat_result:
    path.write_bytes(content)
    return path.stat()


def losing_the_answer(call: Callable[..., None], code: int) -> Callable[..., None]:
    def lost(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        raise OSError(code, "sent again by the NFS client")

    return lost


def test_a_rename_whose_answer_was_lost_is_a_success(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = made(tmp_path / "part", b"new")
    made(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "rename", losing_the_answer(os.rename, errno.ENOENT))
    posix_commit.replace(at, "part", "a", part)
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_rename_of_what_is_gone_is_none(at: int, tmp_path: Path) -> None:
    part = made(tmp_path / "part", b"new")
    # else its number would be free for the next file, which no writer lets happen
    (tmp_path / "part").rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError):
        posix_commit.replace(at, "part", "a", part)
    made(tmp_path / "a", b"somebody else's")
    with pytest.raises(FileNotFoundError):
        posix_commit.replace(at, "part", "a", part)


def test_a_link_whose_answer_was_lost_is_a_success(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = made(tmp_path / "part", b"x")
    monkeypatch.setattr(os, "link", losing_the_answer(os.link, errno.EEXIST))
    posix_commit.claim(at, "part", "a", part)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"x")]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_where_links_are_refused_an_exclusive_rename_claims_the_name(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    posix_commit.claim(at, "part", "a", made(tmp_path / "part", b"x"))
    with pytest.raises(FileExistsError):
        posix_commit.claim(at, "part", "a", made(tmp_path / "part", b"y"))
    assert (tmp_path / "a").read_bytes() == b"x"


def test_directories_that_cannot_be_synced_need_not_be(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int, code: list[int]) -> None:
        raise OSError(code[0], os.strerror(code[0]))

    monkeypatch.setattr(os, "fsync", lambda fd: refused(fd, [errno.EINVAL]))
    posix_commit.sync_directory(at)
    monkeypatch.setattr(os, "fsync", lambda fd: refused(fd, [errno.EIO]))
    with pytest.raises(OSError, match="Input/output"):
        posix_commit.sync_directory(at)


@pytest.fixture
def directories(tmp_path: Path) -> DurableDirectories:
    return DurableDirectories(str(tmp_path))


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories that fsync is called for."""
    found: list[str] = []

    def fsync(fd: int) -> None:
        found.append(str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix(str(tmp_path)) or "/")

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def make(directories: DurableDirectories, *way: str) -> None:
    with directories.opened(way) as made:
        directories.make_durable(way, made)


def test_each_directory_on_the_way_is_durable_once(
    directories: DurableDirectories, synced: list[str], tmp_path: Path
) -> None:
    make(directories, "a", "b")
    make(directories, "a", "b")
    make(directories, "a", "c")
    make(directories)
    assert synced == ["/", "/a", "/a"]
    assert (tmp_path / "a/b").is_dir()


def test_a_directory_that_was_there_may_be_another_writers_who_dies_before_its_fsync(
    directories: DurableDirectories, synced: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    make(directories, "a")
    assert synced == ["/"]


def test_a_directory_made_again_by_somebody_else_is_another_one(
    directories: DurableDirectories, synced: list[str], tmp_path: Path
) -> None:
    make(directories, "a", "b")
    for _ in range(3):
        (tmp_path / "a/b").rmdir()
        (tmp_path / "a").rmdir()
        (tmp_path / "a/b").mkdir(parents=True)
        synced.clear()
        make(directories, "a", "b")
        assert synced == ["/", "/a"]


def test_a_directory_with_a_file_in_it_is_secured_although_others_delete_all_that_is_empty(
    directories: DurableDirectories, tmp_path: Path
) -> None:
    with directories.opened(["a", "b"]) as made:
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=made[-1]))
        with pytest.raises(OSError, match="not empty"):
            (tmp_path / "a/b").rmdir()
        directories.make_durable(["a", "b"], made)


def test_few_directories_are_kept_open_and_not_for_long(
    directories: DurableDirectories, tmp_path: Path
) -> None:
    def kept() -> int:
        return sum(
            os.path.realpath(fd).startswith(f"{tmp_path}/")
            for fd in Path("/proc/self/fd").iterdir()
        )

    for n in range(2 * _MOST):
        make(directories, str(n))
    assert kept() == _MOST
    directories.forget_older(0.0)
    assert kept() == 0
