from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckptsync.daemon.stoppable import Stoppable
from ckptsync.errors import Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.store_contract import StoreContract


class TestStoppable(StoreContract):
    """Until a stop is asked for it is the store that it is around."""

    @pytest.fixture
    def store(self) -> Store:
        return Stoppable(MemoryStore(), lambda: False)

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store


@pytest.mark.parametrize("verb", ["write", "create"])
def test_a_write_ends_between_two_chunks_and_leaves_nothing(tmp_path: Path, verb: str) -> None:
    asked = []

    def chunks() -> Iterator[bytes]:
        yield b"first"
        asked.append(True)
        yield b"second"
        raise AssertionError("asked for more after the stop")

    store = Stoppable(PosixStore(str(tmp_path)), lambda: bool(asked))
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

    store = Stoppable(PosixStore(str(tmp_path)), lambda: any(asked))
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

    store = Stoppable(Twice(), lambda: False)
    store.write("x", [b"a", b"b"])
    assert read_all(store, "x") == b"ab"
    store.write("x", iter([b"a", b"b"]))
    assert read_all(store, "x") == b""
