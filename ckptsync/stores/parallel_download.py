"""Download stored files to a local directory, several ranges at once, and verify them.

Bytes are verified between the network and the disk.

A file appears whole, durable and verified, or not at all. Blocks of a large file that an earlier
try has left, and that match their digests, are not downloaded again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from ckptsync.digest import Checker, Digests, digested_ranges
from ckptsync.errors import CkptsyncError, Corrupt, NotFound
from ckptsync.stores.posix.part_file import Draft
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.stream import Reads, chunk_room, stream
from ckptsync.tensors import Extent

RANGE = 32 << 20  # bytes of a request: many small ones cost a server more
BUFFER = 1 << 20  # bytes of memory a thread
THREADS = 8
# bytes of a file below which downloading it again is faster than looking for what is left of it
_RESUMABLE = 256 << 10

OnBytes = Callable[[int], object]
"""Is called with the number of bytes that have just arrived."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file ``name`` of a store, and its name ``under`` the directory.

    Without a ``digest`` only its size is checked.
    """

    name: str
    under: str
    size: int
    digest: Digests | None

    def ranges(self) -> list[tuple[int, int]]:
        """Return ranges of about `RANGE` bytes, each of whole blocks.

        An empty file has one, too.
        """
        if not self.digest:
            return [
                (start, min(start + RANGE, self.size))
                for start in range(0, max(1, self.size), RANGE)
            ]
        found, begun = [], 0
        for _, end, _ in digested_ranges(self.digest, 0, self.size):
            if end - begun >= RANGE:
                found.append((begun, end))
                begun = end
        return [*found, (begun, self.size)] if begun < self.size or not found else found


def download(
    source: Reads,
    target: PosixStore,
    files: Iterable[StoredFile],
    threads: int = THREADS,
    on_bytes: OnBytes = lambda _: None,
) -> dict[str, CkptsyncError]:
    """Download all files, with `BUFFER` bytes of memory a thread.

    Return the errors of those that cannot be had.

    These are Corrupt for bytes that do not match their digest, and NotFound, by the name under the
    directory. Any other error stops all threads and is raised; then every file that has its name is
    whole. An interrupt stops the threads at the next few bytes; the same call continues from there.
    Any thread calls ``on_bytes``.
    """
    downloading = _Downloading(source, target, files, on_bytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptsync-download") as pool:
        try:
            wait([pool.submit(downloading.work) for _ in range(threads)])
        except BaseException as e:
            downloading.error = downloading.error or e
            raise
        finally:
            pool.shutdown()
            downloading.give_up()
    if downloading.error:
        raise downloading.error
    return {one.file.under: error for one, error in downloading.failed.items()}


class FileDownload:
    """The download of one file, whose ranges several threads may fetch at once.

    Raises Corrupt, NotFound, StoreError.
    """

    def __init__(self, source: Reads, target: PosixStore, file: StoredFile) -> None:
        self.file = file
        self._source, self._target = source, target
        self._left = len(file.ranges())
        self._lock = threading.Lock()
        self._placing: Draft | None = None

    def fetch(self, span: tuple[int, int], buffer: memoryview, on_bytes: OnBytes) -> bool:
        """Fetch one of `StoredFile.ranges`.

        Return whether it was the last one: then the file is there.
        """
        file = self.file
        with self._lock:
            if self._placing is None:
                origin = file.digest.digest if file.digest and file.size >= _RESUMABLE else ""
                self._placing = self._target.place(file.under, file.size, origin)
            placing = self._placing
        for start, end in _missing(placing, file, span, buffer) if placing.left else (span,):
            self._fetch_range(placing, start, end, buffer, on_bytes)
        placing.drop_cache(span[0], span[1] - span[0])
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

    def _fetch_range(
        self, placing: Draft, start: int, end: int, buffer: memoryview, on_bytes: OnBytes
    ) -> None:
        checker, at = Checker(self.file.name, self.file.digest, start, end), start

        def take(view: memoryview) -> None:
            nonlocal at
            checker.add(view)
            placing.write_at(at, view)
            at += len(view)
            on_bytes(len(view))

        stream(self._source, Extent(self.file.name, start, end - start), buffer, take)
        checker.end()


def _missing(
    placing: Draft, file: StoredFile, span: tuple[int, int], buffer: memoryview
) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range, of whole blocks, that an earlier try has not left."""
    if file.digest is None:
        yield span
        return
    first = span[0]
    for start, end, _ in digested_ranges(file.digest, *span):
        checker = Checker(file.name, file.digest, start, end)
        try:
            for at in range(start, end, len(buffer)):
                piece = buffer[: min(len(buffer), end - at)]
                placing.read_at(at, piece)
                checker.add(piece)
            checker.end()
        except Corrupt:
            continue  # expected: it has to be downloaded
        if first < start:
            yield first, start
        first = end
    if first < span[1]:
        yield first, span[1]


class _Stopped(Exception):
    """Another thread has failed, or the caller was interrupted."""


class _Downloading:
    """The work of all download threads.

    Each thread downloads the next range until there is none, or a thread has an ``error``.
    """

    def __init__(
        self, source: Reads, target: PosixStore, files: Iterable[StoredFile], on_bytes: OnBytes
    ) -> None:
        downloads = (FileDownload(source, target, file) for file in files)
        self._ranges = ((one, span) for one in downloads for span in one.file.ranges())
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._open: dict[FileDownload, int] = {}  # by how many threads
        self.failed: dict[FileDownload, CkptsyncError] = {}
        self.error: BaseException | None = None

    def work(self) -> None:
        buffer = chunk_room(BUFFER)
        try:
            while found := self._next():
                one, span = found
                is_there = False
                try:
                    is_there = one.fetch(span, buffer, self._count)
                except (Corrupt, NotFound) as e:
                    with self._lock:
                        self.failed.setdefault(one, e)
                finally:
                    self._leave(one, is_there=is_there)
        except BaseException as e:  # noqa: BLE001 - `download` raises it
            with self._lock:
                self.error = self.error or e

    def give_up(self) -> None:
        """Close the files that are not whole, after the last thread has ended."""
        for one in self._open:
            one.give_up(self.failed.get(one) or self.error or _Stopped())

    def _next(self) -> tuple[FileDownload, tuple[int, int]] | None:
        with self._lock:
            for one, span in self._ranges if not self.error else ():
                if one not in self.failed:
                    self._open[one] = self._open.get(one, 0) + 1
                    return one, span
        return None

    def _leave(self, one: FileDownload, *, is_there: bool) -> None:
        """Note that a thread has left a file; the last one to leave a failed file closes it."""
        with self._lock:
            self._open[one] -= 1
            failed = self.failed.get(one) if not self._open[one] else None
            if is_there or failed:
                del self._open[one]
        if failed:
            one.give_up(failed)

    def _count(self, count: int) -> None:
        if self.error:
            raise _Stopped
        self._on_bytes(count)
