"""Download stored files to a local directory, several ranges at once, and verify them.

One connection rarely fills a network, and a large file must not be read twice. So threads fetch
ranges of whole digest blocks, and each block is compared with its digest between the network and
the disk. A file appears whole, durable and verified, or not at all. Blocks that an earlier try has
written, and that match their digests, are not downloaded again.
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
# bytes of a file below which downloading it again is faster than checking what is there of it
_RESUMABLE = 256 << 10

OnBytes = Callable[[int], object]
"""Is called with the number of bytes that have just arrived."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file ``name`` of a store, and its name ``under`` the target directory.

    Without a ``digest`` only its size is checked.
    """

    name: str
    under: str
    size: int
    digest: Digests | None

    def ranges(self) -> list[tuple[int, int]]:
        """Return ranges (start, end) of about `RANGE` bytes, each of whole digest blocks.

        An empty file has one range, too.
        """
        if not self.digest:
            return [
                (first, min(first + RANGE, self.size))
                for first in range(0, max(1, self.size), RANGE)
            ]
        ranges, start = [], 0
        for _, end, _ in digested_ranges(self.digest, 0, self.size):
            if end - start >= RANGE:
                ranges.append((start, end))
                start = end
        return [*ranges, (start, self.size)] if start < self.size or not ranges else ranges


def download(
    source: RangeSource,
    target: PosixStore,
    files: Iterable[StoredFile],
    threads: int = THREADS,
    on_bytes: OnBytes = lambda _: None,
) -> dict[str, CkptsyncError]:
    """Download all files, with `BUFFER` bytes of memory a thread; return errors by `under`.

    Only Corrupt (bytes that do not match their digest) and NotFound are returned; the other files
    are whole then. Any other error stops all threads and is raised; then every file that has its
    name is whole. An interrupt stops the threads at the next few bytes; the same call continues
    from there.

    ``on_bytes`` is called by any thread with the number of bytes that have just arrived.
    """
    downloads: list[_Download] = []
    stopped: list[BaseException] = []  # why all threads end; the first counts
    lock = threading.Lock()
    ranges = ((file, span) for file in files for span in file.ranges())

    def take_range() -> tuple[_Download, tuple[int, int]] | None:
        """Return the next range and its file's download; None at the end, or after an error."""
        with lock:
            task = None if stopped else next(ranges, None)
            if task is None:
                return None
            file, span = task
            if not downloads or downloads[-1].file is not file:
                downloads.append(_Download(source, target, file, count))
            return downloads[-1], span

    def count(size: int) -> None:
        """Count bytes that arrived; raise _Stopped after another thread's error."""
        if stopped:
            raise _Stopped
        on_bytes(size)

    def work() -> None:
        """Fetch ranges until none is left; note an error, which stops all threads."""
        buffer = chunk_room(BUFFER)
        try:
            while task := take_range():
                file_download, span = task
                file_download.fetch(span, buffer)
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
            for file_download in downloads:
                file_download.give_up(
                    file_download.error or (stopped[0] if stopped else _Stopped())
                )
    if stopped:
        raise stopped[0]
    return {
        file_download.file.under: file_download.error
        for file_download in downloads
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
        self._ranges_left, self._threads = len(file.ranges()), 0
        self._lock = threading.Lock()
        self._draft: Draft | None = None

    def fetch(self, span: tuple[int, int], buffer: memoryview) -> None:
        """Fetch one of `StoredFile.ranges`; publish the file after its last one.

        The first call makes the draft. What an earlier try wrote is checked, not fetched. Nothing
        is fetched after an error. Corrupt and NotFound become `error`; other errors are raised.
        """
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
            for start, end in (
                _missing_ranges(draft, file, span, buffer) if draft.initial_size else (span,)
            ):
                self._fetch_range(draft, start, end, buffer)
            with self._lock:
                self._ranges_left -= 1
                is_last = not self._ranges_left
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
        """Close a file that is not whole; do nothing if none was begun.

        The next try continues it, unless ``error`` is final (`Draft.give_up`).
        """
        if self._draft:
            self._draft.give_up(error)

    def _fetch_range(self, draft: Draft, start: int, end: int, buffer: memoryview) -> None:
        """Fetch the bytes from ``start`` to ``end``, and write them to the draft.

        Raise Corrupt at the first block that does not match its digest; earlier pieces of that
        block are written already.
        """
        checker, position = Checker(self.file.name, self.file.digest, start, end), start

        def write(view: memoryview) -> None:
            """Check the next bytes, write them to the draft, and count them."""
            nonlocal position
            checker.add(view)
            draft.write_at(position, view)
            position += len(view)
            self._on_bytes(len(view))

        stream(self._source, Extent(self.file.name, start, end - start), buffer, write)
        checker.end()


def _missing_ranges(
    draft: Draft, file: StoredFile, span: tuple[int, int], buffer: memoryview
) -> Iterator[tuple[int, int]]:
    """Yield those parts of a range, of whole blocks, that an earlier try has not written.

    A block counts as written if its bytes match its digest.
    """
    assert file.digest, "without a digest a draft has no origin, so nobody has written to it before"
    first = span[0]
    for start, end, _ in digested_ranges(file.digest, *span):
        checker = Checker(file.name, file.digest, start, end)
        try:
            for position in range(start, end, len(buffer)):
                piece = buffer[: min(len(buffer), end - position)]
                draft.read_at(position, piece)
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
