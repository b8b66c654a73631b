"""Reading stretches of files, several at once, and comparing them with their digests.

From a disk of this machine one thread reads one file after the other, front to back, which is what disks and the system's readahead like best
(two streams at once took a virtual disk twice as long), while another digests; what is in memory already is digested by several.  Elsewhere each thread has a request of its
own under way, and large files are read in ranges.  A buffer a thread is all the memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from ckptsync.errors import Corrupt, Incomplete, NotFound
from ckptsync.model import Extent
from ckptsync.stores import beneath
from ckptsync.stores.opening import directory_of
from ckptsync.stores.stream import read_ahead, stream
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.reading import Counted
from ckptsync.verify.units import LARGE, Unit

FAR = 8
"""Requests at once."""
NEAR = 4
"""Threads at most, where files are in memory, or a server's that is mounted: memory is no faster with more."""
_BUFFER = 1 << 20
_FAR_AHEAD = 4 << 20, 8  # bytes of a piece, and how many are read before they are digested
_NEAR_AHEAD = 2 << 20, 1  # the disk goes on while a piece is digested
_LEAST = 8 << 20  # bytes that are worth a thread
_LOOKS = 16  # files that are asked whether they are in memory


def is_far(source: Counted) -> bool:
    """Whether its files are no files of this machine (they may be a server's, which it mounts)."""
    return not isinstance(source.source, LocalFiles) and directory_of(source.source) is None


def suspects(source: Counted, wanted: Iterable[Unit]) -> frozenset[str]:
    """Names of the files of which a stretch is not what was recorded, or is not there.  Raises StoreError."""
    far, todo = is_far(source), list(wanted)
    threads = FAR if far else _streams(source.source, todo)
    least = LARGE if far else _LEAST if threads == 1 else sys.maxsize
    # what has one digest alone is read in its order: ahead, and one after the other, or its buffers would be many
    ordered = [unit for unit in todo if len(unit.wanted) == 1 and unit.size > least]
    others = [unit for unit in todo if len(unit.wanted) > 1 or unit.size <= least]
    found = _Sweep(source, threads).run(others)
    return found | {unit.file.name for unit in ordered if not _is_well_ahead(source, unit, *(_FAR_AHEAD if far else _NEAR_AHEAD))}


def _streams(source: object, todo: Sequence[Unit]) -> int:
    """How many files are read at once on this machine."""
    root = source.root if isinstance(source, LocalFiles) else directory_of(source)
    is_mounted = bool(getattr(source, "late", 0.0))
    looked_at = [unit for unit in todo if unit.size][:: max(1, len(todo) // _LOOKS)]
    is_quick = is_mounted or (root is not None and all(_is_in_memory(root, unit) for unit in looked_at))
    return min(NEAR, _cores()) if is_quick else 1


def _is_in_memory(root: str, unit: Unit) -> bool:
    """Whether a byte in its middle is there without waiting for a disk, as far as the system says (preadv2(2), RWF_NOWAIT)."""
    try:
        fd = beneath.open_file(root, unit.file.name)
    except OSError:
        return False  # who reads it says what is wrong
    try:
        return os.preadv(fd, [bytearray(1)], unit.start + unit.size // 2, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False  # EAGAIN: it would have waited; or it cannot say
    finally:
        beneath.let_go(fd)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Sweep:
    """Threads that take one unit after the other."""

    def __init__(self, source: Counted, threads: int) -> None:
        self._source, self._threads = source, threads
        self._own = threading.local()
        self._stopped = threading.Event()

    def run(self, todo: Sequence[Unit]) -> frozenset[str]:
        """Names of the files that are not well; the first error of another kind is raised once all threads have ended."""
        threads = min(self._threads, len(todo))
        if threads < 2:
            return frozenset(unit.file.name for unit in todo if not self._is_well(unit, self._threads))
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptsync-verify") as pool:
            try:
                results = list(pool.map(self._look, todo))
            except BaseException:
                self._stopped.set()
                raise
        return frozenset(unit.file.name for unit, is_well in zip(todo, results, strict=True) if not is_well)

    def _look(self, unit: Unit) -> bool:
        return self._stopped.is_set() or self._is_well(unit, 1)

    def _is_well(self, unit: Unit, threads: int) -> bool:
        sums = _Sums(unit, threads if unit.size >= LARGE else 1)
        try:
            stream(self._source, Extent(unit.file.name, unit.start, unit.size), self._memory(), sums.add)
        except (NotFound, Incomplete, Corrupt):
            return False  # gone, or shorter than it was: who looks closer says which
        return sums.are_right()

    def _memory(self) -> memoryview:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, _BUFFER))
        buffer: memoryview = self._own.buffer
        return buffer


class _Sums:
    """The digests of a unit's blocks, as its bytes come."""

    def __init__(self, unit: Unit, threads: int) -> None:
        self._unit, self._threads = unit, threads
        self._left = iter(unit.wanted)
        self._at, self._is_right = 0, True
        self._sum = blake3(max_threads=threads)

    def add(self, view: memoryview) -> None:
        block, at = self._unit.block, 0
        while at < len(view):
            count = min(len(view) - at, block - self._at)
            self._sum.update(view[at : at + count])
            at, self._at = at + count, self._at + count
            if self._at == block:
                self._compare()

    def are_right(self) -> bool:
        """After the last byte: the last block of a file is shorter, and that of an empty one has none."""
        if self._at or not self._unit.size:
            self._compare()
        return self._is_right and next(self._left, None) is None

    def _compare(self) -> None:
        wanted = next(self._left, "")
        self._is_right &= bool(wanted) and self._sum.hexdigest().startswith(wanted)
        self._at, self._sum = 0, blake3(max_threads=self._threads)


def _is_well_ahead(source: Counted, unit: Unit, piece: int, depth: int) -> bool:
    sums = _Sums(unit, 1)
    try:
        for view in read_ahead(source, unit.file.name, unit.size, piece, depth, first=unit.start):
            sums.add(view)
    except (NotFound, Incomplete, Corrupt):
        return False  # as above
    return sums.are_right()
