from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, NotFound, StoreError
from ckptsync.stores.sftp.files import ServerFiles
from ckptsync.stores.sftp.pool import Sessions
from tests.sftp_stores import SOON, files_of, over_ssh, place_of


def test_openssh_brings_names_to_the_disk_by_opening_the_directory(tmp_path: Path) -> None:
    files = over_ssh(tmp_path)._files
    files.sync_directory("")
    assert files._syncs_directories is True


@pytest.mark.parametrize("fault", ["plain", "unsynced"])
def test_where_directories_cannot_be_synced_that_is_tried_once(tmp_path: Path, fault: str) -> None:
    files = files_of(tmp_path, fault)
    files.sync_directory("")
    assert files._syncs_directories is False
    files.sync_directory("not/there")


def test_a_directory_that_should_be_synced_and_cannot_be_is_an_error(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    files.sync_directory("")
    with pytest.raises(StoreError, match="not/there: no such file"):
        files.sync_directory("not/there")


def test_the_root_is_made_with_all_above_it_and_may_be_a_link(tmp_path: Path) -> None:
    files = files_of(tmp_path / "a" / "b" / "c")
    assert not files.has_root()
    files.make_root()
    files.make_root()
    assert files.has_root()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert files_of(tmp_path / "link").has_root()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match="no store can be made here"):
            files_of(path).make_root()


def test_a_file_that_was_seen_is_not_looked_for_again_but_missed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    files, out = files_of(tmp_path), memoryview(bytearray(4))
    assert files.read_into("a", 8, out) == 2
    (tmp_path / "a").unlink()
    with pytest.raises(NotFound, match="a: not in sftp://head"):
        files.read_into("a", 0, out)
    (tmp_path / "a").symlink_to("/etc/passwd")
    with pytest.raises(NotFound):
        files.read_into("a", 0, out)


@pytest.mark.parametrize("faults", [(), ("plain",), ("reorder",), ("short",), ("limits=1",)])
def test_a_little_is_read_as_much_is_also_where_answers_are_short(tmp_path: Path, faults: tuple[str, ...]) -> None:
    content = random.Random(2).randbytes(90_000)
    (tmp_path / "a").write_bytes(content)
    files = files_of(tmp_path, *faults)
    for start, size in ((0, 90_000), (0, 30_000), (70_000, 30_000), (90_000, 10), (80_000, 1), (5, 0)):
        out = bytearray(size)
        wanted = content[start : start + size]
        assert files.read_into("a", start, memoryview(out)) == len(wanted)
        assert out[: len(wanted)] == wanted
    assert files.sessions._idle[0].is_usable


def test_what_is_known_of_a_directory_holds_for_reading_only(tmp_path: Path) -> None:
    for directory in ("real", "other"):
        (tmp_path / directory).mkdir()
        for name in "ab":
            (tmp_path / directory / name).write_bytes(b"x")
    files, out = files_of(tmp_path), memoryview(bytearray(1))
    assert files.read_into("real/a", 0, out) == 1
    (tmp_path / "real").rename(tmp_path / "moved")
    (tmp_path / "real").symlink_to("other")
    assert files.found("real/b") is None
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(NotFound):
        files.read_into("link/b", 0, out)


def test_making_and_removing_may_be_asked_for_twice(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for _ in range(2):
        files.make_directory("a")
    (tmp_path / "a" / "b").write_bytes(b"")
    assert not files.remove_empty("a")
    for _ in range(2):
        files.remove("a/b")
    assert files.remove_empty("a")
    (tmp_path / "a").symlink_to("/tmp")
    with pytest.raises(StoreError, match="a: no directory"):
        files.make_directory("a")


def test_a_lost_answer_to_mkdir_is_no_error(tmp_path: Path) -> None:
    place = place_of(tmp_path, f"lose=14={tmp_path / 'marker'}")
    ServerFiles(Sessions(place, SOON)).make_directory("a")
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "marker").exists()
