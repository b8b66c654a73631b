"""Stream stored files from front to back: ahead of the caller by threads, or through a small buffer.

Both bound the memory by their buffers, and give the bytes as views that are valid until the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from blake3 import blake3

from ckptsync.errors import Corrupt
from ckptsync.model import Extent

PIECE = 8 << 20
DEPTH = 4


class Reads(Protocol):
    """A store, or the files of a checkpoint."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``."""
        ...


def read_ahead(
    source: Reads, name: str, size: int, piece: int = PIECE, depth: int = DEPTH, *, first: int = 0
) -> Generator[memoryview, None, None]:
    """Yield ``size`` bytes from byte ``first`` on, in pieces of ``piece`` bytes, while threads read the next ``depth`` pieces.

    Memory: ``depth + 1`` buffers, which are reused: use each piece before asking for the next.  An error of a read is raised in its piece's
    turn.  If the generator is closed early, it waits for the reads that have begun, and leaves no thread behind.
    """
    count, end = -(-size // piece), first + size
    if depth < 1 or count < 2:
        yield from _one_by_one(source, name, range(first, end, piece), end)
        return
    starts = iter(range(first, end, piece))
    running: deque[tuple[Future[None], memoryview]] = deque()
    pool = ThreadPoolExecutor(min(depth, count), thread_name_prefix="ckptsync-ahead")

    def begin(buffer: bytearray, start: int) -> None:
        out = memoryview(buffer)[: min(piece, end - start)]
        running.append((pool.submit(source.read_into, name, start, out), out))

    try:
        for _, start in zip(range(depth + 1), starts, strict=False):
            begin(bytearray(piece), start)
        while running:
            future, out = running.popleft()
            future.result()
            yield out
            for start in starts:
                begin(out.obj, start)  # type: ignore[arg-type]  # typeshed does not say that it is what the view was made of
                break
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def stream(source: Reads, extent: Extent, buffer: memoryview, sink: Callable[[memoryview], None]) -> None:
    """Call ``sink`` with the bytes of ``extent``, front to back, each time with as many as ``buffer`` holds, except for the last.

    The buffer is small, so that it stays in the processor's cache between receiving, digesting and writing.  A store with a method
    ``stream`` answers a large range in pieces while the rest is on its way; others are read buffer by buffer.  Raises as `Store.read_into`
    does; an error of ``sink`` is raised unchanged.  No byte is given twice.
    """
    if (own := getattr(source, "stream", None)) is not None:
        own(extent, buffer, sink)
        return
    end = extent.start + extent.size
    for at in range(extent.start, end, len(buffer)):
        piece = buffer[: min(len(buffer), end - at)]
        source.read_into(extent.file, at, piece)
        sink(piece)


def checked(chunks: Iterable[memoryview], name: str, digest: str) -> Iterator[memoryview]:
    """Yield the chunks; raise Corrupt after the last one if their BLAKE3 is not ``digest``, so that a write of them never succeeds."""
    found = blake3()
    for chunk in chunks:
        found.update(chunk)
        yield chunk
    if found.hexdigest() != digest:
        raise Corrupt(f"{name}: digest {found.hexdigest()[:16]}…, recorded {digest[:16]}…")


def _one_by_one(source: Reads, name: str, starts: range, end: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(starts.step, end - starts.start)))
    for start in starts:
        out = buffer[: min(starts.step, end - start)]
        source.read_into(name, start, out)
        yield out
