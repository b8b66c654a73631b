"""Ranges of stored files that go through a small buffer, which stays in the processor's cache between receiving, digesting and writing."""

from __future__ import annotations

from collections.abc import Callable

from ckptsync.model import Extent
from ckptsync.stores.ahead import Reads


def pour(source: Reads, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
    """Give ``take`` the bytes, front to back, each time as many as the ``buffer`` holds but for the last.

    A store with a ``pour`` of its own answers a large range in pieces, while the rest of it is on its way; others are read buffer by buffer.
    Raises as `Store.read_into` does, and what ``take`` raises as it is; no byte is given twice.
    """
    if (own := getattr(source, "pour", None)) is not None:
        own(extent, buffer, take)
        return
    end = extent.start + extent.size
    for at in range(extent.start, end, len(buffer)):
        piece = buffer[: min(len(buffer), end - at)]
        source.read_into(extent.file, at, piece)
        take(piece)
