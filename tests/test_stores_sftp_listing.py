from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.contract import Entry
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.sftp import listing as sftp_listing
from ckptsync.stores.sftp.listing import AT_ONCE, listings, walk
from tests.sftp_stores import files_of


def test_hundreds_of_directories_are_listed_as_a_local_path_lists_them(tmp_path: Path) -> None:
    for n in range(3 * AT_ONCE):
        (tmp_path / f"run{n % 7}" / f"checkpoint-{n}" / "sub").mkdir(parents=True)
        for name in ("a", "sub/b", ".ckptsync-00.part", ".nfs000000001234"):
            (tmp_path / f"run{n % 7}" / f"checkpoint-{n}" / name).write_bytes(b"x" * n)
        (tmp_path / f"run{n % 7}" / f"checkpoint-{n}.txt").write_bytes(b"")
    for prefix in ("", "run3/", "run3/checkpoint-3/", "nowhere/", "run3/checkpoint-3/a/"):
        wanted = [Entry(e.name, e.size, float(int(e.mtime))) for e in PosixStore(str(tmp_path)).names(prefix)]
        assert list(walk(files_of(tmp_path), prefix)) == wanted
    assert len(list(walk(files_of(tmp_path), ""))) == 9 * AT_ONCE


def test_a_large_directory_comes_in_several_answers(tmp_path: Path) -> None:
    from tests.sftp_stores import over_ssh

    for n in range(950):
        (tmp_path / f"{n:04}").write_bytes(b"")
    assert [e.name for e in over_ssh(tmp_path).names("")] == [f"{n:04}" for n in range(950)]


def test_names_that_reach_elsewhere_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x")
    assert [e.name for e in walk(files_of(tmp_path, "names"), "")] == ["good"]
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff")).write_bytes(b"x")
    assert [e.name for e in walk(files_of(tmp_path), "")] == ["good"]


def test_names_that_reach_elsewhere_are_told_of_and_a_directory_s_own_are_not(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x")
    told: list[tuple[str, str]] = []
    list(walk(files_of(tmp_path, "names"), "", passed=lambda name, odd: told.append((name, odd))))
    assert {odd for _, odd in told} == {"name"}
    assert {name for name, _ in told} >= {"../x", "/etc/passwd", "a\nb", "nul\0"}
    assert not {name for name, _ in told} & {".", "..", ""}


def test_a_directory_without_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sftp_listing, "MOST", 10_000)
    with pytest.raises(StoreError, match="more than 10000 files"):
        list(walk(files_of(tmp_path, "endless"), ""))
    with pytest.raises(StoreError, match="directories 200 deep"):
        list(walk(files_of(tmp_path, "bottomless"), ""))


def test_what_vanished_meanwhile_was_never_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert listings(files_of(tmp_path), ["a/", "b/", ""]) == [{}, {}, {"a/": None}]


def test_a_directory_that_may_not_be_read_is_an_error_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StoreError, match=f"head:{tmp_path}/a: permission denied"):
        list(walk(files_of(tmp_path, "unreadable"), ""))
