"""Packed items: a zstd stream of any bytes, by whatever library this Python has."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.formats.zstd_items import PackedItem, virtual_name
from ckptsync.tensors import Extent
from tests.support.files_in_memory import MemoryFiles


def packed(data: bytes) -> bytes:
    """One frame, as torch's writer makes it."""
    try:
        from compression import zstd
    except ImportError:
        library: Any = pytest.importorskip("zstandard")
        compressor = library.ZstdCompressor().compressobj()
        return bytes(compressor.compress(data) + compressor.flush())
    return bytes(zstd.compress(data))


def stream(
    data: bytes, first: int = 0, length: int = 0, *, before: bytes = b"", behind: bytes = b""
) -> tuple[MemoryFiles, str]:
    """A file with one packed item in it, and the item's name."""
    content = packed(data)
    item = Extent("__0_0.distcp", len(before), len(content))
    return MemoryFiles({"__0_0.distcp": before + content + behind}), virtual_name(
        PackedItem(item, first, length)
    )
