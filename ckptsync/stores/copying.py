"""Bytes out of a store in pieces, and from one name to another."""

from __future__ import annotations

from collections.abc import Iterator

from ckptsync.stores.contract import Store

PIECE = 8 << 20


def pieces(store: Store, name: str, piece: int = PIECE) -> Iterator[memoryview]:
    """A stored file, front to back, in one buffer that is used again: use each piece before asking for the next.

    Raises NotFound, or Corrupt if the file becomes shorter meanwhile.
    """
    size = store.size(name)
    buffer = memoryview(bytearray(min(piece, size)))
    for start in range(0, size, piece):
        out = buffer[: min(piece, size - start)]
        store.read_into(name, start, out)
        yield out


def copy(store: Store, source: str, target: str) -> None:
    """Store ``source`` under ``target`` as well; raises NotFound, or Exists if ``target`` is taken."""
    store.create(target, pieces(store, source))
