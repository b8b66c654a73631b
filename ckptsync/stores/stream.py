"""Read stored files from front to back, and compare them with recorded BLAKE3 digests.

Files are larger than memory, and stores answer slowly. So threads read some pieces ahead into a few
buffers, which are used again, and the consumer digests each piece while the next ones arrive. Views
of pieces are valid until the next one. No read continues after `progress_signs.announce_shutdown`.
`verified`, `has_same_bytes`, `create_same` and `StoredCopy` are how every package compares bytes
with a digest.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from blake3 import blake3

from ckptsync.errors import CkptsyncError, Corrupt, Exists, NotFound
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store
from ckptsync.tensors import Extent
from ckptsync.threads import ThreadPool

C = TypeVar("C", bound=Chunk)
PIECE = 8 << 20  # bytes
DEPTH = 4  # pieces that are read ahead
_COMPARED = 4 << 20  # bytes of a piece of a file that is compared with a digest


class RangeSource(Protocol):
    """A store, or the files of a checkpoint: whatever ranges can be read from."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise NotFound, or Corrupt if the file ends before."""
        ...


def chunk_room(size: int) -> memoryview:
    """Return new memory of ``size`` bytes, aligned for direct writes to a disk."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def read_ahead(
    source: RangeSource,
    name: str,
    size: int,
    piece: int = PIECE,
    depth: int = DEPTH,
    *,
    first: int = 0,
) -> Generator[memoryview, None, None]:
    """Yield ``size`` bytes from byte ``first`` on, in pieces, while threads read ahead.

    Memory: ``depth + 1`` buffers of ``piece`` bytes. With a ``depth`` of 0, or one piece, no thread
    is started. A piece is valid until the next. An error of a read is raised when its piece would
    be yielded; Transient after `progress_signs.announce_shutdown`. If the generator is closed
    early, it waits for the reads that have begun, and leaves no thread behind.

    Args:
        source: where to read.
        name: the file.
        size: bytes in all.
        piece: bytes of a piece, at most.
        depth: pieces that threads read in advance.
        first: the first byte.

    """
    count, end = -(-size // piece), first + size
    if depth < 1 or count < 2:
        buffer = chunk_room(min(piece, size))
        for start in range(first, end, piece):
            progress_signs.check_shutdown(name)
            out = buffer[: min(piece, end - start)]
            source.read_into(name, start, out)
            yield out
        return
    starts = iter(range(first, end, piece))
    running: deque[tuple[Future[None], memoryview]] = deque()
    pool = ThreadPool(min(depth, count), thread_name_prefix="ckptsync-ahead")

    def start_read(buffer: bytearray, start: int) -> None:
        """Have a thread fill a buffer from byte ``start`` on."""
        out = memoryview(buffer)[: min(piece, end - start)]
        running.append((pool.submit(source.read_into, name, start, out), out))

    try:
        for _, start in zip(range(depth + 1), starts, strict=False):
            start_read(bytearray(piece), start)
        while running:
            progress_signs.check_shutdown(name)
            future, out = running.popleft()
            future.result()
            yield out
            for start in starts:
                start_read(out.obj, start)  # type: ignore[arg-type]  # typeshed does not say that it is what the view was made of
                break
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def stream(
    source: RangeSource, extent: Extent, buffer: memoryview, sink: Callable[[memoryview], None]
) -> None:
    """Call ``sink`` with the bytes of ``extent``, front to back, a ``buffer`` at a time.

    The buffer is small, so that it stays in the processor's cache between receiving, digesting and
    writing. A store with a method ``stream`` answers a large range in pieces as they arrive; others
    are read buffer by buffer. Raise as `Store.read_into`; an error of ``sink`` is raised unchanged.
    No byte is passed twice.
    """
    if (stream_extent := getattr(source, "stream", None)) is not None:
        stream_extent(extent, buffer, sink)
        return
    end = extent.start + extent.size
    for start in range(extent.start, end, len(buffer)):
        piece = buffer[: min(len(buffer), end - start)]
        source.read_into(extent.file, start, piece)
        sink(piece)


def verified(
    chunks: Iterable[C], name: str, digest: str, error: CkptsyncError | None = None
) -> Iterator[C]:
    """Yield the chunks; after the last one raise Corrupt, or ``error``, if the digest differs.

    A write of these chunks never succeeds with other bytes.
    """
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk
    if hasher.hexdigest() != digest:
        raise error or Corrupt(
            f"{name}: checksum {hasher.hexdigest()[:16]}…, recorded {digest[:16]}…"
        )


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """The chunks of a stored file, to be written under another name.

    A write that failed can read them again. After the last chunk they raise Corrupt, or ``error``,
    if they do not have this ``digest``.
    """

    source: RangeSource
    name: str
    size: int
    digest: str
    error: CkptsyncError | None = None

    def __iter__(self) -> Iterator[memoryview]:
        chunks = read_ahead(self.source, self.name, self.size, _COMPARED, 1)
        return verified(chunks, self.name, self.digest, self.error)


def digest_of(chunks: Iterable[Chunk]) -> str:
    """Return the BLAKE3 of all chunks together, 64 hex digits."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def stored_digest(source: RangeSource, name: str, size: int) -> str:
    """Read ``size`` bytes of a file; return their BLAKE3. Raise what reading raises."""
    return digest_of(read_ahead(source, name, size, _COMPARED))


def has_same_bytes(
    store: Store,
    name: str,
    size: int,
    digest: str,
    progress: Callable[[int], object] = lambda _: None,
) -> bool | None:
    """Return whether ``name`` holds the bytes of this size and digest; None if it was not found.

    The file is read back if its size is right; ``progress`` is called with the bytes of each piece.
    Errors other than NotFound and Corrupt are raised.
    """
    try:
        if store.size(name) != size:
            return False
        hasher = blake3()
        for chunk in read_ahead(store, name, size, _COMPARED, 1):
            hasher.update(chunk)
            progress(len(chunk))
    except NotFound:
        return None
    except Corrupt:  # it became shorter: somebody is writing it
        return False
    return hasher.hexdigest() == digest


def create_same(store: Store, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> bool:
    """Create a file; return whether the name now has exactly these bytes, new or already there.

    False: the name has other bytes, or was deleted meanwhile. Where the name is taken and the store
    cannot compare, the unread chunks are digested, and the file is read back. Raise StoreError.
    """
    digested = _DigestedChunks(chunks)
    try:
        store.create(name, iter(digested) if isinstance(chunks, Iterator) else digested, about)
    except Exists as e:
        if e.is_same is not None:
            return e.is_same
        for _ in digested:
            pass
        return bool(has_same_bytes(store, name, digested.size, digested.hasher.hexdigest()))
    return True


class _DigestedChunks:
    """Chunks whose digest and size are computed as they are read.

    They begin again if the chunks can be iterated over again.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self.hasher, self.size = blake3(), 0

    def __iter__(self) -> Iterator[Chunk]:
        if not isinstance(self._chunks, Iterator):
            self.hasher, self.size = blake3(), 0
        for chunk in self._chunks:
            self.hasher.update(chunk)
            self.size += memoryview(chunk).nbytes
            yield chunk
