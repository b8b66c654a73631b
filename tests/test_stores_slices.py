from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ckptsync.stores.contract import Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.slices import cuts_of, joined, pieces
from ckptsync.stores.urls import Remote
from tests.weed import weed


class ByDirectory(MemoryStore):
    """A server that lists directory by directory, so that its order is not that of whole names."""

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        entries = sorted(self.names(prefix), key=lambda e: e.name.split("/"))
        yield from (e for e in entries if not after or e.name.split("/") > after.split("/"))


def remote() -> Store:
    return S3Store(Remote("s3", f"{weed().bucket()}/pre"), weed().options())


@pytest.fixture(params=[ByDirectory, MemoryStore, remote])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("ckptsync.stores.slices.SLICE", 3)
    monkeypatch.setattr("ckptsync.stores.s3.store.PAGE", 3)
    made: Store = request.param()
    return made


def listed(store: Store, cuts: tuple[str, ...]) -> list[Entry]:
    return joined(piece() for piece in pieces(store, "run/", cuts))


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
    assert [len(piece()) for piece in pieces(store, "run/", cuts)] == [2000, 2000, 2000]


def test_what_is_empty_is_one_piece() -> None:
    assert cuts_of(listed(ByDirectory(), ())) == ()
    assert listed(ByDirectory(), ("run/gone",)) == []
