"""Download stored files to a directory of this machine: several ranges at once, each verified between the network and the disk.

A file appears whole, durable and verified, or not at all.  Blocks of a large file that an earlier try has left, and that match their digests, are
not downloaded again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from ckptsync.errors import CkptsyncError, Corrupt, NotFound
from ckptsync.model import Extent
from ckptsync.stores.checksum import Checker, Digests, checkable_ranges, checker
from ckptsync.stores.posix.draft import Placing
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.stream import Reads, stream
from ckptsync.stores.writing import chunk_room

RANGE = 32 << 20  # bytes of a request: many small ones cost a server more
BUFFER = 1 << 20  # bytes of memory a thread
THREADS = 8
_RESUMABLE = 256 << 10  # bytes of a file below which downloading it again is faster than looking for what is left of it

OnBytes = Callable[[int], object]
"""Is called with the number of bytes that have just arrived."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file ``name`` of a store, and its name ``under`` the directory.  Without a ``digest`` only its size is checked."""

    name: str
    under: str
    size: int
    digest: Digests | None

    def ranges(self) -> list[tuple[int, int]]:
        """Return ranges of about `RANGE` bytes, each of whole blocks; an empty file has one, too."""
        if not self.digest:
            return [(start, min(start + RANGE, self.size)) for start in range(0, max(1, self.size), RANGE)]
        found, begun = [], 0
        for _, end in checkable_ranges(self.digest, 0, self.size):
            if end - begun >= RANGE:
                found.append((begun, end))
                begun = end
        return [*found, (begun, self.size)] if begun < self.size or not found else found


OnFailure = Callable[[StoredFile, CkptsyncError], object]
"""Is called for a file whose bytes are wrong or missing."""


def download(
    source: Reads,
    target: PosixStore,
    files: Iterable[StoredFile],
    threads: int = THREADS,
    on_bytes: OnBytes = lambda _: None,
    *,
    on_failure: OnFailure | None = None,
) -> None:
    """Download all files, with `BUFFER` bytes of memory a thread.  Any thread calls ``on_bytes``.

    Raises Corrupt for bytes that do not match their digest, NotFound, StoreError; then all threads stop, and every file that has its name is
    whole.  With ``on_failure``, which one thread at a time calls, Corrupt and NotFound concern their file alone.  An interrupt stops the threads
    at the next few bytes; the same call continues from there.
    """
    downloading = _Downloading(source, target, files, on_bytes, on_failure)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptsync-download") as pool:
        try:
            wait([pool.submit(downloading.work) for _ in range(threads)])
        except BaseException as e:
            downloading.stop(e)
            raise
        finally:
            pool.shutdown()
            downloading.give_up()
    downloading.end()


class FileDownload:
    """The download of one file, whose ranges several threads may fetch at once.  Raises Corrupt, NotFound, StoreError."""

    def __init__(self, source: Reads, target: PosixStore, file: StoredFile) -> None:
        self.file = file
        self._source, self._target = source, target
        self._left = len(file.ranges())
        self._lock = threading.Lock()
        self._placing: Placing | None = None

    def fetch(self, span: tuple[int, int], buffer: memoryview, on_bytes: OnBytes) -> bool:
        """Fetch one of `StoredFile.ranges`; return whether it was the last one: then the file is there."""
        placing, file = self._begun(), self.file
        for start, end in _missing(placing, file, span, buffer) if placing.left else (span,):
            sink = _Sink(placing, checker(file.name, file.digest, start, end), start, on_bytes)
            stream(self._source, Extent(file.name, start, end - start), buffer, sink.take)
            sink.checker.end()
        placing.let_go(span[0], span[1] - span[0])
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            placing.commit()
        return is_last

    def give_up(self, error: BaseException) -> None:
        """Close the file; after an error that may pass, leave what the next try can use."""
        if self._placing:
            self._placing.give_up(error)

    def _begun(self) -> Placing:
        with self._lock:
            if self._placing is None:
                file = self.file
                origin = file.digest.digest if file.digest and file.size >= _RESUMABLE else ""
                self._placing = self._target.place(file.under, file.size, origin)
            return self._placing


class _Sink:
    """Checks the bytes that arrive, and writes them to the file."""

    def __init__(self, placing: Placing, checker: Checker, start: int, on_bytes: OnBytes) -> None:
        self.checker = checker
        self._placing, self._at, self._on_bytes = placing, start, on_bytes

    def take(self, view: memoryview) -> None:
        self.checker.add(view)
        self._placing.write_at(self._at, view)
        self._at += len(view)
        self._on_bytes(len(view))


def _missing(placing: Placing, file: StoredFile, span: tuple[int, int], buffer: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range, of whole blocks, that an earlier try has not left."""
    if file.digest is None:
        yield span
        return
    first = span[0]
    for start, end in checkable_ranges(file.digest, *span):
        if _is_there(placing, file.name, file.digest, (start, end), buffer):
            if first < start:
                yield first, start
            first = end
    if first < span[1]:
        yield first, span[1]


def _is_there(placing: Placing, name: str, digest: Digests, block: tuple[int, int], buffer: memoryview) -> bool:
    found = checker(name, digest, *block)
    try:
        for at in range(*block, len(buffer)):
            piece = buffer[: min(len(buffer), block[1] - at)]
            placing.read_at(at, piece)
            found.add(piece)
        found.end()
    except Corrupt:
        return False  # expected: it has to be downloaded
    return True


_Range = tuple[FileDownload, tuple[int, int]]


class _Stopped(Exception):
    """Another thread has failed, or the caller was interrupted."""


class _Downloading:
    """The work of all threads: each fetches the next range until there is none."""

    def __init__(
        self,
        source: Reads,
        target: PosixStore,
        files: Iterable[StoredFile],
        on_bytes: OnBytes,
        on_failure: OnFailure | None,
    ) -> None:
        self._source, self._target, self._on_bytes, self._on_failure = source, target, on_bytes, on_failure
        self._ranges = self._all_ranges(files)
        self._lock = threading.Lock()
        self._open: dict[FileDownload, int] = {}  # by how many threads
        self._failed: dict[FileDownload, CkptsyncError] = {}
        self._error: BaseException | None = None

    def work(self) -> None:
        """Fetch ranges until none is left, or a thread has failed."""
        try:
            buffer = chunk_room(BUFFER)
            while found := self._next():
                self._fetch(*found, buffer)
        except BaseException as e:  # noqa: BLE001  raised by `end`
            self.stop(e)

    def stop(self, error: BaseException) -> None:
        """Stop all threads; `end` raises the first error."""
        with self._lock:
            self._error = self._error or error

    def give_up(self) -> None:
        """Close the files that are not whole, after the last thread has ended."""
        for one in self._open:
            one.give_up(self._failed.get(one) or self._error or _Stopped())

    def end(self) -> None:
        """Raise the first error."""
        if self._error:
            raise self._error

    def _fetch(self, one: FileDownload, span: tuple[int, int], buffer: memoryview) -> None:
        is_there = False
        try:
            is_there = one.fetch(span, buffer, self._count)
        except (Corrupt, NotFound) as e:
            if not self._on_failure:
                raise
            self._fail(one, e, self._on_failure)
        finally:
            self._leave(one, is_there=is_there)

    def _fail(self, one: FileDownload, error: CkptsyncError, on_failure: OnFailure) -> None:
        with self._lock:
            if one not in self._failed:
                self._failed[one] = error
                on_failure(one.file, error)

    def _leave(self, one: FileDownload, *, is_there: bool) -> None:
        """Note that a thread has left a file; the last one to leave a failed file closes it."""
        with self._lock:
            self._open[one] -= 1
            failed = self._failed.get(one) if not self._open[one] else None
            if is_there or failed:
                del self._open[one]
        if failed:
            one.give_up(failed)

    def _count(self, count: int) -> None:
        if self._error:
            raise _Stopped
        self._on_bytes(count)

    def _next(self) -> _Range | None:
        with self._lock:
            for one, span in self._ranges if not self._error else ():
                if one not in self._failed:
                    self._open[one] = self._open.get(one, 0) + 1
                    return one, span
        return None

    def _all_ranges(self, files: Iterable[StoredFile]) -> Iterator[_Range]:
        """Yield the ranges of all files; `_next` advances it under the lock."""
        for file in files:
            one = FileDownload(self._source, self._target, file)
            for span in file.ranges():
                yield one, span
