"""Folders that others use: what the system refuses has one of our names, and nothing half made is seen."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.spool.folders import children, opened_like, refusals, remove, renamed, written


@pytest.mark.parametrize(
    ("number", "ours"),
    [
        (errno.EACCES, ConfigError),
        (errno.EPERM, ConfigError),
        (errno.ENOENT, Incomplete),
        (errno.ENOTDIR, Incomplete),
        (errno.ENOSPC, StoreError),
        (errno.EDQUOT, StoreError),
        (errno.EROFS, StoreError),
        (errno.ENAMETOOLONG, StoreError),
    ],
)
def test_each_refusal_is_one_of_our_errors(number: int, ours: type[CkptsyncError]) -> None:
    with pytest.raises(ours, match="/out: ") as told, refusals(Path("/out")):
        raise OSError(number, "refused")
    assert type(told.value) is ours


def test_a_file_is_written_whole_and_never_into_a_folder_that_is_gone(tmp_path: Path) -> None:
    written(tmp_path, "a.json", {"node": "n0"})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", '{"node": "n0"}\n')]
    with pytest.raises(FileNotFoundError):
        written(tmp_path / "gone", "a.json", {})
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(("mode", "copied"), [(0o600, 0o600), (0o400, 0o600), (0o644, 0o644)])
def test_nobody_may_read_a_copy_who_may_not_read_the_original(tmp_path: Path, mode: int, copied: int) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.touch()
    source.chmod(mode)
    copy.touch(0o666)  # a killed try left it
    with source.open("rb") as like, opened_like(copy, like.fileno()) as out:
        out.write(b"x")
    assert (copy.stat().st_mode & 0o777, copy.read_bytes()) == (copied, b"x")


def test_a_name_that_somebody_has_is_not_taken_from_him(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    assert not renamed(tmp_path / "a", tmp_path / "b")
    assert not renamed(tmp_path / "gone", tmp_path / "c")
    assert renamed(tmp_path / "a", tmp_path / "c")
    assert [(p.name, (p / "x").read_text()) for p in children(tmp_path)] == [("b", "b"), ("c", "a")]


def test_what_is_gone_has_no_children_and_is_removed_already(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert children(tmp_path / "gone") == children(tmp_path / "file") == []
    remove(tmp_path / "gone")
