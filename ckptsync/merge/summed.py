"""CRC32s of the source's own containers, checked on the bytes as they are read for the merge: no pass of its own.

torch's reader ignores them, so a flipped bit in a shard goes unnoticed everywhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptsync.crc import joined
from ckptsync.digest import crc32
from ckptsync.errors import Corrupt
from ckptsync.merge.pipeline import one_at_a_time
from ckptsync.model import Checksum, Extent, Files, expect, read

_PIECE = 4 << 20
Range = tuple[int, int]


class SummedFiles:
    """`Files` whose reads are summed, in whatever order and by however many threads they are made; `finish` sums what was not read.

    Every byte of a record is summed once.  Raises Corrupt with the read that completes a record whose sum is wrong.
    """

    def __init__(self, files: Files, checksums: Collection[Checksum]) -> None:
        self._files = files
        self._lock = one_at_a_time()
        told: defaultdict[str, list[Checksum]] = defaultdict(list)
        for checksum in checksums:
            told[checksum.extent.file].append(checksum)
        for found in told.values():
            found.sort(key=lambda c: c.extent.start)  # of an integer: comparing extents takes ten times as long
        self._told = {name: ([c.extent.start for c in found], found) for name, found in told.items()}
        self._done = {name: bytearray(len(found)) for name, found in told.items()}
        self._parts: dict[tuple[str, int], _Parts] = {}  # of records that are read in pieces

    def sizes(self) -> Mapping[str, int]:
        """As the files have them."""
        return self._files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        self._files.read_into(name, start, out)
        if name in self._told:
            self._sum(name, start, out)

    def expect(self, extents: Iterable[Extent]) -> None:
        """As `Expecting` says."""
        expect(self._files, extents)

    def stretches(self) -> tuple[Stretch, ...]:
        """What was summed of records that were not read to their ends, for `join` elsewhere."""
        with self._lock:
            told = [(self._told[name][1][number].extent, parts) for (name, number), parts in self._parts.items()]
            return tuple(Stretch(extent, *one) for extent, parts in told for one in parts.stretches())

    def join(self, stretches: Iterable[Stretch]) -> None:
        """Take what was summed elsewhere for read; what overlaps with what is known already is left to `finish`.  Raises Corrupt."""
        for one in stretches:
            number, found = self._number(one.record), self._told[one.record.file][1]
            with self._lock:
                crc = self._joined(one, number, found[number])
            if crc is not None:
                _check(found[number], crc)

    def _number(self, record: Extent) -> int:
        starts, found = self._told[record.file]
        number = bisect_right(starts, record.start) - 1
        while found[number].extent != record:  # several may start at one byte, if all but one are empty
            number -= 1
        return number

    def _joined(self, one: Stretch, number: int, checksum: Checksum) -> int | None:
        name = one.record.file
        if self._done[name][number]:
            return None
        parts = self._parts.setdefault((name, number), _Parts(checksum.extent))
        if [*parts.unclaimed(one.start, one.end)] != [(one.start, one.end)]:
            return None
        parts.claim(one.start, one.end)
        if (crc := parts.add([(one.start, one.end, one.crc32)])) is not None:
            self._done[name][number] = 1
            del self._parts[name, number]
        return crc

    def take_as_read(self, records: Iterable[Extent]) -> None:
        """These were read to their ends elsewhere, and their sums were right."""
        for record in records:
            self._done[record.file][self._number(record)] = 1

    def whole(self) -> tuple[Extent, ...]:
        """The records that were read to their ends: their sums are right."""
        return tuple(
            found[number].extent for name, (_, found) in self._told.items() for number, done in enumerate(self._done[name]) if done
        )

    def finish(self) -> None:
        """Sum what was not read."""
        for name, (_, found) in self._told.items():
            for number, checksum in enumerate(found):
                if not self._done[name][number]:
                    for low, high in self._left(name, number, checksum):
                        data = read(self._files, Extent(name, low, high - low))
                        self._sum_part(name, number, checksum, low, memoryview(data))

    def _left(self, name: str, number: int, checksum: Checksum) -> Iterator[Range]:
        parts = self._parts.get((name, number)) or _Parts(checksum.extent)
        for low, high in [*parts.unclaimed(parts.start, parts.end)]:
            yield from ((at, min(at + _PIECE, high)) for at in range(low, high, _PIECE))

    def _sum(self, name: str, start: int, out: memoryview) -> None:
        starts, found = self._told[name]
        done, end = self._done[name], start + len(out)
        for number in range(max(0, bisect_right(starts, start) - 1), len(found)):
            if starts[number] >= end:
                return
            if done[number]:
                continue
            extent = found[number].extent
            if start <= extent.start and extent.start + extent.size <= end and (name, number) not in self._parts:
                done[number] = 1
                at = extent.start - start
                _check(found[number], crc32(out[at : at + extent.size]))
            elif start < extent.start + extent.size:
                low = max(start, extent.start)
                self._sum_part(name, number, found[number], low, out[low - start : extent.start + extent.size - start])

    def _sum_part(self, name: str, number: int, checksum: Checksum, start: int, data: memoryview) -> None:
        """Sum what nobody has, outside the lock; whoever brings the last piece checks the whole."""
        with self._lock:
            if self._done[name][number]:
                return
            parts = self._parts.setdefault((name, number), _Parts(checksum.extent))
            wanted = [(low, high, *parts.taken(low)) for low, high in parts.claim(start, start + len(data))]
        sums = [(first, high, crc32(data[low - start : high - start], crc)) for low, high, first, crc in wanted]
        with self._lock:
            crc = parts.add(sums)
            if crc is not None:
                self._done[name][number] = 1
                del self._parts[name, number]
        if crc is not None:
            _check(checksum, crc)


@dataclass(frozen=True, slots=True)
class Stretch:
    """``crc32`` of the bytes from ``start`` to ``end`` (of the file), a part of ``record``."""

    record: Extent
    start: int
    end: int
    crc32: int


class _Parts:
    """What of one record was summed: stretches, joined where they meet."""

    __slots__ = ("_claimed", "_sums", "end", "start")

    def __init__(self, extent: Extent) -> None:
        self.start, self.end = extent.start, extent.start + extent.size
        self._claimed: list[Range] = []
        self._sums: dict[int, tuple[int, int]] = {}  # where it starts → where it ends, its CRC32

    def unclaimed(self, start: int, end: int) -> Iterator[Range]:
        """What of this range nobody sums or has summed."""
        for low, high in self._claimed:
            if start < min(low, end):
                yield start, min(low, end)
            start = max(start, high)
        if start < end:
            yield start, end

    def claim(self, start: int, end: int) -> list[Range]:
        """The same; from now on it is claimed."""
        found = [*self.unclaimed(start, end)]
        merged: list[Range] = []
        for low, high in sorted([*self._claimed, *found]):
            if merged and merged[-1][1] == low:
                merged[-1] = merged[-1][0], high
            else:
                merged.append((low, high))
        self._claimed = merged
        return found

    def stretches(self) -> list[tuple[int, int, int]]:
        """Each with its sum."""
        return [(start, end, crc) for start, (end, crc) in sorted(self._sums.items())]

    def taken(self, end: int) -> tuple[int, int]:
        """Take away the stretch that ends here, to be summed on, which is cheaper than joining: where it starts, its CRC32."""
        for start, (last, crc) in self._sums.items():
            if last == end:
                del self._sums[start]
                return start, crc
        return end, 0

    def add(self, sums: Iterable[tuple[int, int, int]]) -> int | None:
        """Join what was summed to the rest; the CRC32 of the whole if this was the last of it."""
        for start, end, crc in sums:
            self._sums[start] = end, crc
        starts = sorted(self._sums)
        for low, high in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
            if self._sums[low][0] == high:
                end, crc = self._sums.pop(high)
                self._sums[low] = end, joined(self._sums[low][1], crc, end - high)
        last, whole = self._sums.get(self.start, (self.start, 0))
        return whole if last == self.end else None


def _check(checksum: Checksum, crc: int) -> None:
    if crc != checksum.crc32:
        e = checksum.extent
        raise Corrupt(
            f"{e.file}: bytes {e.start} to {e.start + e.size} do not have their CRC32", hint="the shard is damaged: fetch it again"
        )
