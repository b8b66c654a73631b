"""CRC32s of the source's own containers, checked on the bytes as they are read for the merge: no pass of its own.

torch's reader ignores them, so a flipped bit in a shard goes unnoticed everywhere else.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ckptsync.errors import Corrupt
from ckptsync.model import Checksum, Extent, Files, read

NEAR = 1 << 20  # bytes of padding that are read only to go on with a sum
_PIECE = 4 << 20


class _Sum:
    """How far one record has been summed."""

    __slots__ = ("at", "checksum", "crc")

    def __init__(self, checksum: Checksum) -> None:
        self.checksum, self.at, self.crc = checksum, checksum.extent.start, 0

    @property
    def end(self) -> int:
        return self.checksum.extent.start + self.checksum.extent.size

    def feed(self, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.at += len(data)
        if self.at == self.end and self.crc != self.checksum.crc32:
            e = self.checksum.extent
            raise Corrupt(
                f"{e.file}: bytes {e.start} to {self.end} do not have their CRC32", hint="the shard is damaged: fetch it again"
            )


class SummedFiles:
    """`Files` whose reads are summed where they follow each other, as a merge's do; `finish` sums what is left.

    Raises Corrupt with the read that completes a record whose sum is wrong.
    """

    def __init__(self, files: Files, checksums: Iterable[Checksum]) -> None:
        self._files = files
        sums: defaultdict[str, list[_Sum]] = defaultdict(list)
        for checksum in sorted(set(checksums), key=lambda c: c.extent):
            sums[checksum.extent.file].append(_Sum(checksum))
        self._sums = {name: (tuple(s.checksum.extent.start for s in found), tuple(found)) for name, found in sums.items()}

    def sizes(self) -> Mapping[str, int]:
        """As the files have them."""
        return self._files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        self._files.read_into(name, start, out)
        found = self._sum_at(name, start)
        if found is None or start + len(out) > found.end:
            return
        if found.at < start <= found.at + NEAR:
            self._catch_up(found, start)
        if start <= found.at < start + len(out):
            found.feed(out[found.at - start :])

    def finish(self) -> None:
        """Sum what was not read in order, or not to its end."""
        for _, found in self._sums.values():
            for one in found:
                self._catch_up(one, one.end)

    def _sum_at(self, name: str, start: int) -> _Sum | None:
        starts, found = self._sums.get(name, ((), ()))
        index = bisect_right(starts, start) - 1
        return found[index] if index >= 0 and start < found[index].end else None

    def _catch_up(self, one: _Sum, to: int) -> None:
        while one.at < to:
            data = read(self._files, Extent(one.checksum.extent.file, one.at, min(_PIECE, to - one.at)))
            one.feed(memoryview(data))
