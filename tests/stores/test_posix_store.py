from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, NotFound, StoreError
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.posix import store as posix
from ckptsync.stores.posix.store import PosixStore
from tests.support.store_contract import StoreContract, names


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        root = tmp_path / "with space/and ünïcödé"
        root.mkdir(parents=True)
        return PosixStore(str(root))

    @pytest.fixture
    def again(self, store: PosixStore) -> Store:
        return PosixStore(store.root)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", ["link", "dir/link", "linked/file", "dangling"])
def test_links_in_the_store_are_not_there(store: PosixStore, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    root = Path(store.root)
    (root / "dir").mkdir()
    (root / "link").symlink_to(secret / "file")
    (root / "dir/link").symlink_to(secret / "file")
    (root / "linked").symlink_to(secret)
    (root / "dangling").symlink_to(root / "nowhere")
    assert names(store) == names(store, "linked/") == []
    with pytest.raises(NotFound):
        store.size(name)
    with pytest.raises(NotFound):
        store.read_into(name, 0, memoryview(bytearray(1)))
    store.delete(name)
    assert (root / name).is_symlink() or name == "linked/file"
    assert (secret / "file").read_bytes() == b"secret"


def test_writing_never_leaves_the_store_through_a_link(store: PosixStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    (Path(store.root) / "linked").symlink_to(outside)
    (Path(store.root) / "link").symlink_to(outside / "file")
    with pytest.raises(StoreError, match="linked/new") as caught:
        store.write("linked/new", [b"x"])
    assert "links are not followed" in caught.value.hint
    store.write("link", [b"replaces the link, not what it points to"])
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == {"file": b"mine"}
    assert names(store) == ["link"]


def test_the_root_itself_may_be_a_link(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(store.root)
    PosixStore(str(tmp_path / "way")).write("a/b", [b"x"])
    assert names(store) == ["a/b"]


def test_pipes_strange_names_and_unfinished_writes_are_no_names(store: PosixStore) -> None:
    os.mkfifo(f"{store.root}/pipe")
    unfinished = ".ckptsync-00ff.part"
    # the last one is deleted, and still open on another client
    for name in (b"back\\slash", b"not-utf8-\xff", unfinished.encode(), b".nfs0012ab34cd00000001"):
        Path(os.fsdecode(os.fsencode(store.root) + b"/" + name)).write_bytes(b"x")
    assert names(store) == []
    with pytest.raises(NotFound):
        store.read_into("pipe", 0, memoryview(bytearray(1)))
    with pytest.raises(Corrupt, match="unfinished"):
        store.write(f"run/{unfinished}", [b"x"])


def test_modes_follow_the_umask(store: PosixStore) -> None:
    before = os.umask(0o027)
    try:
        store.write("run/w", [b"x"])
        store.create("run/c", [b"x"])
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in Path(store.root).rglob("*")}
    assert modes == {"run": 0o750, "w": 0o640, "c": 0o640}


def test_a_file_replaced_behind_the_stores_back_is_read_anew(store: PosixStore) -> None:
    store.write("a", [b"old"])
    assert read_all(store, "a") == b"old"
    Path(store.root, "b").write_bytes(b"new")
    Path(store.root, "b").rename(Path(store.root, "a"))
    assert read_all(store, "a") == b"new"
    Path(store.root, "a").unlink()
    with pytest.raises(NotFound):
        store.read_into("a", 0, memoryview(bytearray(3)))


def test_a_name_is_opened_again_after_a_while(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", [b"old"])
    # so that the link count of what is open does not fall to zero
    os.link(f"{store.root}/a", f"{store.root}/backup")
    assert read_all(store, "a") == b"old"
    store.write("a", [b"our own"])
    assert read_all(store, "a") == b"our own"
    os.link(f"{store.root}/a", f"{store.root}/another")
    PosixStore(store.root).write("a", [b"new"])
    monkeypatch.setattr(posix, "TRUSTED_S", 0.0)
    assert read_all(store, "a") == b"new"


def test_deleting_the_last_file_takes_empty_directories_but_never_the_root(
    store: PosixStore,
) -> None:
    run = Path(store.root, "run")
    for name in ["run/checkpoint-1/a", "run/checkpoint-1/dir/b", "run/checkpoint-2/a"]:
        store.write(name, [b"x"])
    store.delete("run/checkpoint-1/a")
    store.delete("run/checkpoint-1/dir/b")
    assert [p.name for p in run.iterdir()] == ["checkpoint-2"]
    for left in ("checkpoint-3/dir", "checkpoint-4"):  # by a deleter that was killed
        (run / left).mkdir(parents=True)
        store.delete(f"run/{left}/b")
    store.delete("run/checkpoint-2/b")
    assert [p.name for p in run.iterdir()] == ["checkpoint-2"]
    store.delete("run/checkpoint-2/a")
    assert list(Path(store.root).iterdir()) == []


def test_reading_keeps_few_files_open_and_lets_go_of_them(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(300):
        Path(store.root, f"{n:03}").write_bytes(b"x")
    before = open_descriptors()
    for n in range(300):
        read_all(store, f"{n:03}")
    assert open_descriptors() - before <= 128
    store.write("a/b", [b"x"])
    monkeypatch.setattr(posix, "TRUSTED_S", 0.0)
    names(store)
    assert open_descriptors() - before <= 0, "an open directory cannot be unmounted"
