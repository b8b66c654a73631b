"""Check the CRC32s of the source's containers on the bytes that a merge reads anyway.

torch's reader ignores them, so a flipped bit in a shard goes unnoticed everywhere else.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from ckptsync.digest import crc32, crc32_combine
from ckptsync.errors import Corrupt
from ckptsync.tensors import Checksum, Extent, Files, FilesWrapper, read

_PIECE = 4 << 20
_Key = tuple[str, int]  # a record: its file, and its number in that file


@dataclass(frozen=True, slots=True)
class RecordStretch:
    """The CRC32 of a file's bytes from ``start`` to ``end``: all or a part of ``record``."""

    record: Extent
    start: int
    end: int
    crc32: int


class CrcCheckedFiles(FilesWrapper):
    """Files whose reads are summed, in whatever order and by however many threads.

    `finish` sums what was not read.

    Every byte of a record is summed once.  Raises Corrupt with the read that completes a record
    whose CRC32 is wrong.
    """

    def __init__(self, files: Files, checksums: Collection[Checksum]) -> None:
        super().__init__(files)
        self._lock = threading.Lock()
        by_file: defaultdict[str, list[Checksum]] = defaultdict(list)
        for checksum in checksums:
            by_file[checksum.extent.file].append(checksum)
        self._records: dict[str, list[Checksum]] = {}
        self._starts: dict[str, list[int]] = {}
        for name, found in by_file.items():
            # by an integer: comparing extents takes ten times as long
            self._records[name] = sorted(found, key=lambda c: c.extent.start)
            self._starts[name] = [c.extent.start for c in self._records[name]]
        self._done = {name: bytearray(len(found)) for name, found in by_file.items()}
        self._parts: dict[_Key, _Parts] = {}  # of records that are read in pieces

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`."""
        self._files.read_into(name, start, out)
        if name not in self._records:
            return
        starts, done, end = self._starts[name], self._done[name], start + len(out)
        for number in range(max(0, bisect_right(starts, start) - 1), len(starts)):
            if starts[number] >= end:
                return
            if done[number]:
                continue
            record = self._records[name][number].extent
            first, last = max(start, record.start), min(end, record.start + record.size)
            if last - first == record.size and (name, number) not in self._parts:
                done[number] = 1
                self._check((name, number), crc32(out[first - start : last - start]))
            elif first < last:
                self._sum((name, number), first, out[first - start : last - start])

    def finish(self) -> None:
        """Read and sum what was not read."""
        for key in [
            (name, n)
            for name, done in self._done.items()
            for n, is_done in enumerate(done)
            if not is_done
        ]:
            record = self._records[key[0]][key[1]].extent
            parts = self._parts.get(key) or _Parts(record)
            for low, high in list(parts.unclaimed(parts.start, parts.end)):
                for at in range(low, high, _PIECE):
                    data = read(self._files, Extent(record.file, at, min(_PIECE, high - at)))
                    self._sum(key, at, memoryview(data))

    def stretches(self) -> tuple[RecordStretch, ...]:
        """Return what was summed, whole records too, for `join` elsewhere."""
        found = []
        with self._lock:
            for name, records in self._records.items():
                for number, checksum in enumerate(records):
                    record = checksum.extent
                    if self._done[name][number]:
                        found.append(
                            RecordStretch(
                                record, record.start, record.start + record.size, checksum.crc32
                            )
                        )
            for (name, number), parts in self._parts.items():
                record = self._records[name][number].extent
                found += [
                    RecordStretch(record, low, high, crc)
                    for low, high, crc in parts.stretches
                    if crc is not None
                ]
        return tuple(found)

    def join(self, stretches: Iterable[RecordStretch]) -> None:
        """Add what was summed elsewhere.

        What overlaps with what is known already is left to `finish`.  Raises Corrupt.
        """
        for one in stretches:
            name, number = self._key(one.record)
            with self._lock:
                if self._done[name][number]:
                    continue
                is_whole = one.end - one.start == one.record.size
                if is_whole:
                    self._parts.pop((name, number), None)
                parts = self._parts.setdefault((name, number), _Parts(one.record))
                if list(parts.unclaimed(one.start, one.end)) != [(one.start, one.end)]:
                    continue
                parts.claim(one.start, one.end)
            self._add((name, number), [(one.start, one.crc32)])

    def _key(self, record: Extent) -> _Key:
        number = bisect_right(self._starts[record.file], record.start) - 1
        # several may start here, if all but one are empty
        while self._records[record.file][number].extent != record:
            number -= 1
        return record.file, number

    def _sum(self, key: _Key, start: int, data: memoryview) -> None:
        """Sum, outside the lock, what no thread has claimed."""
        with self._lock:
            if self._done[key[0]][key[1]]:
                return
            parts = self._parts.setdefault(key, _Parts(self._records[key[0]][key[1]].extent))
            missing = parts.claim(start, start + len(data))
        self._add(key, [(low, crc32(data[low - start : high - start])) for low, high in missing])

    def _add(self, key: _Key, sums: Iterable[tuple[int, int]]) -> None:
        """Add sums of stretches that are claimed; who brings the last one checks the whole."""
        crc = None
        with self._lock:
            for start, own in sums:
                crc = self._parts[key].add(start, own)
            if crc is not None:
                self._done[key[0]][key[1]] = 1
                del self._parts[key]
        if crc is not None:
            self._check(key, crc)

    def _check(self, key: _Key, crc: int) -> None:
        checksum = self._records[key[0]][key[1]]
        if crc != checksum.crc32:
            e = checksum.extent
            raise Corrupt(
                f"{e.file}: bytes {e.start} to {e.start + e.size} do not have their CRC32",
                hint="the shard is damaged: fetch it again",
            )


class _Parts:
    """Stretches of one record that were read, in order.

    Each is its start, its end and its CRC32, or None while a thread computes it.
    """

    __slots__ = ("end", "start", "stretches")

    def __init__(self, record: Extent) -> None:
        self.start, self.end = record.start, record.start + record.size
        self.stretches: list[tuple[int, int, int | None]] = []

    def unclaimed(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of this one that no thread sums or has summed."""
        for low, high, _ in self.stretches:
            if start < min(low, end):
                yield start, min(low, end)
            start = max(start, high)
        if start < end:
            yield start, end

    def claim(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the same; from now on it is claimed."""
        found = list(self.unclaimed(start, end))
        self.stretches = sorted(
            [*self.stretches, *((low, high, None) for low, high in found)], key=itemgetter(0)
        )
        return found

    def add(self, start: int, crc: int) -> int | None:
        """Set the CRC32 of a stretch, and join those that meet.

        Return that of the whole record once all of it is summed.
        """
        merged: list[tuple[int, int, int | None]] = []
        for low, high, own in self.stretches:
            known = crc if low == start else own
            if merged and merged[-1][1] == low and merged[-1][2] is not None and known is not None:
                merged[-1] = merged[-1][0], high, crc32_combine(merged[-1][2], known, high - low)
            else:
                merged.append((low, high, known))
        self.stretches = merged
        low, high, whole = merged[0]
        return whole if (low, high) == (self.start, self.end) else None
