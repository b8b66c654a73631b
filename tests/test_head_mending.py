"""Copies within the store are proven before they get their name; the rest is with the command (test_cli_repair)."""

from __future__ import annotations

import pytest

from ckptsync.digest import digest
from ckptsync.errors import Corrupt
from ckptsync.head.mending import PIECE, Copied
from ckptsync.stores.memory import MemoryStore
from tests.filled import read


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1])
def test_a_copy_is_what_was_wanted(size: int) -> None:
    store, content = MemoryStore(), b"x" * size
    store.write("a", [content])
    store.write("b", Copied(store, "a", size, digest(content)))
    assert read(store, "b") == content


def test_other_bytes_never_appear() -> None:
    store = MemoryStore()
    store.write("a", [b"other"])
    with pytest.raises(Corrupt, match="not the bytes that are wanted"):
        store.write("b", Copied(store, "a", 5, digest(b"right")))
    assert [e.name for e in store.names("")] == ["a"]
