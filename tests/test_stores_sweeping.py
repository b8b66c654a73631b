"""Drafts of killed writers, on real directories; on SFTP see test_stores_sftp_store."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.stores.posix.draft import begun
from ckptsync.stores.sweeping import GIVEN_UP, drop, given_up
from tests.sftp_stores import over_ssh

NOW = time.time()


def draft(root: Path, name: str = ".ckptsync-0123456789abcdef.part", age: float = GIVEN_UP + 60) -> Path:
    path = root / "run" / "checkpoint-1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (NOW - age,) * 2)
    return path


def test_what_was_given_up_goes_and_what_may_be_gone_on_with_stays(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    old, young = draft(tmp_path), draft(tmp_path, ".ckptsync-abcdef0123456789.part", 60)
    store.write("run/checkpoint-1/a.part", [b"a file of the trainer's"])
    assert [e.name for e in given_up(store, NOW)] == [str(old.relative_to(tmp_path))]
    assert drop(store, str(old.relative_to(tmp_path)))
    assert not old.exists()
    assert young.exists()
    assert drop(store, str(old.relative_to(tmp_path))), "somebody else was faster"


def test_a_draft_that_its_writer_holds_stays(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    at = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    held = begun(at, "a.bin", "an origin")
    assert not drop(store, held.part)
    held.release()
    os.close(at)
    assert drop(store, held.part)


def test_only_drafts_are_dropped_and_no_link_is_followed(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    store.write("run/a", [b"x"])
    precious = tmp_path / ".ckptsync-0123456789abcdef.part"
    precious.write_text("mine")
    (tmp_path / "store" / "out").symlink_to(tmp_path)
    assert list(given_up(store, NOW + 2 * GIVEN_UP)) == []
    drop(store, "run/a")
    drop(store, f"out/{precious.name}")
    assert precious.read_text() == "mine"
    assert [e.name for e in store.names("run/")] == ["run/a"]


def test_a_store_without_directories_has_none() -> None:
    assert list(given_up(MemoryStore(), NOW)) == []
    assert not drop(MemoryStore(), "x")


def test_a_store_over_ssh_is_the_same_store(tmp_path: Path) -> None:
    old = draft(tmp_path)
    store = over_ssh(tmp_path)
    (found,) = given_up(store, NOW)
    assert found.name == str(old.relative_to(tmp_path))
    assert drop(store, found.name)
    assert not old.exists()
