"""Compare bytes, as they stream by, with recorded BLAKE3 digests: of a whole file, or of ranges of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from ckptsync.digest import FileDigest
from ckptsync.errors import Corrupt


@dataclass(frozen=True, slots=True)
class RangeDigests:
    """BLAKE3 digests of a file, and of consecutive ranges of one byte or more that make it up.

    ``ends``: where the ranges end, ascending; the last ends with the file.  ``digests``: theirs, in the same order.
    """

    size: int
    digest: str
    ends: tuple[int, ...]
    digests: tuple[str, ...]


Digests = FileDigest | RangeDigests


def checkable_ranges(wanted: Digests, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the smallest ranges from ``start`` to ``end`` that have digests; both must be ends of such ranges."""
    while start < end:
        up_to = _end(wanted, start)
        yield start, up_to
        start = up_to


def _end(wanted: Digests, at: int) -> int:
    """Return where the range ends that holds byte ``at``."""
    if isinstance(wanted, RangeDigests):
        return wanted.ends[bisect_right(wanted.ends, at)]
    return min(at - at % wanted.block_size + wanted.block_size, wanted.size)


def _digest(wanted: Digests, at: int) -> str:
    """Return the digest of the range that holds byte ``at``."""
    return (
        wanted.digests[bisect_right(wanted.ends, at)]
        if isinstance(wanted, RangeDigests)
        else wanted.blocks[at // wanted.block_size]
    )


class Checker:
    """Checks one range of a file: call `add` with its bytes, front to back, then `end`.  This one has nothing to compare with."""

    def add(self, view: memoryview) -> None:
        """Take the next bytes.  Raises Corrupt at the end of a range that differs."""

    def end(self) -> None:
        """Raise Corrupt if the bytes differ, or did not all come."""


class _WholeFile(Checker):
    """Compares a file, from its first to its last byte, with one digest."""

    def __init__(self, name: str, wanted: Digests) -> None:
        self._name, self._wanted, self._found = name, wanted.digest, blake3()

    def add(self, view: memoryview) -> None:
        self._found.update(view)

    def end(self) -> None:
        if (found := self._found.hexdigest()) != self._wanted:
            raise Corrupt(f"{self._name}: digest {found[:16]}…, recorded {self._wanted[:16]}…")


class _Ranges(Checker):
    """Compares each range from byte ``at`` on, where a range begins."""

    def __init__(self, name: str, wanted: Digests, at: int) -> None:
        self._name, self._wanted, self._at = name, wanted, at
        self._begun, self._end = at, _end(wanted, at) if at < wanted.size else at
        self._found = blake3()

    def add(self, view: memoryview) -> None:
        while view:
            count = min(len(view), self._end - self._at)
            self._found.update(view[:count])
            self._at, view = self._at + count, view[count:]
            if self._at == self._end:
                self._compare()

    def end(self) -> None:
        if self._at > self._begun:  # the last range is not complete, so it differs
            self._compare()

    def _compare(self) -> None:
        wanted, found = _digest(self._wanted, self._begun), self._found.hexdigest()
        if found[: len(wanted)] != wanted:
            raise Corrupt(f"{self._name}: bytes {self._begun} to {self._end} differ from their digest")
        self._begun, self._found = self._end, blake3()
        self._end = _end(self._wanted, self._at) if self._at < self._wanted.size else self._at


def checker(name: str, wanted: Digests | None, start: int, end: int) -> Checker:
    """Return a checker of the bytes from ``start`` to ``end``, both ends of `checkable_ranges`.  ``name``: for the error."""
    if wanted is None:
        return Checker()
    return _WholeFile(name, wanted) if (start, end) == (0, wanted.size) else _Ranges(name, wanted, start)
