"""Digests of files, of blocks of files, and of tensors.

A `Digester` computes the BLAKE3 digest of a stream and of each of its blocks: the file's digest is
what ``b3sum`` prints, and the blocks' digests narrow damage to the bytes that changed. A `Checker`
compares bytes with their digests while they are read. `crc32_combine` joins the CRC32s of parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

from ckptsync.errors import Corrupt

try:
    from isal.isal_zlib import crc32 as crc32  # noqa: PLC0414  other modules import it from here
except ImportError:
    # isal has no wheel for this machine: zlib gives the same sums, at a fifth of the speed
    from zlib import crc32 as crc32  # noqa: PLC0414

SMALLEST_BLOCK = 4 << 10
MOST_BLOCKS = 1024
MOST_OF_ALL = 1 << 19  # blocks of all files of one manifest: 18 MiB of JSON
BLOCK_HEX = 32  # 128 bits are enough to tell which block changed; the file's digest has all 256


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The digest of a file, and of each of its blocks.

    ``digest``: 64 hex digits. ``blocks``: `BLOCK_HEX` digits for each ``block_size`` bytes, the
    last block shorter.
    """

    size: int
    digest: str
    block_size: int
    blocks: tuple[str, ...]


def block_size(size: int, files: int = 1) -> int:
    """Return the size in bytes of a file's blocks: a power of two, at least 4 KiB.

    A file has at most 1024 blocks, and fewer if the manifest has many ``files``.
    """
    # besides its blocks, a file's entry in a manifest is as long as 4 of them
    most = max(1, min(MOST_BLOCKS, MOST_OF_ALL // max(1, files) - 4))
    block = SMALLEST_BLOCK
    while block * most < size:
        block *= 2
    return block


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 digest of bytes in memory, 64 hex digits."""
    return blake3(data).hexdigest()


class Digester:
    """Computes the digests of a stream: call ``update`` with every chunk, then ``result`` once.

    ``size``: how many bytes are expected; it decides the size of a block unless ``block`` does.
    """

    def __init__(self, size: int, block: int = 0) -> None:
        self._block_size = block or block_size(size)
        self._file, self._block = blake3(), blake3()
        self._size, self._room = 0, self._block_size
        self._blocks: list[str] = []

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add the next chunk, of any length."""
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
        """Return the digests of all chunks; call it once, after the last: it closes a block."""
        if self._room < self._block_size:
            self._close_block()
        return FileDigest(self._size, self._file.hexdigest(), self._block_size, tuple(self._blocks))

    def _close_block(self) -> None:
        """Append the current block's digest, and begin the next block."""
        self._blocks.append(self._block.hexdigest()[:BLOCK_HEX])
        self._block, self._room = blake3(), self._block_size


def digest_stream(
    chunks: Iterable[bytes | bytearray | memoryview], size: int, block: int = 0
) -> FileDigest:
    """Read a whole stream that should have ``size`` bytes, and return its digests.

    ``block``: bytes of a block; 0 chooses by ``size``. ``size`` of the result is the number of
    bytes that came, which may be another: that is no error.
    """
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
    """Yield start, end and digest of the smallest ranges with a digest, from ``start`` to ``end``.

    Ends are exclusive. ``start`` and ``end`` must be ends of such ranges. Nothing if they are
    equal.
    """
    while start < end:
        if isinstance(digests, RangeDigests):
            index = bisect_right(digests.ends, start)
            range_end, digest = digests.ends[index], digests.digests[index]
        else:
            index = start // digests.block_size
            range_end, digest = (
                min((index + 1) * digests.block_size, digests.size),
                digests.blocks[index],
            )
        yield start, range_end, digest
        start = range_end


def compared_ranges(digests: Digests, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Iterate over start, end (exclusive) and digest of the ranges by which `Checker` compares.

    A whole file is one range, with the file's digest; else they are `digested_ranges`.
    """
    if (start, end) == (0, digests.size):
        return iter([(start, end, digests.digest)])
    return digested_ranges(digests, start, end)


class Checker:
    """Compares the bytes from ``start`` to ``end`` of a file with their digests.

    Call `add` with all bytes in order, then `end`; both raise Corrupt at the first range that
    differs. ``name`` is for the message. ``start`` and ``end`` must be ends of `digested_ranges`.
    Without ``digests`` nothing is compared. ``threads`` hash together: more than one is faster if
    each `add` gets some MiB.
    """

    def __init__(
        self, name: str, digests: Digests | None, start: int, end: int, threads: int = 1
    ) -> None:
        self._name, self._threads = name, threads
        self._ranges = compared_ranges(digests, start, end) if digests else iter(())
        self._digest: str | None
        self._begin()

    def add(self, view: memoryview) -> None:
        """Hash the next bytes; raise Corrupt if a range that they complete differs.

        Bytes after the last range are ignored.
        """
        while view and self._digest is not None:
            piece = view[: self._remaining]
            self._hash.update(piece)
            self._remaining -= len(piece)
            view = view[len(piece) :]
            if not self._remaining:
                self.end()

    def end(self) -> None:
        """Compare the bytes of the current range, and begin the next; raise Corrupt if they differ.

        So a range that lacks bytes differs. Do nothing if all ranges are done. A digest of ""
        matches nothing.
        """
        if (expected := self._digest) is not None and not (
            expected and self._hash.hexdigest().startswith(expected)
        ):
            raise Corrupt(
                f"{self._name}: bytes {self._start} to {self._end} differ from their checksum"
            )
        self._begin()

    def _begin(self) -> None:
        """Begin the next range; without one, `add` ignores all bytes."""
        self._start, self._end, self._digest = next(self._ranges, (0, 0, None))
        self._remaining = self._end - self._start
        self._hash = blake3(max_threads=self._threads)


_POLYNOMIAL = 0xEDB88320  # bit-reversed, as zlib has polynomials: the highest bit is the power 0
_ONE = 1 << 31


def crc32_combine(first: int, second: int, size: int) -> int:
    """Return the CRC32 of ``a + b``, from ``crc32(a)``, ``crc32(b)`` and ``len(b)``.

    zlib has the same function, which Python does not offer. A CRC is a remainder of polynomials
    over GF(2); bytes that follow multiply it by a power of x.
    """
    return _product(_shift(size), first) ^ second


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2) modulo `_POLYNOMIAL`, all bit-reversed."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@lru_cache(1024)
def _shift(size: int) -> int:
    """Return ``x ** (8 * size)``, modulo `_POLYNOMIAL`."""
    result = _ONE
    for bit in range(size.bit_length()):
        if size >> bit & 1:
            result = _product(result, _power(bit))
    return result


@lru_cache(64)
def _power(bit: int) -> int:
    """Return ``x ** (8 << bit)``, modulo `_POLYNOMIAL`."""
    return _product(_power(bit - 1), _power(bit - 1)) if bit else _ONE >> 8
