from __future__ import annotations

import pytest

from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from tests.store_contract import StoreContract


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
