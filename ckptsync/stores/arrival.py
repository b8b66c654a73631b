"""One stored file on its way to a directory of this machine, in ranges that come in any order.

Blocks that an earlier try has left, as their digests say, are not asked for again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptsync.errors import Corrupt
from ckptsync.model import Extent
from ckptsync.stores.ahead import Reads
from ckptsync.stores.posix.placing import Placing
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.pouring import pour
from ckptsync.stores.proof import Digests, Proof, pieces, proof

RANGE = 32 << 20  # bytes of a request: many small ones cost a server more
WORTH = 256 << 10  # bytes of a file below which it is quicker to bring it again than to look for what is left of it
Told = Callable[[int], object]
"""Told of bytes that are here."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The stored file ``name``, to be ``under`` in the directory.  Without a ``digest`` nothing is known of its bytes but how many they are."""

    name: str
    under: str
    size: int
    digest: Digests | None

    def ranges(self) -> list[tuple[int, int]]:
        """Of whole blocks or stretches; a file without bytes has one, too."""
        if not self.digest:
            return [(start, min(start + RANGE, self.size)) for start in range(0, max(1, self.size), RANGE)]
        found, begun = [], 0
        for _, end in pieces(self.digest, 0, self.size):
            if end - begun >= RANGE:
                found.append((begun, end))
                begun = end
        return [*found, (begun, self.size)] if begun < self.size or not found else found


class Arrival:
    """Threads may bring its ranges at once.  Raises Corrupt, NotFound, StoreError."""

    def __init__(self, source: Reads, target: PosixStore, wanted: Wanted) -> None:
        self.wanted = wanted
        self._source, self._target = source, target
        self._left = len(wanted.ranges())
        self._lock = threading.Lock()
        self._placing: Placing | None = None

    def bring(self, span: tuple[int, int], buffer: memoryview, told: Told) -> bool:
        """One of `Wanted.ranges`, and whether it was the last one: then the file is there."""
        placing, wanted = self._begun(), self.wanted
        for start, end in _missing(placing, wanted, span, buffer) if placing.left else (span,):
            way = _Way(placing, proof(wanted.name, wanted.digest, start, end), start, told)
            pour(self._source, Extent(wanted.name, start, end - start), buffer, way.take)
            way.proof.end()
        placing.let_go(span[0], span[1] - span[0])
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            placing.commit()
        return is_last

    def give_up(self, error: BaseException) -> None:
        """Leave what the next try can use, if there is sense in one."""
        if self._placing:
            self._placing.give_up(error)

    def _begun(self) -> Placing:
        with self._lock:
            if self._placing is None:
                wanted = self.wanted
                origin = wanted.digest.digest if wanted.digest and wanted.size >= WORTH else ""
                self._placing = self._target.place(wanted.under, wanted.size, origin)
            return self._placing


class _Way:
    """From the source to the file, past the proof."""

    def __init__(self, placing: Placing, proof: Proof, start: int, told: Told) -> None:
        self.proof = proof
        self._placing, self._at, self._told = placing, start, told

    def take(self, view: memoryview) -> None:
        """The next bytes."""
        self.proof.add(view)
        self._placing.write_at(self._at, view)
        self._at += len(view)
        self._told(len(view))


def _missing(placing: Placing, wanted: Wanted, span: tuple[int, int], buffer: memoryview) -> Iterator[tuple[int, int]]:
    """Parts of a range, of whole blocks, that are not there yet."""
    if wanted.digest is None:
        yield span
        return
    first = span[0]
    for start, end in pieces(wanted.digest, *span):
        if _is_there(placing, wanted.name, wanted.digest, (start, end), buffer):
            if first < start:
                yield first, start
            first = end
    if first < span[1]:
        yield first, span[1]


def _is_there(placing: Placing, name: str, digest: Digests, block: tuple[int, int], buffer: memoryview) -> bool:
    found = proof(name, digest, *block)
    try:
        for at in range(*block, len(buffer)):
            piece = buffer[: min(len(buffer), block[1] - at)]
            placing.read_at(at, piece)
            found.add(piece)
        found.end()
    except Corrupt:
        return False  # that was the question
    return True
