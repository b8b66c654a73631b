"""Remote files: combine small reads into one request, and fetch expected ranges in advance.

Formats read headers and tensors in small pieces, and a store answers each request after a round
trip. So a read fetches a larger piece of the file around it, and threads fetch what the caller says
it will read next. Only when and in how many requests is changed, never what is read. Memory is
bounded; a piece that was dropped is fetched again.
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

MEMORY = 40 << 20  # bytes of all pieces
LARGE = 3 << 20  # bytes of a read that is a request of its own, into the reader's memory
NEAR = 128 << 10  # bytes between two ranges that cost less than another request
# bytes before, and in all, that an unexpected read fetches: formats read ends, then before them
BEFORE, AROUND = (64 << 10, 256 << 10)
LEAST, MOST = 64 << 10, 8 << 20  # bytes of a request that also fetches later reads
THREADS = 16
_MOST_FREE = 4  # buffers

# start and end of a planned piece, and how many of its bytes will be read
_PlannedPiece = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Piece:
    """Bytes of a file, or the request for them.

    ``unread``: how many of them the foreseen reads will still read. ``users``: how many threads are
    reading it, or fetching it. ``is_dropped``: no new read finds it.
    """

    start: int
    end: int
    unread: int = 0
    users: int = 0
    is_dropped: bool = False
    data: Future[memoryview] = field(default_factory=Future)


class PrefetchedFiles:
    """``files``, read in larger pieces and earlier. Any number of threads may read.

    ``memory``: bytes of all pieces together; ``threads``: requests at once.
    """

    def __init__(self, files: Files, memory: int = MEMORY, threads: int = THREADS) -> None:
        self._files, self._sizes = files, files.sizes()
        self._memory, self._threads = memory, threads
        self._pool: ThreadPool | None = None
        self._lock = threading.Lock()
        self._pieces: OrderedDict[tuple[str, int], _Piece] = OrderedDict()  # used last at the end
        self._starts: dict[str, list[int]] = {}
        self._bytes = 0
        self._free: list[mmap.mmap] = []
        self._reach = 0
        self._queue: deque[Extent] = deque()
        # sizes of the pieces that were fetched in advance, and not read since
        self._expected: dict[tuple[str, int], int] = {}
        self._plan: dict[str, list[_PlannedPiece]] = {}  # of files whose reads are all foreseen

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from a piece; fetch it, or wait for its request. Raise what that raises.

        Reads of at least `LARGE` bytes, or beyond a file's end, go to ``files`` directly.
        """
        if out.nbytes >= LARGE or start + out.nbytes > self._sizes.get(name, 0):
            self._files.read_into(name, start, out)
            return
        with self._lock:
            piece, is_new = self._piece(Extent(name, start, out.nbytes), self._piece_around)
            piece.users += 1 + is_new
            if self._expected.pop((name, piece.start), 0):
                self._fetch_expected()  # there is room for one more
        if is_new:
            self._fetch(name, piece)
        try:
            data = piece.data.result()
            if out.nbytes:
                out.cast("B")[:] = data[start - piece.start : start - piece.start + out.nbytes]
        finally:
            self._release(name, piece, out.nbytes)

    def expect(self, extents: Iterable[Extent]) -> None:
        """Have threads fetch these extents in advance, within bounds; return at once.

        They are read next, in about this order. Those that are empty, at least `LARGE` bytes, or
        beyond a file's end are left out.
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

        Nothing is fetched yet. A request also reads bytes that follow in its file, if they are read
        soon. Earlier plans and expected reads are dropped.
        """
        by_file: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for extent, position in reads:
            by_file[extent.file].append((extent.start, extent.start + extent.size, position))
        reach = min(MOST, max(LEAST, self._memory // 4 // max(1, len(by_file))))
        cuts = {
            name: _cut_ranges(sorted(ranges), reach, self._memory)
            for name, ranges in by_file.items()
        }
        with self._lock:
            self._plan, self._reach = cuts, reach
            self._free.clear()
            self._queue.clear()

    def close(self) -> None:
        """Stop fetching, and wait for requests that have begun; no read may follow."""
        with self._lock:
            self._queue.clear()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _piece(self, extent: Extent, make_piece: Callable[[Extent], _Piece]) -> tuple[_Piece, bool]:
        """Return the piece that has these bytes, and whether it is new: the caller then fetches it.

        A new piece comes from ``make_piece``; pieces that were used longest ago may be dropped for
        it. The caller holds the lock.
        """
        name, start, end = extent.file, extent.start, extent.start + extent.size
        starts = self._starts.setdefault(name, [])
        index = bisect_right(starts, start)
        for first in reversed(starts[max(0, index - 2) : index]):
            piece = self._pieces[name, first]
            if end <= piece.end:
                self._pieces.move_to_end((name, first))
                return piece, False
        piece = make_piece(extent)
        if (name, piece.start) in self._pieces:
            self._drop((name, piece.start))
        self._starts.setdefault(name, []).insert(
            bisect_left(self._starts[name], piece.start), piece.start
        )
        self._pieces[name, piece.start] = piece
        self._bytes += piece.end - piece.start
        while self._bytes > self._memory and len(self._pieces) > 1:
            self._drop(next(iter(self._pieces)))
        return piece, True

    def _piece_around(self, extent: Extent) -> _Piece:
        """Return a new piece for a read that was not expected, with bytes around it.

        A read of at least `AROUND` bytes, and any once reads are planned, gets `_planned_piece`.
        """
        if self._plan or extent.size >= AROUND:
            return self._planned_piece(extent)
        end = self._sizes[extent.file]
        start = max(0, min(extent.start - BEFORE, end - AROUND))
        return _Piece(start, min(end, max(extent.start + extent.size, start + AROUND)))

    def _planned_piece(self, extent: Extent) -> _Piece:
        """Return the planned piece that has the extent; without one, a piece of just the extent."""
        start, end = extent.start, extent.start + extent.size
        cuts = self._plan.get(extent.file, [])
        index = bisect_right(cuts, start, key=itemgetter(0)) - 1
        return _Piece(*cuts[index]) if index >= 0 and end <= cuts[index][1] else _Piece(start, end)

    def _release(self, name: str, piece: _Piece, count: int = 0) -> None:
        """End one use of a piece, of which ``count`` bytes were read; takes the lock.

        After its last foreseen read the piece is dropped.
        """
        with self._lock:
            piece.unread -= count
            piece.users -= 1
            if count and piece.unread == 0 and not piece.is_dropped:
                self._drop((name, piece.start))
            elif piece.is_dropped:
                self._recycle(piece)

    def _drop(self, key: tuple[str, int]) -> None:
        """Make a piece unfindable, and recycle its memory if nobody uses it. The lock is held."""
        piece = self._pieces.pop(key)
        piece.is_dropped = True
        self._bytes -= piece.end - piece.start
        starts = self._starts[key[0]]
        del starts[bisect_left(starts, key[1])]
        self._expected.pop(key, None)
        self._recycle(piece)

    def _recycle(self, piece: _Piece) -> None:
        """Keep a piece's memory for later pieces, if nobody uses the piece any more.

        New memory costs more time than reading into it. The caller holds the lock.
        """
        if piece.users or not piece.data.done() or piece.data.exception():
            return
        buffer = piece.data.result().obj
        if isinstance(buffer, mmap.mmap) and len(self._free) < _MOST_FREE:
            self._free.append(buffer)

    def _fetch_expected(self) -> None:
        """Have threads fetch the expected extents, within bounds. The caller holds the lock."""
        while (
            self._queue
            and len(self._expected) < 4 * self._threads
            and sum(self._expected.values()) < self._memory // 2
        ):
            extent = self._queue.popleft()
            piece, is_new = self._piece(extent, self._planned_piece)
            if is_new:
                self._expected[extent.file, piece.start] = piece.end - piece.start
                piece.users += 1
                self._pool = self._pool or ThreadPool(
                    self._threads, thread_name_prefix="ckptsync-piece"
                )
                self._pool.submit(self._fetch, extent.file, piece)

    def _fetch(self, name: str, piece: _Piece) -> None:
        """Read a piece from the files, and end its use; raise nothing.

        After an error the piece is dropped, and the error is raised in the threads that wait for
        it; the next read there tries again.
        """
        size = piece.end - piece.start
        try:
            if size < AROUND:
                data = memoryview(bytearray(size))
            else:
                with self._lock:
                    buffer = self._free.pop() if self._free else None
                if buffer is None or len(buffer) < size:
                    # not malloc's memory: of what several threads free, malloc keeps a lot
                    buffer = mmap.mmap(-1, max(size, self._reach))
                data = memoryview(buffer)[:size]
            self._files.read_into(name, piece.start, data)
        except BaseException as e:  # noqa: BLE001  whatever it is, it is raised to the reader
            with self._lock:
                if not piece.is_dropped:
                    self._drop((name, piece.start))
            piece.data.set_exception(without_frames(e) if isinstance(e, CkptsyncError) else e)
        else:
            piece.data.set_result(data)
        self._release(name, piece)


def is_near(source: object) -> bool:
    """Return whether a store or a tree, wrapped or not, is on a disk of this machine.

    A network file system that is mounted counts as one.
    """
    return isinstance(unwrapped(source), (PosixStore, DirectoryFiles))


def _cut_ranges(
    ranges: Sequence[tuple[int, int, int]], reach: int, horizon: int
) -> list[_PlannedPiece]:
    """Return the pieces to read: ranges that are near each other, combined; long ones cut.

    ``ranges``: start, end, and place in the output, sorted. ``reach``: the most bytes of a piece of
    several ranges; of one it is `MOST`. ``horizon``: the most bytes between the places of the first
    and another range of a piece.
    """
    pieces: list[_PlannedPiece] = []
    first_position = 0
    for start, end, position in ranges:
        if pieces and abs(position - first_position) <= horizon:
            piece_start, piece_end, count = pieces[-1]
            if start - piece_end <= NEAR and end - piece_start <= reach:
                pieces[-1] = (piece_start, max(piece_end, end), count + end - start)
                continue
        for piece_start in range(start, end, MOST):
            piece_end = min(piece_start + MOST, end)
            pieces.append((piece_start, piece_end, piece_end - piece_start))
        first_position = position
    return pieces
