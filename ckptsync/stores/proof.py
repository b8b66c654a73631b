"""Whether bytes that stream by are those of a digest: a whole file's, or blocks or stretches of it.  Raises Corrupt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from ckptsync.digest import FileDigest
from ckptsync.errors import Corrupt


@dataclass(frozen=True, slots=True)
class Stretches:
    """What is known of a file without blocks: the BLAKE3 of all of it, and of stretches that make it up, of one byte or more each.

    ``ends``: where they end, ascending, the last with the file; ``digests``: theirs, in their order.
    """

    size: int
    digest: str
    ends: tuple[int, ...]
    digests: tuple[str, ...]


Digests = FileDigest | Stretches


def pieces(wanted: Digests, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The smallest ranges from ``start`` to ``end`` that can each be proven; both are ends of such."""
    while start < end:
        up_to = _end(wanted, start)
        yield start, up_to
        start = up_to


def _end(wanted: Digests, at: int) -> int:
    """Where the piece ends that byte ``at`` is in."""
    if isinstance(wanted, Stretches):
        return wanted.ends[bisect_right(wanted.ends, at)]
    return min(at - at % wanted.block_size + wanted.block_size, wanted.size)


def _digest(wanted: Digests, at: int) -> str:
    """Of the piece that byte ``at`` is in."""
    return (
        wanted.digests[bisect_right(wanted.ends, at)] if isinstance(wanted, Stretches) else wanted.blocks[at // wanted.block_size]
    )


class Proof(Protocol):
    """Of one range of a file: ``add`` what comes, front to back, then ``end``."""

    def add(self, view: memoryview) -> None:
        """Some bytes."""
        ...

    def end(self) -> None:
        """All have come."""
        ...


class Unknown:
    """Nothing is known of the bytes."""

    def add(self, view: memoryview) -> None:
        """Any."""

    def end(self) -> None:
        """So be it."""


class Whole:
    """A file from its first to its last byte."""

    def __init__(self, name: str, wanted: Digests) -> None:
        self._name, self._wanted, self._found = name, wanted.digest, blake3()

    def add(self, view: memoryview) -> None:
        """As `Proof` says."""
        self._found.update(view)

    def end(self) -> None:
        """As `Proof` says."""
        if (found := self._found.hexdigest()) != self._wanted:
            raise Corrupt(f"{self._name}: digest {found[:16]}…, recorded {self._wanted[:16]}…")


class Blocks:
    """Whole blocks, or stretches, from byte ``at`` on, where one begins."""

    def __init__(self, name: str, wanted: Digests, at: int) -> None:
        self._name, self._wanted, self._at = name, wanted, at
        self._begun, self._end = at, _end(wanted, at) if at < wanted.size else at
        self._found = blake3()

    def add(self, view: memoryview) -> None:
        """As `Proof` says; a block that is wrong is told at its end."""
        while view:
            count = min(len(view), self._end - self._at)
            self._found.update(view[:count])
            self._at, view = self._at + count, view[count:]
            if self._at == self._end:
                self._compare()

    def end(self) -> None:
        """As `Proof` says: blocks have been compared at their ends; one that has not come to its end is wrong."""
        if self._at > self._begun:
            self._compare()

    def _compare(self) -> None:
        wanted, found = _digest(self._wanted, self._begun), self._found.hexdigest()
        if found[: len(wanted)] != wanted:
            raise Corrupt(f"{self._name}: bytes {self._begun} to {self._end} differ from their digest")
        self._begun, self._found = self._end, blake3()
        self._end = _end(self._wanted, self._at) if self._at < self._wanted.size else self._at


def proof(name: str, wanted: Digests | None, start: int, end: int) -> Proof:
    """For the bytes from ``start`` to ``end``, both at the ends of `pieces` of the file."""
    if wanted is None:
        return Unknown()
    return Whole(name, wanted) if (start, end) == (0, wanted.size) else Blocks(name, wanted, start)
