"""Ranges of files that are far away: small reads that lie near each other are one request, and what is expected is fetched beforehand.

Nothing here changes what is read, only when and in how many requests.  Memory is bounded; what was let go of is fetched again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptsync.model import Extent, Files
from ckptsync.stores.posix import PosixStore
from ckptsync.stores.tree import LocalFiles

MEMORY = 48 << 20  # bytes that are kept
LARGE = 3 << 20  # of a read that is a request of its own, into the reader's memory
NEAR = 128 << 10  # bytes between two ranges that cost less than another request
BEFORE, AROUND = 64 << 10, 256 << 10  # of a read of which nothing is known: formats look at ends, then a little before them
LEAST, MOST = 64 << 10, 8 << 20  # of a request that takes in what will be read next
THREADS = 8


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Ranges of one file that will be read, by ``starts``; ``when`` says of each how far in the output (bytes) that will be."""

    starts: Sequence[int]
    ends: Sequence[int]
    when: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Bytes of a file, or their request."""

    start: int
    end: int
    data: Future[memoryview] = field(default_factory=Future)


class Pieces:
    """``files``, read in larger pieces and earlier.  Any number of threads may read."""

    def __init__(self, files: Files, memory: int = MEMORY, threads: int = THREADS) -> None:
        self._files, self._sizes, self._memory, self._threads = files, files.sizes(), memory, threads
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], _Piece] = OrderedDict()  # used last at the end
        self._starts: dict[str, list[int]] = {}
        self._bytes = 0
        self._queue: deque[Extent] = deque()
        self._unread: set[tuple[str, int]] = set()  # fetched because they were expected
        self._foreseen: Mapping[str, Foreseen] = {}
        self._reach, self._horizon = MOST, 0

    def sizes(self) -> Mapping[str, int]:
        """As the files have them."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        if out.nbytes >= LARGE or start + out.nbytes > self._sizes.get(name, 0):
            self._files.read_into(name, start, out)
            return
        with self._lock:
            piece, is_new = self._piece(Extent(name, start, out.nbytes))
            following = self._following(name, piece)
        self._submit(following)
        if is_new:
            self._fetch(name, piece)
        data = piece.data.result()
        if out.nbytes:
            out.cast("B")[:] = data[start - piece.start : start - piece.start + out.nbytes]

    def expect(self, extents: Iterable[Extent]) -> None:
        """These will be read next, in about this order: what is small of them is fetched meanwhile."""
        with self._lock:
            self._queue.extend(e for e in extents if 0 < e.size < LARGE and e.start + e.size <= self._sizes.get(e.file, 0))
            following = self._next()
        self._submit(following)

    def foresee(self, foreseen: Mapping[str, Foreseen]) -> None:
        """All that will be read from now on: requests take in what follows in their file and is wanted soon."""
        with self._lock:
            self._foreseen = foreseen
            self._reach = min(MOST, max(LEAST, self._memory // 2 // max(1, len(foreseen))))
            self._horizon = self._memory
            self._queue.clear()

    def close(self) -> None:
        """Stop fetching; nothing is read afterwards."""
        with self._lock:
            self._queue.clear()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _piece(self, wanted: Extent) -> tuple[_Piece, bool]:
        """The piece that has these bytes; and whether it must be fetched, by whoever asked."""
        name, start, end = wanted.file, wanted.start, wanted.start + wanted.size
        starts = self._starts.setdefault(name, [])
        at = bisect_right(starts, start)
        for found in reversed(starts[max(0, at - 2) : at]):
            piece = self._held[name, found]
            if end <= piece.end:
                self._held.move_to_end((name, found))
                return piece, False
        piece = self._new(wanted)
        if (name, piece.start) in self._held:
            self._drop((name, piece.start))
        self._starts.setdefault(name, []).insert(bisect_left(self._starts[name], piece.start), piece.start)
        self._held[name, piece.start] = piece
        self._bytes += piece.end - piece.start
        while self._bytes > self._memory and len(self._held) > 1:
            self._drop(next(iter(self._held)))
        return piece, True

    def _new(self, wanted: Extent) -> _Piece:
        start, end = wanted.start, wanted.start + wanted.size
        known = self._foreseen.get(wanted.file)
        at = bisect_right(known.starts, start) - 1 if known else -1
        if known and at >= 0 and start < known.ends[at]:
            return _Piece(start, self._end(known, at, start, end))
        if known or wanted.size >= AROUND:
            return _Piece(start, end)
        start = max(0, min(start - BEFORE, self._sizes[wanted.file] - AROUND))
        return _Piece(start, min(self._sizes[wanted.file], max(end, start + AROUND)))

    def _end(self, known: Foreseen, at: int, start: int, end: int) -> int:
        """Of a piece from ``start``, in or before the range ``at``: as far as what follows is near, and wanted soon."""
        most = start + self._reach
        end = max(end, min(known.ends[at], most))
        for behind in range(at + 1, len(known.starts)):
            is_far = known.starts[behind] - end > NEAR or abs(known.when[behind] - known.when[at]) > self._horizon
            if is_far or end < known.ends[behind - 1] or max(end, known.ends[behind]) > most:
                break
            end = max(end, known.ends[behind])
        return end

    def _drop(self, key: tuple[str, int]) -> None:
        piece = self._held.pop(key)
        self._bytes -= piece.end - piece.start
        starts = self._starts[key[0]]
        del starts[bisect_left(starts, key[1])]
        self._unread.discard(key)

    def _following(self, name: str, piece: _Piece) -> list[tuple[str, _Piece]]:
        """What to fetch now that one more of what was expected is being read."""
        if (name, piece.start) not in self._unread:
            return []
        self._unread.discard((name, piece.start))
        return self._next()

    def _next(self) -> list[tuple[str, _Piece]]:
        found: list[tuple[str, _Piece]] = []
        while self._queue and len(self._unread) < 4 * self._threads:
            wanted = self._queue.popleft()
            piece, is_new = self._piece(wanted)
            if is_new:
                self._unread.add((wanted.file, piece.start))
                found.append((wanted.file, piece))
        return found

    def _submit(self, pieces: Sequence[tuple[str, _Piece]]) -> None:
        if pieces:
            with self._lock:
                self._pool = self._pool or ThreadPoolExecutor(self._threads, thread_name_prefix="ckptsync-piece")
        for name, piece in pieces:
            assert self._pool
            self._pool.submit(self._fetch, name, piece)

    def _fetch(self, name: str, piece: _Piece) -> None:
        """An error is raised to whoever waits for the piece, and whoever wants it next asks again."""
        held = memoryview(bytearray(piece.end - piece.start))
        try:
            self._files.read_into(name, piece.start, held)
        except BaseException as e:  # noqa: BLE001  whatever it is, it is raised where the bytes are wanted
            with self._lock:
                if self._held.get((name, piece.start)) is piece:
                    self._drop((name, piece.start))
            piece.data.set_exception(e)
        else:
            piece.data.set_result(held)


def fetched(files: Files, source: object) -> Files:
    """``files``, in pieces unless the store or tree that they are of is on a disk of this machine."""
    return files if is_near(source) else Pieces(files)


def is_near(source: object) -> bool:
    """Whether a store, or a tree, is on a disk of this machine, as far as it knows."""
    return isinstance(source, (PosixStore, LocalFiles))


def foreseen(reads: Iterable[tuple[Extent, int]]) -> dict[str, Foreseen]:
    """By file, of what is read and how far in the output it goes."""
    by_file: dict[str, list[tuple[int, int, int]]] = {}
    for extent, when in reads:
        by_file.setdefault(extent.file, []).append((extent.start, extent.start + extent.size, when))
    return {file: Foreseen(*map(list, zip(*sorted(rows), strict=True))) for file, rows in by_file.items()}
