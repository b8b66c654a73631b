from __future__ import annotations

import pytest

from ckptsync.errors import Exists, NotFound
from ckptsync.stores.contract import read_all
from ckptsync.stores.copying import copy, pieces
from ckptsync.stores.memory import MemoryStore


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 25])
def test_pieces_are_the_file_front_to_back(size: int) -> None:
    store = MemoryStore()
    store.write("a", [bytes(range(size))])
    found = [bytes(piece) for piece in pieces(store, "a", 10)]
    assert b"".join(found) == bytes(range(size))
    assert all(len(piece) == 10 for piece in found[:-1])


def test_pieces_share_one_buffer() -> None:
    store = MemoryStore()
    store.write("a", [b"0123456789"])
    assert len({id(piece.obj) for piece in pieces(store, "a", 3)}) == 1


def test_a_copy_has_the_bytes_and_refuses_a_taken_name() -> None:
    store = MemoryStore()
    store.write("a", [b"0123456789"])
    copy(store, "a", "dir/b")
    assert read_all(store, "dir/b") == b"0123456789"
    with pytest.raises(Exists):
        copy(store, "a", "dir/b")
    with pytest.raises(NotFound):
        copy(store, "nowhere", "c")
    assert [e.name for e in store.names("")] == ["a", "dir/b"]
