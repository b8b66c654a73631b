"""The service's store: one that is not there yet, and whose writes end with the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from ckptsync.errors import Transient
from ckptsync.service.store import ServiceStore
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.store_contract import StoreContract


def served(store: Store, is_stopping: Callable[[], bool]) -> ServiceStore:
    """The service's, once it has come."""
    found = ServiceStore(store.url, is_stopping)
    found.came(store)
    return found


class TestServiceStore(StoreContract):
    """Once it has come it is the store that came."""

    @pytest.fixture
    def store(self) -> Store:
        return served(MemoryStore(), lambda: False)

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store


def test_until_it_comes_every_question_is_one_that_may_be_asked_again() -> None:
    awaited = ServiceStore("s3://bucket/x", lambda: False)
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
    awaited = ServiceStore("memory://", lambda: False)
    awaited.came(store)
    assert (awaited.late, awaited.is_exclusive, read_all(awaited, "a", 9)) == (3.0, True, b"x")


@pytest.mark.parametrize("verb", ["write", "create"])
def test_a_write_ends_between_two_chunks_and_leaves_nothing(tmp_path: Path, verb: str) -> None:
    asked = []

    def chunks() -> Iterator[bytes]:
        yield b"first"
        asked.append(True)
        yield b"second"
        raise AssertionError("asked for more after the stop")

    store = served(PosixStore(str(tmp_path)), lambda: bool(asked))
    with pytest.raises(Transient, match="stopping"):
        getattr(store, verb)("run/large", chunks())
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_what_a_stop_cuts_off_is_gone_on_with_by_the_next_start(tmp_path: Path) -> None:
    asked: list[bool] = []
    read: list[int] = []

    def chunks() -> Iterator[bytes]:
        for n in range(4):
            read.append(n)
            yield bytes([n]) * (1 << 20)
            asked.append(n == 2)

    store = served(PosixStore(str(tmp_path)), lambda: any(asked))
    about = About(4 << 20, "origin")
    with pytest.raises(Transient, match="stopping"):
        store.create("large", chunks(), about)
    [parked] = tmp_path.glob(".ckptsync-*.part")
    inode = parked.stat().st_ino
    assert parked.stat().st_size >= 2 << 20
    PosixStore(str(tmp_path)).create("large", [bytes([n]) * (1 << 20) for n in range(4)], about)
    assert (tmp_path / "large").stat().st_ino == inode


def test_chunks_that_can_be_had_again_still_can() -> None:
    class Twice(MemoryStore):
        def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            for _ in range(2):
                super().write(name, chunks, about)

    store = served(Twice(), lambda: False)
    store.write("x", [b"a", b"b"])
    assert read_all(store, "x") == b"ab"
    store.write("x", iter([b"a", b"b"]))
    assert read_all(store, "x") == b""
