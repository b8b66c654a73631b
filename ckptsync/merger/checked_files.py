"""Check every block of a checkpoint's files in a store against its manifest when it is read.

A store may lose or change bytes, and a merge reads each byte only once.  So the digest of a block
is made of the very bytes that the caller gets; what of the block nobody requested is read as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from blake3 import blake3

from ckptsync.digest import BLOCK_HEX
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.records.manifest import FileEntry
from ckptsync.tensors import Extent, Files, FilesWrapper

_PIECE = 1 << 20
_LARGE = 3 << 20  # of a read that needs no other bytes around it


class _Block(NamedTuple):
    """A block of a file: its number, and the bytes from ``start`` to ``end``."""

    number: int
    start: int
    end: int


class CheckedFiles(FilesWrapper):
    """Files of which each block is digested when it is first read.

    The digest is of the very bytes that the caller gets.  Of a block of which only a part is asked
    for, the rest is read as well.  Further parts of a checked block are not checked again; a block
    that is read whole always is.

    ``around``: bytes that cost less than another read.

    Whole files are not digested: block digests of 128 bits say the same of the blocks that were
    read.
    """

    def __init__(
        self, files: Files, entries: Mapping[str, FileEntry], around: int = _PIECE
    ) -> None:
        super().__init__(files)
        self._entries, self._around = entries, around
        self._checked = {name: bytearray(len(entry.blocks)) for name, entry in entries.items()}

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of the files that a manifest names."""
        return {name: size for name, size in super().sizes().items() if name in self._entries}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`.

        Raises Corrupt if a block is not what its manifest says, Incomplete if no manifest names the
        file.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise Incomplete(f"{name}: not named by any manifest")
        if start + out.nbytes > entry.size:
            raise Corrupt(
                f"{name}: {entry.size} bytes, at least {start + out.nbytes} expected",
                hint="it is truncated: fetch it again",
            )
        if out.nbytes:
            self._read_checked(entry, start, out.cast("B"))

    def expect(self, extents: Iterable[Extent]) -> None:
        """See `Expecting`: extents are widened to what is read to check them."""
        super().expect(self._widen(extent) for extent in extents)

    def foresee(self, reads: Iterable[tuple[Extent, int]]) -> None:
        """See `Expecting`: small extents are widened as for `expect`, large ones are left out.

        Large ones are read alone.
        """
        super().foresee((self._widen(e), position) for e, position in reads if e.size < _LARGE)

    def _widen(self, extent: Extent) -> Extent:
        """Return the extent that a read of ``extent`` reads, with what checks its blocks."""
        entry = self._entries.get(extent.file)
        if entry is None or not extent.size:
            return extent
        _, low, high = self._plan_read(entry, extent.start, extent.start + extent.size)
        return Extent(extent.file, low, high - low)

    def _plan_read(self, entry: FileEntry, start: int, end: int) -> tuple[list[_Block], int, int]:
        """Return the blocks that a read from ``start`` to ``end`` checks, and the range to read.

        The missing rest of the first and the last block comes with the same read only if the read
        is small, since it costs a copy.
        """
        size, is_checked = entry.block_size, self._checked[entry.path]
        last = min((end - 1) // size, len(is_checked) - 1)
        blocks = [
            _Block(number, number * size, min((number + 1) * size, entry.size))
            for number in range(start // size, last + 1)
        ]
        unchecked = [
            b for b in blocks if not is_checked[b.number] or start <= b.start < b.end <= end
        ]
        low, high = (
            min([start, *(b.start for b in unchecked)]),
            max([end, *(b.end for b in unchecked)]),
        )
        is_cheap = end - start < _LARGE and high - low <= end - start + self._around
        return (unchecked, low, high) if is_cheap else (unchecked, start, end)

    def _read_checked(self, entry: FileEntry, start: int, out: memoryview) -> None:
        """Read bytes into ``out``, check their blocks and mark them as checked.

        Raises Corrupt if a digest differs; ``out`` may then have been filled.
        """
        end = start + len(out)
        unchecked, low, high = self._plan_read(entry, start, end)
        buffer = out if high - low == len(out) else memoryview(bytearray(high - low))
        super().read_into(entry.path, low, buffer)
        for block in unchecked:
            digester = blake3()
            self._digest_range(digester, entry.path, block.start, low)
            digester.update(buffer[max(block.start, low) - low : min(block.end, high) - low])
            self._digest_range(digester, entry.path, high, block.end)
            if digester.hexdigest()[:BLOCK_HEX] != entry.blocks[block.number]:
                raise Corrupt(
                    f"{entry.path}: bytes {block.start} to {block.end} in the store are not those"
                    " that its node sent",
                    hint="verify the checkpoint: a node that still has the bytes then sends them"
                    " again",
                )
            self._checked[entry.path][block.number] = True
        if buffer is not out:
            out[:] = buffer[start - low : end - low]

    def _digest_range(self, digester: blake3, name: str, start: int, end: int) -> None:
        """Read the bytes from ``start`` to ``end`` of a file, and add them to ``digester``."""
        if start >= end:
            return
        buffer = memoryview(bytearray(min(_PIECE, end - start)))
        for position in range(start, end, _PIECE):
            piece = buffer[: min(_PIECE, end - position)]
            super().read_into(name, position, piece)
            digester.update(piece)
