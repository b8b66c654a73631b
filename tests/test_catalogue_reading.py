from __future__ import annotations

from ckptsync.catalogue.reading import Cache, read
from ckptsync.stores.memory import MemoryStore
from tests.filled import two_nodes


def test_an_empty_store_holds_nothing() -> None:
    assert read(MemoryStore()).summaries == ()


def test_places_are_in_the_order_that_people_read() -> None:
    store = MemoryStore()
    for place in ("checkpoint-10", "checkpoint-9"):
        two_nodes(store, place=place)
    found = read(store, Cache())
    assert [s.place for s in found.summaries] == ["checkpoint-9", "checkpoint-10"]
    assert found.clock == max(e.mtime for e in store.names(""))
