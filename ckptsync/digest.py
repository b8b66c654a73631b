"""Digests: BLAKE3 of a file, of each of its blocks, and of each tensor; and the CRC32 that other containers have.

Block digests narrow damage to the bytes that changed; the file's digest is what ``b3sum`` prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

try:
    from isal.isal_zlib import crc32 as crc32  # noqa: PLC0414  for others to import
except ImportError:  # there are no wheels for this machine: zlib gives the same sums, at a fifth of the speed
    from zlib import crc32 as crc32  # noqa: PLC0414

SMALLEST_BLOCK = 4 << 10
MOST_BLOCKS = 1024
MOST_OF_ALL = 1 << 19  # blocks of all files of one manifest: 18 MiB of JSON
BLOCK_HEX = 32  # 128 bits are enough to tell which block changed; the file's digest has all 256


@dataclass(frozen=True, slots=True)
class FileDigest:
    """``digest``: 64 hex digits.  ``blocks``: `BLOCK_HEX` digits for each ``block_size`` bytes, the last one shorter."""

    size: int
    digest: str
    block_size: int
    blocks: tuple[str, ...]


def block_size(size: int, files: int = 1) -> int:
    """Return a power of two, at least 4 KiB, such that a file has at most 1024 blocks, and fewer where it is one of many ``files``."""
    block, most = SMALLEST_BLOCK, max(1, min(MOST_BLOCKS, MOST_OF_ALL // max(1, files) - 4))  # 4: the rest of a file's entry
    while block * most < size:
        block *= 2
    return block


def digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of bytes in memory, 64 hex digits."""
    return blake3(data).hexdigest()


class Digester:
    """Digests a stream whose size is known beforehand: ``update`` with every chunk, then ``result``.

    ``block``: bytes of a block, by default those of a file alone.
    """

    def __init__(self, size: int, block: int = 0) -> None:
        self._block_size = block or block_size(size)
        self._file, self._block = blake3(), blake3()
        self._size, self._room = 0, self._block_size
        self._blocks: list[str] = []

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        """Chunks may be of any length."""
        view = memoryview(chunk).cast("B")
        self._file.update(view)
        self._size += len(view)
        while len(view) >= self._room:
            self._block.update(view[: self._room])
            view = view[self._room :]
            self._close_block()
        self._block.update(view)
        self._room -= len(view)

    def result(self) -> FileDigest:
        """Call once, after the last chunk."""
        if self._room < self._block_size:
            self._close_block()
        return FileDigest(self._size, self._file.hexdigest(), self._block_size, tuple(self._blocks))

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest()[:BLOCK_HEX])
        self._block, self._room = blake3(), self._block_size


def digest_stream(chunks: Iterable[bytes | bytearray | memoryview], size: int, block: int = 0) -> FileDigest:
    """Digest of a whole stream that should have ``size`` bytes; ``result.size`` is what it had."""
    digester = Digester(size, block)
    for chunk in chunks:
        digester.update(chunk)
    return digester.result()
