"""Whether bytes that stream by are those of a digest: a whole file's, or blocks of it.  Raises Corrupt."""

from __future__ import annotations

from typing import Protocol

from blake3 import blake3

from ckptsync.digest import BLOCK_HEX, FileDigest
from ckptsync.errors import Corrupt


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

    def __init__(self, name: str, wanted: FileDigest) -> None:
        self._name, self._wanted, self._found = name, wanted.digest, blake3()

    def add(self, view: memoryview) -> None:
        """As `Proof` says."""
        self._found.update(view)

    def end(self) -> None:
        """As `Proof` says."""
        if (found := self._found.hexdigest()) != self._wanted:
            raise Corrupt(f"{self._name}: digest {found[:16]}…, recorded {self._wanted[:16]}…")


class Blocks:
    """Whole blocks from byte ``at`` on, where a block begins."""

    def __init__(self, name: str, wanted: FileDigest, at: int) -> None:
        self._name, self._wanted, self._at = name, wanted, at
        self._found = blake3()

    def add(self, view: memoryview) -> None:
        """As `Proof` says; a block that is wrong is told at its end."""
        size = self._wanted.block_size
        while view:
            count = min(len(view), size - self._at % size)
            self._found.update(view[:count])
            self._at, view = self._at + count, view[count:]
            if self._at % size == 0:
                self._compare(self._at // size - 1)

    def end(self) -> None:
        """As `Proof` says: the last block of a file is shorter."""
        if self._at % self._wanted.block_size:
            self._compare(self._at // self._wanted.block_size)

    def _compare(self, number: int) -> None:
        found, self._found = self._found.hexdigest()[:BLOCK_HEX], blake3()
        if found != self._wanted.blocks[number]:
            size = self._wanted.block_size
            raise Corrupt(
                f"{self._name}: bytes {number * size} to {min((number + 1) * size, self._wanted.size)} differ from their digest"
            )


def proof(name: str, wanted: FileDigest | None, start: int, end: int) -> Proof:
    """For the bytes from ``start`` to ``end``, both at the ends of blocks or of the file."""
    if wanted is None:
        return Unknown()
    return Whole(name, wanted) if (start, end) == (0, wanted.size) else Blocks(name, wanted, start)
