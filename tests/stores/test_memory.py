"""The store in memory, and what stands beside the contract."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, NotFound
from ckptsync.stores.contract import Store, checked_prefix, read_all
from ckptsync.stores.memory import MemoryStore
from tests.support.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store


def test_its_clock_counts_writes_so_that_tests_can_say_what_came_first() -> None:
    store = MemoryStore()
    store.write("b", [b""])
    store.create("a", [b""])
    store.write("b", [b""])
    assert [(e.name, e.mtime) for e in store.names("")] == [("a", 2), ("b", 3)]


def test_a_small_file_is_read_whole_and_a_big_one_refused() -> None:
    store = MemoryStore()
    store.write("a", [b"0123456789"])
    assert read_all(store, "a", 10) == b"0123456789"
    with pytest.raises(Corrupt, match="a: 10 bytes, at most 9 expected"):
        read_all(store, "a", 9)
    with pytest.raises(NotFound):
        read_all(store, "b")


def test_a_prefix_is_nothing_or_a_plain_path_and_a_slash() -> None:
    assert checked_prefix("") == ""
    assert checked_prefix("a/b/") == "a/b/"
    for hostile in ["../", "/", "a//", "a/../"]:
        with pytest.raises(Corrupt):
            checked_prefix(hostile)
    with pytest.raises(ValueError, match="slash"):
        checked_prefix("a")
