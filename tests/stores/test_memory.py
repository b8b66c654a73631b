"""The store in memory, and what stands beside the contract."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, NotFound
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from tests.support.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store


def test_a_small_file_is_read_whole_and_a_big_one_refused() -> None:
    store = MemoryStore()
    store.write("a", [b"0123456789"])
    assert read_all(store, "a", 10) == b"0123456789"
    with pytest.raises(Corrupt, match="a: 10 bytes, at most 9 expected"):
        read_all(store, "a", 9)
    with pytest.raises(NotFound):
        read_all(store, "b")
