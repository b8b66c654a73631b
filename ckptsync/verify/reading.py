"""Reading what is verified, and counting it: a report says how many bytes were really read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from blake3 import blake3

from ckptsync.digest import FileDigest, digest_stream
from ckptsync.model import Extent, Files, expect
from ckptsync.stores.pieces import Pieces, is_near
from ckptsync.stores.stream import read_ahead, stream

WINDOW = 4 << 20


class Reads(Protocol):
    """What stores and trees have in common."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from ``start``."""
        ...


Told = Callable[[int], object]
"""Is called, by any thread, with bytes that have just been read; and with 0 as a sign of life of what reads by itself."""


class Watched:
    """Files that remember what was read of them."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.reads: list[Extent] = []
        self.tensors = 0  # that were found in them, by who looked

    def sizes(self) -> Mapping[str, int]:
        """As the files say."""
        return self._files.sizes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        self.reads.append(Extent(name, start, out.nbytes))
        self._files.read_into(name, start, out)

    def expect(self, extents: Iterable[Extent]) -> None:
        """As `Expecting` says."""
        expect(self._files, extents)

    def close(self) -> None:
        """Nothing is read afterwards: threads that read ahead need not stay."""
        if isinstance(self._files, Pieces):
            self._files.close()

    @property
    def read(self) -> int:
        """Bytes, those read twice counted twice."""
        return sum(extent.size for extent in self.reads)

    @property
    def seen(self) -> frozenset[str]:
        """The files of which something was read."""
        return frozenset(extent.file for extent in self.reads)

    @property
    def last(self) -> str:
        """The file read last: where an error about some file's content most likely lies.  Empty before the first."""
        return self.reads[-1].file if self.reads else ""


class Counted:
    """A source that counts the bytes that were really read, and tells of them.  Threads may share it."""

    def __init__(self, source: Reads, told: Told = lambda _: None) -> None:
        self.source, self.read, self._told = source, 0, told
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the source does."""
        self.source.read_into(name, start, out)
        self._count(out)

    def stream(self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
        """As `stores.stream.stream` says."""

        def counted(view: memoryview) -> None:
            self._count(view)
            take(view)

        stream(self.source, extent, buffer, counted)

    def _count(self, view: memoryview) -> None:
        with self._lock:  # told one at a time
            self.read += view.nbytes
            self._told(view.nbytes)


def pieces(source: Reads, extent: Extent) -> Iterator[memoryview]:
    """Its bytes, front to back; each piece is valid until the next one is asked for.  From elsewhere they are read ahead."""
    if not extent.start and not is_near(source.source if isinstance(source, Counted) else source):
        yield from read_ahead(source, extent.file, extent.size, WINDOW)
        return
    buffer = memoryview(bytearray(min(WINDOW, extent.size)))
    for at in range(0, extent.size, WINDOW):
        piece = buffer[: min(WINDOW, extent.size - at)]
        source.read_into(extent.file, extent.start + at, piece)
        yield piece


def digest_of(source: Reads, extent: Extent) -> str:
    """BLAKE3 of its bytes, all of them read; raises what the source raises."""
    digester = blake3()
    for piece in pieces(source, extent):
        digester.update(piece)
    return digester.hexdigest()


def blocks_of(source: Reads, name: str, size: int, block: int = 0) -> FileDigest:
    """As a manifest records it: the digest of a whole file, and of its blocks of ``block`` bytes."""
    return digest_stream(pieces(source, Extent(name, 0, size)), size, block)
