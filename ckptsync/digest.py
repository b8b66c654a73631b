"""Digests: BLAKE3 of a file, of each of its blocks, and of each tensor; CRC32 of other containers.

Block digests narrow damage to the bytes that changed; the file's digest is what ``b3sum`` prints. A
`Checker` compares the bytes of a file, or of some of its blocks, with their digests as they come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

from ckptsync.errors import Corrupt

try:
    from isal.isal_zlib import crc32 as crc32  # noqa: PLC0414  for others to import
except (
    ImportError
):  # there are no wheels for this machine: zlib gives the same sums, at a fifth of the speed
    from zlib import crc32 as crc32  # noqa: PLC0414

SMALLEST_BLOCK = 4 << 10
MOST_BLOCKS = 1024
MOST_OF_ALL = 1 << 19  # blocks of all files of one manifest: 18 MiB of JSON
BLOCK_HEX = 32  # 128 bits are enough to tell which block changed; the file's digest has all 256


@dataclass(frozen=True, slots=True)
class FileDigest:
    """``digest``: 64 hex digits.

    ``blocks``: `BLOCK_HEX` digits for each ``block_size`` bytes, the last one shorter.
    """

    size: int
    digest: str
    block_size: int
    blocks: tuple[str, ...]


def block_size(size: int, files: int = 1) -> int:
    """Return the size of a file's blocks: a power of two, at least 4 KiB.

    A file has at most 1024 blocks, and fewer where it is one of many ``files``.
    """
    # 4: the rest of a file's entry
    block, most = (SMALLEST_BLOCK, max(1, min(MOST_BLOCKS, MOST_OF_ALL // max(1, files) - 4)))
    while block * most < size:
        block *= 2
    return block


def digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of bytes in memory, 64 hex digits."""
    return blake3(data).hexdigest()


class Digester:
    """Digest a stream of known size: call ``update`` with every chunk, then ``result``.

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


def digest_stream(
    chunks: Iterable[bytes | bytearray | memoryview], size: int, block: int = 0
) -> FileDigest:
    """Digest of a whole stream that should have ``size`` bytes; ``result.size`` is what it had."""
    digester = Digester(size, block)
    for chunk in chunks:
        digester.update(chunk)
    return digester.result()


@dataclass(frozen=True, slots=True)
class RangeDigests:
    """BLAKE3 digests of a file, and of consecutive ranges of one byte or more that make it up.

    ``ends``: where the ranges end, ascending; the last ends with the file. ``digests``: theirs.
    """

    size: int
    digest: str
    ends: tuple[int, ...]
    digests: tuple[str, ...]


Digests = FileDigest | RangeDigests


def digested_ranges(digests: Digests, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and digest of the smallest ranges that have one, from ``start`` to ``end``.

    Both must be ends of such ranges.
    """
    while start < end:
        if isinstance(digests, RangeDigests):
            at = bisect_right(digests.ends, start)
            until, digest = digests.ends[at], digests.digests[at]
        else:
            at = start // digests.block_size
            until, digest = min((at + 1) * digests.block_size, digests.size), digests.blocks[at]
        yield start, until, digest
        start = until


def compared_ranges(digests: Digests, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Yield the ranges by which `Checker` compares: a whole file is compared by its one digest."""
    if (start, end) == (0, digests.size):
        return iter([(start, end, digests.digest)])
    return digested_ranges(digests, start, end)


class Checker:
    """Compares bytes from ``start`` to ``end``, both ends of `digested_ranges`, with their digests.

    Call `add` with them, front to back, then `end`; both raise Corrupt. Without digests all is
    right.  ``threads`` digest together; more than one pays from some MiB at once on.
    """

    def __init__(
        self, name: str, digests: Digests | None, start: int, end: int, threads: int = 1
    ) -> None:
        self._name, self._threads = name, threads
        self._ranges = compared_ranges(digests, start, end) if digests else iter(())
        self._digest: str | None
        self._begin()

    def add(self, view: memoryview) -> None:
        """Take the next bytes."""
        while view and self._digest is not None:
            piece = view[: self._missing]
            self._found.update(piece)
            self._missing -= len(piece)
            view = view[len(piece) :]
            if not self._missing:
                self.end()

    def end(self) -> None:
        """Compare what has come of a range.  A digest without digits matches nothing."""
        if (expected := self._digest) is not None and not (
            expected and self._found.hexdigest().startswith(expected)
        ):
            raise Corrupt(
                f"{self._name}: bytes {self._start} to {self._end} differ from their checksum"
            )
        self._begin()

    def _begin(self) -> None:
        self._start, self._end, self._digest = next(self._ranges, (0, 0, None))
        self._missing = self._end - self._start
        self._found = blake3(max_threads=self._threads)


_POLYNOMIAL = 0xEDB88320  # bit-reversed, as zlib has polynomials: the highest bit is the power 0
_ONE = 1 << 31


def crc32_combine(first: int, second: int, size: int) -> int:
    """Return the CRC32 of ``a + b``, from ``crc32(a)``, ``crc32(b)`` and ``len(b)``.

    As ``crc32_combine`` in zlib, which Python does not offer. A CRC is a remainder of polynomials
    over GF(2); bytes that follow multiply it by a power of x.
    """
    return _product(_shift(size), first) ^ second


def _product(a: int, b: int) -> int:
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@lru_cache(1024)
def _shift(size: int) -> int:
    """Return ``x ** (8 * size)``."""
    result = _ONE
    for bit in range(size.bit_length()):
        if size >> bit & 1:
            result = _product(result, _power(bit))
    return result


@lru_cache(64)
def _power(bit: int) -> int:
    """Return ``x ** (8 << bit)``."""
    return _product(_power(bit - 1), _power(bit - 1)) if bit else _ONE >> 8
