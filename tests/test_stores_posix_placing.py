"""A file whose bytes come in any order: whole and durable, or not there; on a disk and on a file system without direct writes."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.errors import StoreError, Transient
from ckptsync.stores.contract import read_all
from ckptsync.stores.posix.store import PosixStore

CONTENT = os.urandom((1 << 20) + 5000)
PLACES = [Path("/dev/shm"), Path("/var/tmp")]  # a tmpfs, and most often a disk


@pytest.fixture(params=PLACES, ids=["memory", "disk"])
def store(request: pytest.FixtureRequest) -> Iterator[PosixStore]:
    with tempfile.TemporaryDirectory(dir=request.param if request.param.is_dir() else None) as place:
        yield PosixStore(place)


def view(data: bytes) -> memoryview:
    """In memory that begins where a disk wants it."""
    memory = memoryview(mmap.mmap(-1, max(1, len(data))))[: len(data)]
    memory[:] = data
    return memory


def hidden(store: PosixStore) -> list[str]:
    return [path.name for path in Path(store.root).iterdir() if path.name.startswith(".")]


def test_bytes_in_any_order_are_one_file_once_it_is_committed(store: PosixStore) -> None:
    placing = store.place("a", len(CONTENT))
    for start in (1 << 19, 0, 1 << 20):
        placing.write_at(start, view(CONTENT[start : start + (1 << 19) if start < 1 << 20 else None]))
    assert list(store.names("")) == []
    placing.let_go(0, len(CONTENT))
    placing.commit()
    assert read_all(store, "a") == CONTENT
    assert not hidden(store)


def test_memory_that_lies_anywhere_is_written_too(store: PosixStore) -> None:
    placing = store.place("a", len(CONTENT))
    placing.write_at(0, memoryview(b"x" + CONTENT)[1:])
    placing.commit()
    assert read_all(store, "a") == CONTENT


def test_what_was_there_is_replaced_and_only_then(store: PosixStore) -> None:
    store.write("d/a", [b"old"])
    placing = store.place("d/a", 3)
    placing.write_at(0, memoryview(b"new"))
    assert read_all(store, "d/a") == b"old"
    placing.commit()
    assert read_all(store, "d/a") == b"new"


def test_who_gives_up_leaves_nothing_but_what_a_next_try_can_use(store: PosixStore) -> None:
    for error, left in [(StoreError("gone"), 0), (Transient("busy"), 1), (StoreError("gone"), 0), (KeyboardInterrupt(), 1)]:
        placing = store.place("a", 10, "origin")
        placing.write_at(0, memoryview(b"01234"))
        placing.give_up(error)
        placing.give_up(error)
        assert len(hidden(store)) == left
    assert list(store.names("")) == []
    placing = store.place("a", 10, "origin")
    assert placing.left == 10
    out = bytearray(10)
    placing.read_at(0, memoryview(out))
    assert out == b"01234" + bytes(5)
    placing.write_at(5, memoryview(b"56789"))
    placing.commit()
    assert read_all(store, "a") == b"0123456789"
    assert not hidden(store)


def test_what_another_try_left_beyond_the_end_is_cut_off(store: PosixStore) -> None:
    placing = store.place("a", 10, "origin")
    placing.write_at(0, memoryview(b"0123456789"))
    placing.give_up(Transient("busy"))
    placing = store.place("a", 4, "origin")
    assert placing.left == 4
    placing.commit()
    assert read_all(store, "a") == b"0123"


def test_a_file_that_cannot_be_so_large_is_named_and_not_begun(store: PosixStore) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StoreError, match="a: file too large"):
            store.place("a", 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not hidden(store)


def test_an_empty_file_is_a_file(store: PosixStore) -> None:
    store.place("a", 0).commit()
    assert read_all(store, "a") == b""
