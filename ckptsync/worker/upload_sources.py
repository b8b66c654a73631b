"""Bytes on their way into a store: this node's files, or what the store has under another name.

A write that fails is tried again, and a file may change while it is read.  So a source is an
iterable that begins anew each time, computes the digest in its first whole pass, and raises at the
end of a pass if the bytes were not those expected: then nothing appears in the store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ckptsync.digest import Digester, block_size, digest
from ckptsync.errors import StoreError, Transient
from ckptsync.records.manifest import FileEntry
from ckptsync.spool.safe_files import clone
from ckptsync.stores import progress_signs, stream
from ckptsync.stores.contract import About, Store
from ckptsync.stores.stream import read_ahead, verified
from ckptsync.threads import ThreadPool
from ckptsync.worker.local_save import (
    AGAIN,
    CHUNK,
    AfterChunk,
    Changed,
    LocalFile,
    ignore_chunk,
    read_chunks,
    undigested_entry,
)

T = TypeVar("T")
R = TypeVar("R")


class UploadSource:
    """A file of this node, as chunks that can be read again; the source of one upload.

    ``entry``: the manifest's entry; it gets the digest at the end of the first whole pass.
    ``about``: what the store needs to know of the upload.  ``position``: bytes that the present
    pass has read.  ``files``: how many files its save has, which decides the size of blocks.
    """

    def __init__(
        self,
        local_file: LocalFile,
        node: str,
        entry: FileEntry | None = None,
        after_chunk: AfterChunk = ignore_chunk,
        files: int = 1,
    ) -> None:
        """Remember the file, and open nothing yet.  ``entry``: None if its digest is unknown."""
        self.entry = entry or undigested_entry(local_file.stat)
        origin = _origin(node, local_file.stat.path, local_file.stat.size, local_file.stat.mtime)
        self.about = About(local_file.stat.size, origin, self._share)
        self._local_file, self._after_chunk, self._files = local_file, after_chunk, files
        self._clone: int | None = None
        self._counted = self.entry.size if self.entry.digest else 0
        self.position = 0

    def __iter__(self) -> Iterator[memoryview]:
        """Begin a new pass: yield the file's bytes from the start.

        Sets ``position``, and calls ``after_chunk`` for each chunk.  If bytes were counted before,
        or were read for the digest of ``entry``, it first calls that with their negative number.
        At the end of the first whole pass ``entry`` gets its digest.  A reflink that `_share` has
        made is read instead of the file, and closed.
        Raises Changed if the file is not the one of the scan, or has not the digest of ``entry``;
        else what `read_chunks` raises.
        """
        self.position = 0
        if self._counted:  # these bytes are read again
            self._count(-self._counted)
        reflink, self._clone = self._clone, None
        try:
            chunks = read_chunks(self._local_file, self._count, reflink)
            if self.entry.digest:
                yield from checked(chunks, self.entry, self._local_file.stat.path)
                return
            size = self._local_file.stat.size
            digester = Digester(size, block_size(size, self._files))
            for chunk in chunks:
                digester.update(chunk)
                yield chunk
            content_digest = digester.result()
            self.entry = FileEntry(
                self.entry.path,
                content_digest.size,
                content_digest.digest,
                content_digest.block_size,
                content_digest.blocks,
                self.entry.mtime,
            )
        finally:
            if reflink is not None:
                os.close(reflink)

    def digested(self) -> FileEntry:
        """Return the entry with its digest; read the file if it has none yet.

        Raises as `__iter__` does.
        """
        if not self.entry.digest:
            for _ in self:
                pass
        return self.entry

    def _share(self, fd: int) -> None:
        """Make the store's file ``fd`` a reflink of this one, and read that in the next pass.

        See `About`.  The file is compared with the scan before and after the pass, so the reflink
        is of that state.  Does nothing where reflinks are not possible.
        """
        source = self._local_file.open()
        try:
            clone(source, fd)
            # not a copy of the descriptor: the store reads behind us to compare, and read-ahead is
            # kept for each open file
            self._clone = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        except OSError:
            # another file system than the store's, or one without reflinks: it is read and written
            return
        finally:
            os.close(source)

    def _count(self, count: int) -> None:
        """Count bytes that were read, or, if negative, that are read again."""
        self._counted += count
        self.position += max(0, count)
        self._after_chunk(count)


class Transfer:
    """Counts the bytes of one upload or repair that are done, of ``total``.  Thread-safe.

    A file's bytes count as done once they are both read and sent.
    """

    def __init__(self, total: int) -> None:
        """Begin with no byte done, of ``total``."""
        self.total = total
        self._lock = threading.Lock()
        self._ended = 0
        self._sources: dict[str, UploadSource | StoreSource] = {}
        self._sent: dict[str, int] = {}

    def restart(self, total: int, unsent: int) -> None:
        """Begin to count anew: of ``total`` bytes, all but ``unsent`` count as done."""
        with self._lock:
            self._sources = {}
            self.total, self._ended = total, total - unsent

    @contextmanager
    def of(self, source: UploadSource | StoreSource) -> Iterator[None]:
        """Count a file's bytes as the store sends them in the block; they count until `end`."""
        path = source.entry.path

        def count(count_sent: int) -> None:
            """Add bytes that the store has sent."""
            with self._lock:
                self._sent[path] += count_sent

        with self._lock:
            self._sources[path], self._sent[path] = source, 0
        with progress_signs.counted_by(count):
            yield

    def end(self, entry: FileEntry) -> None:
        """Count all of a file as done."""
        with self._lock:
            self._ended += entry.size
            self._sources.pop(entry.path, None)

    @property
    def done(self) -> int:
        """Return the bytes that are done, at most ``total``."""
        with self._lock:
            moving = sum(min(s.position, self._sent[path]) for path, s in self._sources.items())
            return min(self._ended + moving, self.total)


class Guarded:
    """Chunks of a file, and a ``check`` of the last moment before the store gives it its name."""

    def __init__(self, chunks: Iterable[memoryview], check: Callable[[], None]) -> None:
        """Remember the arguments; read nothing yet."""
        self._chunks, self._check = chunks, check

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the chunks, then call ``check``; what it raises ends the write without a file."""
        yield from self._chunks
        self._check()


class StoreSource:
    """A file of the store, read to be written under another name of the store.

    ``position``: bytes that the present pass has read.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        entry: FileEntry,
        node: str,
        after_chunk: AfterChunk = ignore_chunk,
    ) -> None:
        """Remember the arguments; read nothing yet.  ``name``: where the store has the bytes."""
        self.about = About(entry.size, _origin(node, entry.digest))
        self.entry = entry
        self.position = 0
        self._store, self._name, self._after_chunk = store, name, after_chunk

    def __iter__(self) -> Iterator[memoryview]:
        """Begin a new pass: yield the stored file's bytes; ``after_chunk`` gets 0 for each chunk.

        Raises Changed at the end if they have not the digest of ``entry``, and StoreError.
        """
        self.position = 0
        for chunk in checked(
            read_ahead(self._store, self._name, self.entry.size, CHUNK, 0), self.entry, self._name
        ):
            yield chunk
            self.position += len(chunk)
            self._after_chunk(0)

    def digested(self) -> FileEntry:
        """Return the entry, which has a digest."""
        return self.entry


def checked(chunks: Iterable[memoryview], entry: FileEntry, name: str) -> Iterator[memoryview]:
    """Yield the chunks; raise Changed after the last one if they are not the bytes of ``entry``."""
    return verified(
        chunks,
        name,
        entry.digest,
        Changed(f"{name}: changed since its snapshot", hint=AGAIN),
    )


def is_stored(
    store: Store, name: str, entry: FileEntry, after_chunk: AfterChunk = ignore_chunk
) -> bool | None:
    """Return whether ``name`` holds the bytes of ``entry``; None if there is no such name.

    Reads the stored file; ``after_chunk`` gets 0 for each chunk.
    """
    return stream.has_same_bytes(store, name, entry.size, entry.digest, lambda _: after_chunk(0))


def _origin(*parts: object) -> str:
    """Return an id of an upload, the same after a restart and never that of another node."""
    return digest("\n".join(map(str, parts)).encode("utf-8", "surrogateescape"))[:32]


class FilePool:
    """Handles ``threads`` files of one save at once.

    When one fails, the others end at their next chunk.  ``after_chunk``: called by one thread at a
    time.  One thread calls `each`, again and again.
    """

    def __init__(self, threads: int, after_chunk: AfterChunk = ignore_chunk) -> None:
        """Make the pool; threads run within `each` only."""
        self.threads = threads
        self.after_chunk = after_chunk
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def end_chunk(self, count: int) -> None:
        """Signal progress to the watchdog, and call ``after_chunk``; used within `each`.

        Raises StoreError or Transient once another file has failed.
        """
        with self._lock:
            self._check()
            progress_signs.sign()
            self.after_chunk(count)

    def each(self, work: Callable[[T], R], items: Sequence[T], threads: int = 0) -> list[R]:
        """Call ``work`` for each item, at most ``threads`` at once; return the results in order.

        Items are begun in their order.  After an error no item is begun, and the first error is
        raised.  No thread runs any more when it returns or raises.  A single thread (``threads`` 1,
        or one item) is the caller's own.
        """
        count = min(threads or self.threads, len(items))
        if count <= 1:
            return [work(item) for item in items]
        results: dict[int, R] = {}
        # one iterator for all: a future for each item would cost more than a small file's digest
        indices, index_lock = iter(range(len(items))), threading.Lock()

        def run() -> None:
            """Work on the next items until none is left or one has failed."""
            while True:
                with index_lock:
                    n = next(indices, None)
                if n is None:
                    return
                try:
                    self._check()
                    results[n] = work(items[n])
                except BaseException as e:
                    with self._lock:
                        self._error = self._error or e
                    raise

        with ThreadPool(count, thread_name_prefix="ckptsync-file") as pool:
            futures = [pool.submit(progress_signs.keep_context(run)) for _ in range(count)]
            try:
                for future in futures:
                    future.result()
            except BaseException as e:  # noqa: BLE001 - raised below, or another that came before it
                with self._lock:
                    self._error = first = self._error or e
                pool.shutdown(cancel_futures=True)
                self._error = None
                raise first from first.__cause__
        return [results[n] for n in range(len(items))]

    def _check(self) -> None:
        """Raise StoreError if another file has failed, Transient if its error was.

        After a Transient error stores keep what was sent of this file.
        """
        if self._error is not None:
            kind = Transient if isinstance(self._error, Transient) else StoreError
            raise kind("cancelled, since another file failed")
