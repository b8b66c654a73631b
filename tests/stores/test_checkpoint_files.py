"""The files of a checkpoint: of a directory, of several overlaid, of a store, at the top of a
directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores import path_or_url
from ckptsync.stores.checkpoint_files import (
    MERGING,
    DirectoryFiles,
    FileTree,
    ListedFiles,
    Overlay,
    StoreFiles,
    TopFiles,
    is_no_content,
)
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import Access
from ckptsync.stores.posix.store import PosixStore
from ckptsync.tensors import read_whole
from tests.support.files_in_memory import write_files
from tests.support.sftp_stores import over_ssh

UNFINISHED = (".tmpAb3_x9", "model.safetensors.part", ".ckptsync-0.part", ".metadata.tmp")
CONTENT = (".metadata", ".tmp", ".tmpAb3_x", "__0_0.distcp", "part", "model.parts", "ckptsync")


def test_unfinished_files_and_our_own_directories_are_no_content(tmp_path: Path) -> None:
    names = (*UNFINISHED, *CONTENT, "_ckptsync", ".ckptsync")
    for name in names:
        assert is_no_content(name) == (name not in CONTENT)
    write_files(tmp_path / "at the top", dict.fromkeys(names, b"x"))
    write_files(tmp_path / "below", {f"dir/{name}/file": b"x" for name in names})
    assert [*DirectoryFiles(str(tmp_path / "at the top")).sizes()] == sorted(CONTENT)
    below = DirectoryFiles(str(tmp_path / "below")).sizes()
    assert [*below] == sorted(f"dir/{name}/file" for name in CONTENT)


def test_a_file_replaced_by_a_link_after_the_listing_is_not_followed(tmp_path: Path) -> None:
    root = write_files(tmp_path / "checkpoint", {"dir/a": b"xxxxxx"})
    files = DirectoryFiles(str(root))
    outside = write_files(tmp_path / "outside", {"a": b"secret"})
    (root / "dir/a").unlink()
    (root / "dir").rmdir()
    (root / "dir").symlink_to(outside)
    with pytest.raises(Incomplete, match="no longer"):
        files.read_into("dir/a", 0, memoryview(bytearray(6)))
    assert files.changed() == ("dir/a",)


LISTED = (DirectoryFiles, lambda root: ListedFiles(PosixStore(root)))


@pytest.mark.parametrize("listed", LISTED)
def test_a_file_that_ends_early_is_corrupt_and_one_that_is_gone_is_incomplete(
    tmp_path: Path, listed: Callable[[str], FileTree]
) -> None:
    files = listed(str(write_files(tmp_path, {"short": b"0123456789", "gone": b"x"})))
    (tmp_path / "gone").unlink()
    with pytest.raises(Corrupt, match="short: ends at byte 10, 5 bytes from 6 expected"):
        files.read_into("short", 6, memoryview(bytearray(5)))
    with pytest.raises(Incomplete, match="gone"):
        files.read_into("gone", 0, memoryview(bytearray(1)))
    with pytest.raises(Incomplete, match="never"):
        files.read_into("never", 0, memoryview(bytearray(1)))


def test_changed_names_what_was_touched_replaced_or_deleted_and_nothing_else(
    tmp_path: Path,
) -> None:
    write_files(
        tmp_path, {"same": b"1", "grown": b"1", "touched": b"1", "replaced": b"1", "deleted": b"1"}
    )
    files = DirectoryFiles(str(tmp_path))
    assert files.changed() == ()
    (tmp_path / "grown").write_bytes(b"12")
    os.utime(tmp_path / "touched", ns=(1, 1))
    stat = (tmp_path / "replaced").stat()
    (tmp_path / "other").write_bytes(b"2")
    os.utime(tmp_path / "other", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "other").rename(tmp_path / "replaced")
    (tmp_path / "deleted").unlink()
    assert files.changed() == ("deleted", "grown", "replaced", "touched")


def test_what_is_read_is_what_was_there_even_if_rotation_deletes_it_meanwhile(
    tmp_path: Path,
) -> None:
    files = DirectoryFiles(str(write_files(tmp_path, {"a": b"0123456789"})))
    files.read_into("a", 0, memoryview(bytearray(1)))
    (tmp_path / "a").unlink()
    assert read_whole(files, "a") == b"0123456789"


def test_an_overlay_is_the_union_and_the_first_tree_wins(tmp_path: Path) -> None:
    one = DirectoryFiles(str(write_files(tmp_path / "1", {"both": b"one", "only1": b"1"})))
    two = DirectoryFiles(str(write_files(tmp_path / "2", {"both": b"two!", "only2": b"22"})))
    files = Overlay([one, two])
    assert files.sizes() == {"both": 3, "only1": 1, "only2": 2}
    assert [read_whole(files, n) for n in files.sizes()] == [b"one", b"1", b"22"]
    assert read_whole(Overlay([two, one]), "both") == b"two!"
    with pytest.raises(Incomplete, match="not found in any of the given"):
        files.read_into("neither", 0, memoryview(bytearray(1)))


def test_an_overlay_tells_duplicates_and_conflicts(tmp_path: Path) -> None:
    one = DirectoryFiles(
        str(write_files(tmp_path / "1", {"size": b"1", "digest": b"1", "only": b"1"}))
    )
    two = DirectoryFiles(str(write_files(tmp_path / "2", {"size": b"22", "digest": b"2"})))
    files = Overlay([one, two])
    assert files.conflicts() == ("size",)
    assert files.duplicates("digest") == (one, two)
    assert files.duplicates("only") == (one,)
    assert files.duplicates("neither") == ()


def test_files_of_a_store_are_read_from_where_they_lie() -> None:
    store = MemoryStore()
    store.write("run/.ckptsync/checkpoint-1/files/n1/rng", [b"0123"])
    files = StoreFiles(
        store,
        {
            "rng": ("run/.ckptsync/checkpoint-1/files/n1/rng", 4),
            "gone": ("run/checkpoint-1/gone", 7),
        },
    )
    assert files.sizes() == {"gone": 7, "rng": 4}
    assert read_whole(files, "rng") == b"0123"
    with pytest.raises(Incomplete, match="gone: not in the store as run/checkpoint-1/gone"):
        files.read_into("gone", 0, memoryview(bytearray(7)))
    with pytest.raises(Incomplete, match="unnamed"):
        files.read_into("unnamed", 0, memoryview(bytearray(1)))
    with pytest.raises(Corrupt):
        files.read_into("rng", 2, memoryview(bytearray(3)))


def test_what_is_passed_over_is_told_by_kind_on_a_path_and_behind_ssh(tmp_path: Path) -> None:
    write_files(tmp_path, {"sub/model": b"x"})
    assert DirectoryFiles(str(tmp_path)).ignored_entries() == ()
    (tmp_path / "sub/link").symlink_to("model")
    (tmp_path / "away").symlink_to(tmp_path / "sub")
    os.mkfifo(tmp_path / "pipe")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/no\xfftf8")).mkdir()
    (tmp_path / "two\nlines").write_bytes(b"x")
    (tmp_path / ".tmp123456").symlink_to("unfinished")
    (tmp_path / "_ckptsync").mkdir()
    (tmp_path / "_ckptsync/spool").symlink_to("elsewhere")
    odd = "no checkpoint has such names (control characters, or not UTF-8)"
    for tree in (DirectoryFiles(str(tmp_path)), ListedFiles(over_ssh(tmp_path))):
        assert [*tree.sizes()] == ["sub/model"]
        assert tree.ignored_entries() == (
            "away and 1 more: ignored: links are not followed",
            f"no\\udcfftf8 and 1 more: ignored: {odd}",
            "pipe: ignored: pipes, sockets and devices are no files",
        )


def test_a_directory_of_links_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """As Hugging Face's cache has them."""
    (tmp_path / "model.safetensors").symlink_to("../blobs/ab12")
    opens: list[Callable[[], object]] = [
        lambda: DirectoryFiles(str(tmp_path)),
        lambda: ListedFiles(over_ssh(tmp_path)),
    ]
    for look in opens:
        with pytest.raises(ConfigError, match="has only links") as caught:
            look()
        assert "cp -rL" in caught.value.hint


def test_links_of_a_hugging_face_snapshot_lead_to_its_blobs_and_nowhere_else(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "models--org--model"
    place = repository / "snapshots/0abc"
    (place / "sub").mkdir(parents=True)
    blobs = write_files(repository / "blobs", {"ab12": b"weights", "cd34": b"{}", "ef56": b"deep"})
    (blobs / "away").symlink_to(write_files(tmp_path / "other", {"secret": b"secret"}) / "secret")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_bytes(b"0abc")
    (place / "README.md").write_bytes(b"real")
    (place / "model.safetensors").symlink_to("../../blobs/ab12")
    (place / "config.json").symlink_to("../../blobs/cd34")
    (place / "sub/vocab.txt").symlink_to("../../../blobs/ef56")
    targets = ["../../blobs/away", "../../blobs/none", "../../blobs", "../../blobs/../refs/main"]
    targets += ["../../refs/main", "../../../other/secret", str(blobs / "ab12"), "config.json"]
    targets += ["../../blobs/.", "../../blobs/..", "../../../models--org--model/blobs/ab12"]
    for number, target in enumerate(targets):
        (place / f"bad{number}").symlink_to(target)
    (tmp_path / "short").symlink_to(place)
    for root in (place, tmp_path / "short"):
        files = path_or_url.list_tree(root, Access())
        assert files.sizes() == {
            "README.md": 4,
            "config.json": 2,
            "model.safetensors": 7,
            "sub/vocab.txt": 4,
        }
        assert read_whole(files, "model.safetensors") == b"weights"
        assert read_whole(files, "sub/vocab.txt") == b"deep"
        assert [line.split(":")[1:] for line in files.ignored_entries()] == [
            [" ignored", " links are not followed"]
        ]
        assert f"{len(targets) - 1} more" in files.ignored_entries()[0]
        assert files.changed() == ()
    below = path_or_url.list_tree(place / "sub", Access())
    assert read_whole(below, "vocab.txt") == b"deep"
    (blobs / "ef56").unlink()
    assert below.changed() == ("vocab.txt",)


@pytest.mark.parametrize("data", [b"\xff", b"[" * 200_000, b"[]", b'{"ended":true}', b""])
def test_what_is_no_record_of_a_merge_is_in_nobodys_way(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / MERGING).write_bytes(data)
    assert list(DirectoryFiles(str(tmp_path)).sizes()) == ["model.safetensors"]


def test_a_pipe_under_the_name_of_a_merges_record_holds_nobody(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    os.mkfifo(tmp_path / MERGING)
    looking = Thread(target=lambda: DirectoryFiles(str(tmp_path)), daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive()


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
    assert [files.holds(name) for name in ("a", ".metadata.tmp", ".metadata")] == [
        True,
        True,
        False,
    ]


def test_changed_names_what_was_written_again_or_deleted_and_nothing_else() -> None:
    store = holding(same=b"1", again=b"1", gone=b"1")
    files = ListedFiles(store)
    before = files.state()
    assert files.changed() == ()
    store.write("again", [b"1"])
    assert ListedFiles(store).state() != before
    store.write("new", [b"1"])
    store.delete("gone")
    assert files.changed() == ("again", "gone")
    assert ListedFiles(store).state() == ListedFiles(store).state()


def test_times_are_told_only_where_they_are_those_of_who_wrote(tmp_path: Path) -> None:
    store = holding(a=b"1", b=b"2")
    assert ListedFiles(store).written() == {}
    assert ListedFiles(store, is_dated=True).written() == {"a": 1.0, "b": 2.0}
    os.utime(write_files(tmp_path, {"run/a": b"1"}) / "run/a", (7, 7))
    assert DirectoryFiles(str(tmp_path / "run")).written() == {"a": 7.0}
    write_files(tmp_path, {STORE_FILE: b"{}"})
    assert DirectoryFiles(str(tmp_path / "run")).written() == {}


@pytest.mark.parametrize("listed", LISTED)
def test_where_a_merge_has_not_ended_there_is_nothing_to_read(
    tmp_path: Path, listed: Callable[[str], FileTree]
) -> None:
    write_files(tmp_path, {"model": b"1", MERGING: b'{"plan":"x"}'})
    with pytest.raises(Incomplete, match="contains an unfinished merge"):
        listed(str(tmp_path))
    write_files(tmp_path, {MERGING: b'{"plan":"x","ended":true}'})
    assert listed(str(tmp_path)).sizes() == {"model": 1}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """As the Hugging Face cache lays a model out: links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1234").write_bytes(b"{}")
    place = tmp_path / "snapshot"
    (place / "below").mkdir(parents=True)
    (place / "below" / "config.json").write_bytes(b"deep")
    (place / "config.json").symlink_to("../blobs/1234")
    (place / "broken.json").symlink_to("../blobs/5678")
    (place / "tokenizer.json").write_bytes(b"real")
    return place


def test_links_in_a_directory_are_followed_only_where_it_was_named(snapshot: Path) -> None:
    named = TopFiles(str(snapshot), follows_links=True)
    assert named.sizes() == {"config.json": 2, "tokenizer.json": 4}
    assert read_whole(named, "config.json") == b"{}"
    found = TopFiles(str(snapshot), follows_links=False)
    assert found.sizes() == {"tokenizer.json": 4}
    with pytest.raises(Incomplete):
        read_whole(found, "config.json")


def test_a_file_that_becomes_shorter_or_a_link_is_noticed(snapshot: Path) -> None:
    files, path = TopFiles(str(snapshot), follows_links=False), snapshot / "tokenizer.json"
    assert files.changed() == ()
    path.write_bytes(b"")
    assert files.changed() == ("tokenizer.json",)
    with pytest.raises(Corrupt, match="shorter"):
        read_whole(files, "tokenizer.json")
    path.unlink()
    path.symlink_to("below/config.json")
    with pytest.raises(OSError, match="symbolic links"):
        read_whole(files, "tokenizer.json")


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        (DirectoryFiles, "--source"),
        (partial(TopFiles, follows_links=False), "config.json"),
        (partial(TopFiles, follows_links=True), "config.json"),
    ],
)
def test_what_is_no_directory_is_said_with_what_is_expected(
    tmp_path: Path, tree: Callable[[str], object], hint: str
) -> None:
    with pytest.raises(ConfigError, match=r"absent: no such (file or )?directory") as caught:
        tree(str(tmp_path / "absent"))
    assert caught.value.hint
    with pytest.raises(ConfigError, match="not a directory") as caught:
        tree(__file__)
    assert hint in caught.value.hint
