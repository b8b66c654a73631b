"""Check the CRC32s of torch's containers on the bytes that a merge reads anyway.

torch's reader ignores them, so a flipped bit in a shard goes unnoticed everywhere else.  Records
are read in pieces, by several threads and in any order, so a CRC32 is made of each piece, and
pieces that meet are combined.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter

from ckptsync.digest import crc32, crc32_combine
from ckptsync.errors import Corrupt
from ckptsync.tensors import Checksum, Extent, Files, FilesWrapper

_PIECE = 4 << 20
_Key = tuple[str, int]  # a record: its file, and its number in that file
_Stretch = tuple[int, int, int | None]
"""Start and end in the file, and the CRC32 between them: None while a thread computes it."""


@dataclass(frozen=True, slots=True)
class RecordStretch:
    """The CRC32 of a file's bytes from ``start`` to ``end``: all or a part of ``record``."""

    record: Extent
    start: int
    end: int
    crc32: int


class CrcCheckedFiles(FilesWrapper):
    """Files whose reads are summed, in whatever order and by however many threads.

    Every byte of a record is summed once; `finish` reads and sums what nobody has read.  Raises
    Corrupt with the read that completes a record whose CRC32 is wrong.
    """

    def __init__(self, files: Files, checksums: Collection[Checksum]) -> None:
        """Prepare to sum the records of ``checksums``; nothing is read yet."""
        super().__init__(files)
        self._lock = threading.Lock()
        by_file: defaultdict[str, list[Checksum]] = defaultdict(list)
        for checksum in checksums:
            by_file[checksum.extent.file].append(checksum)
        for checksums_of_file in by_file.values():
            # by an integer: comparing extents takes ten times as long
            checksums_of_file.sort(key=lambda c: c.extent.start)
        self._records = dict(by_file)
        self._starts = {
            name: [c.extent.start for c in checksums_of_file]
            for name, checksums_of_file in by_file.items()
        }
        self._done = {
            name: bytearray(len(checksums_of_file)) for name, checksums_of_file in by_file.items()
        }
        self._parts: dict[_Key, list[_Stretch]] = {}  # of records that are read in pieces, in order

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """See `Files`; raise Corrupt if this read completes a record with a wrong CRC32, once."""
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
                self._sum_unclaimed((name, number), first, out[first - start : last - start])

    def finish(self) -> None:
        """Read and sum what was not read; raise Corrupt if the CRC32 of a record is wrong."""
        unread = [
            (f, n) for f, done in self._done.items() for n, is_in in enumerate(done) if not is_in
        ]
        for name, number in unread:
            record = self._records[name][number].extent
            if not record.size:
                self._check((name, number), 0)
            whole = record.start, record.start + record.size
            for low, high in _find_unclaimed(self._parts.get((name, number), ()), *whole):
                buffer = memoryview(bytearray(min(_PIECE, high - low)))
                for position in range(low, high, _PIECE):
                    piece = buffer[: min(_PIECE, high - position)]
                    self._files.read_into(name, position, piece)
                    self._sum_unclaimed((name, number), position, piece)

    def stretches(self) -> tuple[RecordStretch, ...]:
        """Return the CRC32s of everything that was summed, for `join` in another process."""
        stretches = []
        with self._lock:
            for name, records in self._records.items():
                for e, crc in ((c.extent, c.crc32) for c in compress(records, self._done[name])):
                    stretches.append(RecordStretch(e, e.start, e.start + e.size, crc))
            for (name, number), parts in self._parts.items():
                e = self._records[name][number].extent
                stretches += [
                    RecordStretch(e, lo, hi, crc) for lo, hi, crc in parts if crc is not None
                ]
        return tuple(stretches)

    def join(self, stretches: Iterable[RecordStretch]) -> None:
        """Add what another process has summed; raise Corrupt if that completes a wrong record.

        What overlaps with stretches that were summed before is left to `finish`.
        """
        for stretch in stretches:
            name = stretch.record.file
            number = bisect_right(self._starts[name], stretch.record.start) - 1
            # several may start here, if all but one are empty
            while self._records[name][number].extent != stretch.record:
                number -= 1
            with self._lock:
                if self._done[name][number]:
                    continue
                if stretch.end - stretch.start == stretch.record.size:
                    self._parts.pop((name, number), None)
                parts = self._parts.setdefault((name, number), [])
                if _find_unclaimed(parts, stretch.start, stretch.end) != [
                    (stretch.start, stretch.end)
                ]:
                    continue
                parts.append((stretch.start, stretch.end, None))
                parts.sort(key=itemgetter(0))
            self._combine((name, number), [(stretch.start, stretch.crc32)])

    def _sum_unclaimed(self, key: _Key, start: int, data: memoryview) -> None:
        """Claim the bytes that no other thread has claimed, and sum them outside the lock.

        Raises Corrupt as `_combine`.
        """
        with self._lock:
            if self._done[key[0]][key[1]]:
                return
            parts = self._parts.setdefault(key, [])
            missing_ranges = _find_unclaimed(parts, start, start + len(data))
            parts += [(low, high, None) for low, high in missing_ranges]
            parts.sort(key=itemgetter(0))
        if missing_ranges:  # else another thread may have completed the record already
            sums = [(low, crc32(data[low - start : high - start])) for low, high in missing_ranges]
            self._combine(key, sums)

    def _combine(self, key: _Key, sums: Iterable[tuple[int, int]]) -> None:
        """Set the CRC32s of claimed stretches, by their starts, and combine stretches that meet.

        The call that completes a record checks it: raises Corrupt if its CRC32 is wrong.
        """
        record = self._records[key[0]][key[1]].extent
        with self._lock:
            crcs_by_start = dict(sums)
            joined: list[_Stretch] = []
            for low, high, part_crc in sorted(self._parts[key], key=itemgetter(0)):
                crc = crcs_by_start.get(low, part_crc)
                last = joined[-1] if joined else None
                if last and last[1] == low and last[2] is not None and crc is not None:
                    joined[-1] = last[0], high, crc32_combine(last[2], crc, high - low)
                else:
                    joined.append((low, high, crc))
            self._parts[key] = joined
            low, high, whole = joined[0] if joined else (0, 0, None)
            if (low, high) != (record.start, record.start + record.size) or whole is None:
                return
            self._done[key[0]][key[1]] = 1
            del self._parts[key]
        self._check(key, whole)

    def _check(self, key: _Key, crc: int) -> None:
        """Raise Corrupt if ``crc`` is not the CRC32 that the container has of this record."""
        checksum = self._records[key[0]][key[1]]
        if crc != checksum.crc32:
            e = checksum.extent
            raise Corrupt(
                f"{e.file}: bytes {e.start} to {e.start + e.size} do not have their CRC32:"
                f" {crc:08x}, {checksum.crc32:08x} recorded",
                hint="the shard is damaged: fetch it again",
            )


def _find_unclaimed(parts: Iterable[_Stretch], start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges between ``start`` and ``end`` that no stretch of ``parts`` covers.

    ``parts``: what threads sum or have summed, ordered by start.
    """
    ranges = []
    for low, high, _ in parts:
        if start < min(low, end):
            ranges.append((start, min(low, end)))
        start = max(start, high)
    if start < end:
        ranges.append((start, end))
    return ranges
