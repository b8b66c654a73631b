"""Download stored files to a local directory, several ranges at once, and verify them.

Bytes are verified between the network and the disk.

A file appears whole, durable and verified, or not at all. Blocks of a large file that an earlier
try has left, and that match their digests, are not downloaded again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass

from ckptsync.digest import Checker, Digests, digested_ranges
from ckptsync.errors import CkptsyncError, Corrupt, NotFound, without_frames
from ckptsync.stores.posix.draft import Draft
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.stream import RangeSource, chunk_room, stream
from ckptsync.tensors import Extent
from ckptsync.threads import ThreadPool

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
        spans, begun = [], 0
        for _, end, _ in digested_ranges(self.digest, 0, self.size):
            if end - begun >= RANGE:
                spans.append((begun, end))
                begun = end
        return [*spans, (begun, self.size)] if begun < self.size or not spans else spans


def download(
    source: RangeSource,
    target: PosixStore,
    files: Iterable[StoredFile],
    threads: int = THREADS,
    on_bytes: OnBytes = lambda _: None,
) -> dict[str, CkptsyncError]:
    """Download all files, with `BUFFER` bytes of memory a thread.

    Return the errors of those that cannot be had, by the name under the directory: Corrupt for
    bytes that do not match their digest, and NotFound. Any other error stops all threads and is
    raised; then every file that has its name is whole. An interrupt stops the threads at the next
    few bytes; the same call continues from there. Any thread calls ``on_bytes``.
    """
    begun: list[_Download] = []
    stopped: list[BaseException] = []  # why all threads end; the first counts
    lock = threading.Lock()
    ranges = ((file, span) for file in files for span in file.ranges())

    def next_range() -> tuple[_Download, tuple[int, int]] | None:
        with lock:
            following = None if stopped else next(ranges, None)
            if following is None:
                return None
            if not begun or begun[-1].file is not following[0]:
                begun.append(_Download(source, target, following[0], count))
            return begun[-1], following[1]

    def count(size: int) -> None:
        if stopped:
            raise _Stopped
        on_bytes(size)

    def work() -> None:
        buffer = chunk_room(BUFFER)
        try:
            while task := next_range():
                task[0].fetch(task[1], buffer)
        except BaseException as e:  # noqa: BLE001 - `download` raises it
            stopped.append(e)

    with ThreadPool(threads, thread_name_prefix="ckptsync-download") as pool:
        try:
            wait([pool.submit(work) for _ in range(threads)])
        except BaseException as e:
            stopped.append(e)
            raise
        finally:
            pool.shutdown()
            for file_download in begun:
                file_download.give_up(
                    file_download.error or (stopped[0] if stopped else _Stopped())
                )
    if stopped:
        raise stopped[0]
    return {
        file_download.file.under: file_download.error
        for file_download in begun
        if file_download.error
    }


class _Download:
    """The download of one file, whose ranges several threads may fetch at once.

    ``error``: why the file cannot be had; its other ranges are then left out.
    """

    def __init__(
        self, source: RangeSource, target: PosixStore, file: StoredFile, on_bytes: OnBytes
    ) -> None:
        self.file = file
        self.error: CkptsyncError | None = None
        self._source, self._target, self._on_bytes = source, target, on_bytes
        self._left, self._threads = len(file.ranges()), 0
        self._lock = threading.Lock()
        self._draft: Draft | None = None

    def fetch(self, span: tuple[int, int], buffer: memoryview) -> None:
        """Fetch one of `StoredFile.ranges`; with the last one the file is there."""
        file = self.file
        with self._lock:
            if self.error:
                return
            if self._draft is None:
                origin = file.digest.digest if file.digest and file.size >= _RESUMABLE else ""
                self._draft = self._target.open_draft(file.under, file.size, origin)
            draft = self._draft
            self._threads += 1
        try:
            for start, end in _missing(draft, file, span, buffer) if draft.left else (span,):
                self._fetch_range(draft, start, end, buffer)
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                draft.commit()
                self._draft = None  # of many small files it would be most of their memory
        except (Corrupt, NotFound) as e:
            self.error = self.error or without_frames(e)
        finally:
            with self._lock:
                self._threads -= 1
                error = None if self._threads else self.error
            if error:
                self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Close a file that is not whole; after an error that may pass, the next try continues."""
        if self._draft:
            self._draft.give_up(error)

    def _fetch_range(self, draft: Draft, start: int, end: int, buffer: memoryview) -> None:
        checker, at = Checker(self.file.name, self.file.digest, start, end), start

        def take(view: memoryview) -> None:
            nonlocal at
            checker.add(view)
            draft.write_at(at, view)
            at += len(view)
            self._on_bytes(len(view))

        stream(self._source, Extent(self.file.name, start, end - start), buffer, take)
        checker.end()


def _missing(
    draft: Draft, file: StoredFile, span: tuple[int, int], buffer: memoryview
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
                draft.read_at(at, piece)
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
