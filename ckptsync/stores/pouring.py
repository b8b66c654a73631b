"""Ranges of stored files that go through a small buffer, which stays in the processor's cache between receiving, digesting and writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ckptsync.model import Extent
from ckptsync.stores.ahead import Reads


class Pours(Protocol):
    """A store that can answer a large range in pieces, while the rest of it is on its way."""

    def pour(self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
        """Give ``take`` the bytes, front to back, each time as many as the ``buffer`` holds but for the last.

        Raises as `Store.read_into` does, and what ``take`` raises as it is; no byte is given twice.
        """
        ...


def pour(source: Reads, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
    """As `Pours.pour`, from any store: from others in as many reads as there are buffers."""
    if (pours := getattr(source, "pour", None)) is not None:  # isinstance(source, Pours), which takes as long as a small range
        pours(extent, buffer, take)
        return
    end = extent.start + extent.size
    for at in range(extent.start, end, len(buffer)):
        piece = buffer[: min(len(buffer), end - at)]
        source.read_into(extent.file, at, piece)
        take(piece)
