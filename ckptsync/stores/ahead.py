"""A stored file from front to back, read ahead by threads: for stores whose answers take their time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from blake3 import blake3

from ckptsync.errors import Corrupt

PIECE = 8 << 20
DEPTH = 4


class Reads(Protocol):
    """A store, or files."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``."""
        ...


def ahead(
    source: Reads, name: str, size: int, piece: int = PIECE, depth: int = DEPTH, *, first: int = 0
) -> Generator[memoryview, None, None]:
    """``size`` bytes from byte ``first`` on, in pieces, while the next ``depth`` of them are being read; ``depth + 1`` buffers are all the memory.

    Use each piece before asking for the next: its buffer is used again.  What a read raises is raised as it is, in its piece's turn.  Closed
    early (or collected), it waits for the reads that have begun; no thread stays behind.
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


def checked(chunks: Iterable[memoryview], name: str, digest: str) -> Iterator[memoryview]:
    """The chunks; raises Corrupt after the last one if their BLAKE3 is not ``digest``: so nobody's write of them ends well."""
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
