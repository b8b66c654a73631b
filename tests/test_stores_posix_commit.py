"""The last step of a write, when its answer is lost: it is done, and the client is told that it cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.stores.posix import commit as posix_commit


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


def test_a_rename_whose_answer_was_lost_is_a_success(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = made(tmp_path / "part", b"new")
    made(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "rename", losing_the_answer(os.rename, errno.ENOENT))
    posix_commit.replace(at, "part", "a", part)
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_rename_of_what_is_gone_is_none(at: int, tmp_path: Path) -> None:
    part = made(tmp_path / "part", b"new")
    (tmp_path / "part").rename(tmp_path / "kept")  # else its number would be free for the next file, which no writer lets happen
    with pytest.raises(FileNotFoundError):
        posix_commit.replace(at, "part", "a", part)
    made(tmp_path / "a", b"somebody else's")
    with pytest.raises(FileNotFoundError):
        posix_commit.replace(at, "part", "a", part)


def test_a_link_whose_answer_was_lost_is_a_success(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = made(tmp_path / "part", b"x")
    monkeypatch.setattr(os, "link", losing_the_answer(os.link, errno.EEXIST))
    posix_commit.claim(at, "part", "a", part)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"x")]


def test_a_taken_name_is_left_alone(at: int, tmp_path: Path) -> None:
    made(tmp_path / "a", b"theirs")
    part = made(tmp_path / "part", b"ours")
    with pytest.raises(FileExistsError):
        posix_commit.claim(at, "part", "a", part)
    assert (tmp_path / "a").read_bytes() == b"theirs"


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


def test_directories_that_cannot_be_synced_need_not_be(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int, code: list[int]) -> None:
        raise OSError(code[0], os.strerror(code[0]))

    monkeypatch.setattr(os, "fsync", lambda fd: refused(fd, [errno.EINVAL]))
    posix_commit.sync_directory(at)
    monkeypatch.setattr(os, "fsync", lambda fd: refused(fd, [errno.EIO]))
    with pytest.raises(OSError, match="Input/output"):
        posix_commit.sync_directory(at)
