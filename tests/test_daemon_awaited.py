"""A store that is not there yet."""

import pytest

from ckptsync.daemon.awaited import Awaited
from ckptsync.errors import Transient
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from tests.store_contract import StoreContract


class TestAwaited(StoreContract):
    """Once it has come it is the store that came."""

    @pytest.fixture
    def store(self) -> Store:
        awaited = Awaited("memory://")
        awaited.came(MemoryStore())
        return awaited

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store


def test_until_it_comes_every_question_is_one_that_may_be_asked_again() -> None:
    awaited = Awaited("s3://bucket/x")
    assert awaited.url == "s3://bucket/x"
    for ask in (
        lambda: list(awaited.names("")),
        lambda: awaited.size("a"),
        lambda: awaited.read_into("a", 0, memoryview(bytearray(1))),
        lambda: awaited.write("a", [b"x"]),
        lambda: awaited.create("a", [b"x"]),
        lambda: awaited.delete("a"),
    ):
        with pytest.raises(Transient, match="s3://bucket/x: not reached yet"):
            ask()


def test_what_is_known_of_the_store_is_known_when_it_comes() -> None:
    store = MemoryStore()
    store.write("a", [b"x"])
    store.late, store.is_exclusive = 3.0, True
    awaited = Awaited("memory://")
    awaited.came(store)
    assert (awaited.late, awaited.is_exclusive, read_all(awaited, "a", 9)) == (3.0, True, b"x")
