"""The files of a store as a checkpoint's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.model import read_whole
from ckptsync.stores.listed import ListedFiles
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.tree import MERGING, LocalFiles
from tests.sftp_stores import over_ssh


def holding(**files: bytes) -> MemoryStore:
    store = MemoryStore("mem://x")
    for name, data in files.items():
        store.write(name.replace("__", "/"), [data])
    return store


def test_they_are_what_the_store_lists_but_for_what_is_no_content() -> None:
    store = holding(a=b"1", dir__b=b"22")
    for name in (".metadata.tmp", "dir/x.part", "_ckptsync/a/b", ".ckptsync/store.json"):
        store.write(name, [b"x"])
    files = ListedFiles(store)
    assert files.sizes() == {"a": 1, "dir/b": 2}
    assert read_whole(files, "dir/b") == b"22"
    assert files.root == "mem://x"
    assert [files.holds(name) for name in ("a", ".metadata.tmp", ".metadata")] == [True, True, False]


def test_a_place_with_nothing_in_it_is_said_plainly() -> None:
    with pytest.raises(ConfigError, match="mem://x: nothing is there") as found:
        ListedFiles(MemoryStore("mem://x"))
    assert found.value.hint


def test_what_is_not_there_or_no_longer_is_incomplete_and_what_is_short_is_corrupt() -> None:
    store = holding(a=b"12345", b=b"1")
    files = ListedFiles(store)
    store.delete("b")
    for name in "bc":
        with pytest.raises(Incomplete, match=f"{name}: "):
            read_whole(files, "b") if name == "b" else files.read_into("c", 0, memoryview(bytearray(1)))
    with pytest.raises(Corrupt):
        files.read_into("a", 3, memoryview(bytearray(3)))


def test_changed_names_what_was_written_again_or_deleted_and_nothing_else() -> None:
    store = holding(same=b"1", again=b"1", gone=b"1")
    files = ListedFiles(store)
    before = files.state()
    assert files.changed() == ()
    store.write("new", [b"1"])
    assert files.changed() == ()
    store.write("again", [b"1"])
    store.delete("gone")
    assert files.changed() == ("again", "gone")
    assert ListedFiles(store).state() != before
    assert ListedFiles(store).state() == ListedFiles(store).state()


def test_times_are_told_only_where_they_are_those_of_who_wrote() -> None:
    store = holding(a=b"1", b=b"2")
    assert ListedFiles(store).written() == {}
    assert ListedFiles(store, is_dated=True).written() == {"a": 1.0, "b": 2.0}


def test_where_a_merge_has_not_ended_there_is_nothing_to_read() -> None:
    store = holding(model=b"1")
    store.write(MERGING, [json.dumps({"plan": "x"}).encode()])
    with pytest.raises(Incomplete, match="a merge into it has not ended"):
        ListedFiles(store)
    store.write(MERGING, [json.dumps({"plan": "x", "ended": True}).encode()])
    assert ListedFiles(store).sizes() == {"model": 1}


def test_behind_ssh_what_is_passed_over_is_told_as_on_a_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/model.bin").write_bytes(b"x")
    (tmp_path / "sub/link").symlink_to("model.bin")
    (tmp_path / "away").symlink_to(tmp_path / "sub")
    os.mkfifo(tmp_path / "pipe")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/no\xfftf8")).mkdir()
    (tmp_path / "two\nlines").write_bytes(b"x")
    (tmp_path / ".tmp123456").symlink_to("unfinished")
    (tmp_path / "_ckptsync").mkdir()
    (tmp_path / "_ckptsync/spool").symlink_to("elsewhere")
    files = ListedFiles(over_ssh(tmp_path))
    assert [*files.sizes()] == ["sub/model.bin"]
    assert files.passed_over() == LocalFiles(str(tmp_path)).passed_over()
    assert len(files.passed_over()) == 3
    assert ListedFiles(holding(a=b"1")).passed_over() == ()


def test_behind_ssh_a_directory_of_links_alone_is_refused_as_on_a_path(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/ab12")
    with pytest.raises(ConfigError, match="holds links alone") as there:
        ListedFiles(over_ssh(tmp_path))
    with pytest.raises(ConfigError) as here:
        LocalFiles(str(tmp_path))
    assert there.value.hint == here.value.hint
