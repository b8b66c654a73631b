"""What only some stores can do: slices of a listing, and drafts of killed writers, on real
directories.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.stores.contract import (
    ABANDONED_AFTER,
    Entry,
    Store,
    abandoned_drafts,
    cuts_of,
    join_slices,
    remove_draft,
    slices,
)
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.support.seaweedfs import weed
from tests.support.sftp_stores import over_ssh


class ByDirectory(MemoryStore):
    """A server that lists directory by directory, so that its order is not that of whole names."""

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        entries = sorted(self.names(prefix), key=lambda e: e.name.split("/"))
        yield from (e for e in entries if not after or e.name.split("/") > after.split("/"))


def remote() -> Store:
    return S3Store(Remote("s3", f"{weed().bucket()}/pre"), weed().options())


@pytest.fixture(params=[ByDirectory, MemoryStore, remote])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("ckptsync.stores.contract.SLICE", 3)
    monkeypatch.setattr("ckptsync.stores.s3.store.PAGE", 3)
    made: Store = request.param()
    return made


def listed(store: Store, cuts: tuple[str, ...]) -> list[Entry]:
    return join_slices(piece() for piece in slices(store, "run/", cuts))


def test_pieces_are_the_whole_whatever_came_and_went_since_they_were_cut(store: Store) -> None:
    dice = random.Random(5)
    names = [f"run/{place}/{n}" for place in ("a", "a.b", "a-b", "b", "b~1", "c") for n in range(4)]
    for name in names:
        store.write(name, [b"x"])
    cuts = cuts_of(listed(store, ()))
    for _ in range(12):
        for name in dice.sample(names, 6):
            store.delete(name) if dice.random() < 0.6 else store.write(name, [b"xx"])
        found = listed(store, cuts)
        assert sorted(found) == list(store.names("run/"))
        cuts = cuts_of(found) if dice.random() < 0.4 else cuts


def test_nothing_is_asked_for_twice_while_nothing_changes() -> None:
    store = ByDirectory()
    for n in range(6000):
        store.write(f"run/{n}", [b""])
    cuts = cuts_of(listed(store, ()))
    assert [len(piece()) for piece in slices(store, "run/", cuts)] == [2000, 2000, 2000]


def test_what_is_empty_is_one_piece() -> None:
    assert cuts_of(listed(ByDirectory(), ())) == ()
    assert listed(ByDirectory(), ("run/gone",)) == []


NOW, YOUNG = time.time(), ".ckptsync-abcdef0123456789.part"


def draft(
    root: Path, name: str = ".ckptsync-0123456789abcdef.part", age: float = ABANDONED_AFTER + 60
) -> Path:
    path = root / "run" / "checkpoint-1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (NOW - age,) * 2)
    return path


def test_what_was_given_up_goes_and_what_may_be_gone_on_with_stays(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    old, young = draft(tmp_path), draft(tmp_path, YOUNG, ABANDONED_AFTER - 60)
    store.write("run/checkpoint-1/a.part", [b"a file of the trainer's"])
    assert [e.name for e in abandoned_drafts(store, NOW)] == [str(old.relative_to(tmp_path))]
    assert remove_draft(store, str(old.relative_to(tmp_path)))
    assert not old.exists()
    assert young.exists()
    assert remove_draft(store, str(old.relative_to(tmp_path))), "somebody else was faster"


def test_a_draft_that_its_writer_holds_stays(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    held = PosixStore(str(tmp_path)).open_draft("a.bin", 5, "an origin")
    assert not remove_draft(store, held.part)
    held.end(keep=True)
    assert remove_draft(store, held.part)


def test_only_drafts_are_dropped_and_no_link_is_followed(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    store.write("run/a", [b"x"])
    precious = tmp_path / ".ckptsync-0123456789abcdef.part"
    precious.write_text("mine")
    (tmp_path / "store" / "out").symlink_to(tmp_path)
    assert list(abandoned_drafts(store, NOW + 2 * ABANDONED_AFTER)) == []
    remove_draft(store, "run/a")
    remove_draft(store, f"out/{precious.name}")
    assert precious.read_text() == "mine"
    assert [e.name for e in store.names("run/")] == ["run/a"]


def test_a_store_over_ssh_is_the_same_store(tmp_path: Path) -> None:
    old = draft(tmp_path)
    store = over_ssh(tmp_path)
    (found,) = abandoned_drafts(store, NOW)
    assert found.name == str(old.relative_to(tmp_path))
    assert remove_draft(store, found.name)
    assert not old.exists()
