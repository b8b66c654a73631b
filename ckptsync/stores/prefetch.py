"""Remote files: combine small reads into one request, and fetch expected ranges in advance.

Nothing here changes what is read, only when and in how many requests. Memory is bounded; what was
let go of is fetched again.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import itemgetter

from ckptsync.errors import CkptsyncError, without_frames
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import unwrapped
from ckptsync.stores.posix.store import PosixStore
from ckptsync.tensors import Extent, Files
from ckptsync.threads import ThreadPool

MEMORY = 40 << 20  # bytes that are kept
LARGE = 3 << 20  # of a read that is a request of its own, into the reader's memory
NEAR = 128 << 10  # bytes between two ranges that cost less than another request
# of a read of which nothing is known: formats look at ends, then a little before them
BEFORE, AROUND = (64 << 10, 256 << 10)
LEAST, MOST = 64 << 10, 8 << 20  # of a request that takes in what will be read next
THREADS = 16
_MOST_FREE = 4

# where a piece starts and ends, and how many of its bytes will be read
_Cut = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Piece:
    """Bytes of a file, or their request.

    ``left``: so many of them will be read yet, by what was foreseen. ``users`` are reading it, or
    fetching it.
    """

    start: int
    end: int
    left: int = 0
    users: int = 0
    is_dropped: bool = False
    data: Future[memoryview] = field(default_factory=Future)


class PrefetchedFiles:
    """``files``, read in larger pieces and earlier. Any number of threads may read."""

    def __init__(self, files: Files, memory: int = MEMORY, threads: int = THREADS) -> None:
        self._files, self._sizes = files, files.sizes()
        self._memory, self._threads = memory, threads
        self._pool: ThreadPool | None = None
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], _Piece] = OrderedDict()  # used last at the end
        self._starts: dict[str, list[int]] = {}
        self._bytes = 0
        self._free: list[mmap.mmap] = []
        self._reach = 0
        self._queue: deque[Extent] = deque()
        # bytes of those that are fetched because they were expected
        self._unread: dict[tuple[str, int], int] = {}
        self._cuts: dict[str, list[_Cut]] = {}  # of files of which all is known

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if out.nbytes >= LARGE or start + out.nbytes > self._sizes.get(name, 0):
            self._files.read_into(name, start, out)
            return
        with self._lock:
            piece, is_new = self._piece(Extent(name, start, out.nbytes), self._around)
            piece.users += 1 + is_new
            if self._unread.pop((name, piece.start), 0):
                self._fetch_expected()  # since one more of what was expected is being read
        if is_new:
            self._fetch(name, piece)
        try:
            data = piece.data.result()
            if out.nbytes:
                out.cast("B")[:] = data[start - piece.start : start - piece.start + out.nbytes]
        finally:
            self._done_with(name, piece, out.nbytes)

    def expect(self, extents: Iterable[Extent]) -> None:
        """Fetch the small ones of these extents in advance.

        They are read next, in about this order.
        """
        with self._lock:
            self._queue.extend(
                e
                for e in extents
                if 0 < e.size < LARGE and e.start + e.size <= self._sizes.get(e.file, 0)
            )
            self._fetch_expected()

    def foresee(self, reads: Iterable[tuple[Extent, int]]) -> None:
        """Plan requests from all the reads that follow, each with its place in the output.

        A request also reads bytes that follow in its file, if they are read soon.
        """
        by_file: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for extent, when in reads:
            by_file[extent.file].append((extent.start, extent.start + extent.size, when))
        reach = min(MOST, max(LEAST, self._memory // 4 // max(1, len(by_file))))
        cuts = {name: _cut(sorted(ranges), reach, self._memory) for name, ranges in by_file.items()}
        with self._lock:
            self._cuts, self._reach = cuts, reach
            self._free.clear()
            self._queue.clear()

    def close(self) -> None:
        """Stop fetching; nothing is read afterwards."""
        with self._lock:
            self._queue.clear()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _piece(self, extent: Extent, new: Callable[[Extent], _Piece]) -> tuple[_Piece, bool]:
        """Return the piece that has these bytes, and whether it is new.

        The caller fetches a new piece.
        """
        name, start, end = extent.file, extent.start, extent.start + extent.size
        starts = self._starts.setdefault(name, [])
        at = bisect_right(starts, start)
        for first in reversed(starts[max(0, at - 2) : at]):
            piece = self._held[name, first]
            if end <= piece.end:
                self._held.move_to_end((name, first))
                return piece, False
        piece = new(extent)
        if (name, piece.start) in self._held:
            self._drop((name, piece.start))
        self._starts.setdefault(name, []).insert(
            bisect_left(self._starts[name], piece.start), piece.start
        )
        self._held[name, piece.start] = piece
        self._bytes += piece.end - piece.start
        while self._bytes > self._memory and len(self._held) > 1:
            self._drop(next(iter(self._held)))
        return piece, True

    def _around(self, extent: Extent) -> _Piece:
        """Return a piece for a read that was not expected."""
        if self._cuts or extent.size >= AROUND:
            return self._along(extent)
        end = self._sizes[extent.file]
        start = max(0, min(extent.start - BEFORE, end - AROUND))
        return _Piece(start, min(end, max(extent.start + extent.size, start + AROUND)))

    def _along(self, extent: Extent) -> _Piece:
        """Return a piece with what is foreseen to follow."""
        start, end = extent.start, extent.start + extent.size
        cuts = self._cuts.get(extent.file, [])
        at = bisect_right(cuts, start, key=itemgetter(0)) - 1
        return _Piece(*cuts[at]) if at >= 0 and end <= cuts[at][1] else _Piece(start, end)

    def _done_with(self, name: str, piece: _Piece, count: int = 0) -> None:
        """Let a piece of which nothing will be read any more make room."""
        with self._lock:
            piece.left -= count
            piece.users -= 1
            if count and piece.left == 0 and not piece.is_dropped:
                self._drop((name, piece.start))
            elif piece.is_dropped:
                self._recycle(piece)

    def _drop(self, key: tuple[str, int]) -> None:
        piece = self._held.pop(key)
        piece.is_dropped = True
        self._bytes -= piece.end - piece.start
        starts = self._starts[key[0]]
        del starts[bisect_left(starts, key[1])]
        self._unread.pop(key, None)
        self._recycle(piece)

    def _recycle(self, piece: _Piece) -> None:
        """Keep a piece's memory for later pieces, if nobody reads the piece any more.

        New memory costs more than what is read into it.
        """
        if piece.users or not piece.data.done() or piece.data.exception():
            return
        buffer = piece.data.result().obj
        if isinstance(buffer, mmap.mmap) and len(self._free) < _MOST_FREE:
            self._free.append(buffer)

    def _fetch_expected(self) -> None:
        """Have threads fetch what is read next, within bounds. The caller holds the lock."""
        while (
            self._queue
            and len(self._unread) < 4 * self._threads
            and sum(self._unread.values()) < self._memory // 2
        ):
            extent = self._queue.popleft()
            piece, is_new = self._piece(extent, self._along)
            if is_new:
                self._unread[extent.file, piece.start] = piece.end - piece.start
                piece.users += 1
                self._pool = self._pool or ThreadPool(
                    self._threads, thread_name_prefix="ckptsync-piece"
                )
                self._pool.submit(self._fetch, extent.file, piece)

    def _fetch(self, name: str, piece: _Piece) -> None:
        """Read a piece, or give the error to the threads that wait for it.

        The next read there tries again.
        """
        size = piece.end - piece.start
        try:
            if size < AROUND:
                data = memoryview(bytearray(size))
            # the system's own memory: of what several threads let go of, malloc would keep a lot
            else:
                with self._lock:
                    used = self._free.pop() if self._free else None
                data = memoryview(
                    used if used and len(used) >= size else mmap.mmap(-1, max(size, self._reach))
                )[:size]
            self._files.read_into(name, piece.start, data)
        except BaseException as e:  # noqa: BLE001  whatever it is, it is raised to the reader
            with self._lock:
                if not piece.is_dropped:
                    self._drop((name, piece.start))
            piece.data.set_exception(without_frames(e) if isinstance(e, CkptsyncError) else e)
        else:
            piece.data.set_result(data)
        self._done_with(name, piece)


def is_near(source: object) -> bool:
    """Return whether a store or a tree is known to be on a disk of this machine.

    A store may be wrapped in others.
    """
    return isinstance(unwrapped(source), (PosixStore, DirectoryFiles))


def _cut(ranges: Sequence[tuple[int, int, int]], reach: int, horizon: int) -> list[_Cut]:
    """Return the pieces to read: ranges that are near each other, combined.

    Ranges of a piece are read within ``horizon``. A piece is at most ``reach`` long, except for a
    single range.
    """
    cuts: list[_Cut] = []
    first = 0
    for start, end, when in ranges:
        if cuts and abs(when - first) <= horizon:
            begun, ended, count = cuts[-1]
            if start - ended <= NEAR and end - begun <= reach:
                cuts[-1] = (begun, max(ended, end), count + end - start)
                continue
        for at in range(start, end, MOST):
            stop = min(at + MOST, end)
            cuts.append((at, stop, stop - at))
        first = when
    return cuts
