"""Writing a file in parts: cut it, compare with what an earlier try has left, send what is missing, several parts at once; commit last.

Nothing about an unfinished write is kept on this machine.  Parts begin where the file's size alone says, so a write that was killed finds
them again at the server.  What they are there (an S3 multipart upload, ranges of a partial file) is an `Upload`'s business.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from ckptsync.errors import Exists, Incomplete, StoreError
from ckptsync.stores import signs
from ckptsync.stores.contract import About, Chunk, announced

PART = 16 << 20
MIB = 1 << 20
SMALL = 256 << 10
MOST = 10_000  # parts of a file: S3's limit
THREADS = 4
BUDGET = 6 * PART
_STEP = 1000  # where the size is not known, parts double after so many: 10,000 of them reach beyond 5 TB


@dataclass(frozen=True, slots=True)
class Part:
    """``number`` counts from 1; ``data`` are the file's bytes from ``start``, in a buffer that is used again afterwards."""

    number: int
    start: int
    data: memoryview


class Upload(Protocol):
    """An unfinished file at the server.  Every method is safe to call again; `is_there` and `put` are called by several threads."""

    def is_there(self, part: Part) -> bool:
        """Whether an earlier try has left exactly these bytes there; known without sending them."""
        ...

    def put(self, part: Part) -> None:
        """Store it."""
        ...

    def commit(self, size: int) -> None:
        """Give the file its name; raises Exists if it is to be created and the name is taken."""
        ...

    def abandon(self) -> None:
        """Remove what is there: nobody will continue it."""
        ...


class Target(Protocol):
    """A name of a store that is about to be written."""

    def put_whole(self, data: memoryview) -> None:
        """Store a content that fits into one part; raises Exists if it is to be created and the name is taken."""
        ...

    def begin(self) -> Upload:
        """The unfinished file that an earlier try of the same origin has left, or a new one."""
        ...


def part_size(size: int | None, number: int = 1, least: int = PART) -> int:
    """Bytes of part ``number`` (but the last) of a file of ``size`` bytes: whole MiB, and as many that `MOST` parts suffice."""
    if size is None:
        return least << ((number - 1) // _STEP)
    return max(least, -(-size // MOST // MIB) * MIB if size > least * MOST else 0)


class Parts:
    """What one store sends at once: ``threads`` parts and ``budget`` bytes of memory, whoever writes."""

    def __init__(self, threads: int = THREADS, budget: int = BUDGET) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptsync-part")
        self._memory = _Memory(budget)

    def send(self, target: Target, chunks: Iterable[Chunk], about: About, least: int = PART) -> None:
        """Write ``chunks`` to ``target``.  Raises what they raise, and Incomplete if they are not ``about.size`` bytes.

        A small content waits for no memory: who writes it may be making the chunks of a larger one, whose buffers wait for him.
        """
        if about.size is not None and about.size <= min(SMALL, least):
            target.put_whole(memoryview(b"".join(map(bytes, announced(chunks, about)))))
            return
        cut = _Cut(chunks, about.size, least, self._memory)
        try:
            pieces = iter(cut)
            first = next(pieces)
            if not cut.is_over:
                self._send_parts(target, first, pieces, cut, about)
                return
            try:
                target.put_whole(first.data)
            finally:
                self._memory.give(first.data)
        finally:
            cut.close()

    def _send_parts(self, target: Target, first: Part, pieces: Iterator[Part], cut: _Cut, about: About) -> None:
        try:
            upload = target.begin()
        except BaseException:
            self._memory.give(first.data)
            raise
        line = _Line(self._pool, self._memory)
        try:
            for part in chain([first], pieces):
                line.add(upload, part)
            line.finish()
            upload.commit(cut.total)
        except BaseException as e:
            line.stop()
            if not (about.origin and _is_worth_continuing(e)):
                _abandoned(upload)
            raise


def _is_worth_continuing(e: BaseException) -> bool:
    """Whether the next try may bring the same bytes: the store failed, or somebody stopped us; not so if the source did, or came too late."""
    return (isinstance(e, StoreError) and not isinstance(e, Exists)) or not isinstance(e, Exception)


def _abandoned(upload: Upload) -> None:
    try:
        upload.abandon()
    except StoreError:
        return  # the first error is the one to tell; what is left is never listed, and removed as stale later


class _Line:
    """Parts on their way: the first error of theirs is raised to whoever adds the next one."""

    def __init__(self, pool: ThreadPoolExecutor, memory: _Memory) -> None:
        self._pool, self._memory = pool, memory
        self._running: set[Future[None]] = set()
        self._is_stopped = False

    def add(self, upload: Upload, part: Part) -> None:
        """Its buffer is given back when it is stored, or when it is not taken."""
        try:
            self._collect(0)
        except BaseException:
            self._memory.give(part.data)
            raise
        self._running.add(self._pool.submit(signs.carried(self._put), upload, part))

    def finish(self) -> None:
        while self._running:
            self._collect(None)

    def stop(self) -> None:
        """Wait for those that are being sent: a buffer must not be used again under them, nor an upload be ended."""
        self._is_stopped = True
        wait(self._running)

    def _collect(self, timeout: float | None) -> None:
        done, self._running = wait(self._running, timeout, FIRST_COMPLETED) if self._running else (set(), set())
        for future in done:
            future.result()

    def _put(self, upload: Upload, part: Part) -> None:
        try:
            if not self._is_stopped and not upload.is_there(part):
                upload.put(part)
        finally:
            self._memory.give(part.data)


class _Cut:
    """Chunks as parts.  ``is_over`` is true once the part given out last is the last one."""

    def __init__(self, chunks: Iterable[Chunk], size: int | None, least: int, memory: _Memory) -> None:
        self._chunks, self._size, self._least, self._memory = chunks, size, least, memory
        self.is_over = False
        self.total = 0
        self._held: memoryview | None = None  # a buffer that is being filled, and nobody else's yet

    def close(self) -> None:
        """Give back what was being filled when an error came."""
        if self._held is not None:
            self._memory.give(self._held)
            self._held = None

    def __iter__(self) -> Iterator[Part]:
        number, start = 1, 0
        room = self._take(number)
        filled = 0
        for chunk in self._chunks:
            view = memoryview(chunk)
            rest = view.cast("B") if view.nbytes else memoryview(b"")
            self._count(len(rest))
            while len(rest):
                if filled == len(room):  # given out only now, since more follows
                    yield self._given(Part(number, start, room))
                    number, start, filled = number + 1, start + len(room), 0
                    room = self._take(number)
                count = min(len(rest), len(room) - filled)
                room[filled : filled + count] = rest[:count]
                filled, rest = filled + count, rest[count:]
        if self._size is not None and self.total != self._size:
            raise _changed(self.total, self._size)
        self.is_over = True
        yield self._given(Part(number, start, room[:filled]))

    def _count(self, size: int) -> None:
        self.total += size
        if self._size is not None and self.total > self._size:
            raise _changed(self.total, self._size)

    def _take(self, number: int) -> memoryview:
        size = part_size(self._size, number, self._least)
        self._held = self._memory.take(size if self._size is None else max(1, min(size, self._size)))
        return self._held

    def _given(self, part: Part) -> Part:
        self._held = None
        return part


def _changed(found: int, wanted: int) -> Incomplete:
    return Incomplete(
        f"{found} bytes or more came where {wanted} were announced", hint="the source changed while it was read: try again"
    )


Room = bytearray | mmap.mmap


def _room(size: int) -> Room:
    """Large buffers are the system's own memory: of what several threads let go of, malloc keeps a lot."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if size >= MIB else bytearray(size)


class _Memory:
    """Buffers, of at most ``budget`` bytes together; a single one may be larger."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._changed = threading.Condition()
        self._taken: dict[int, Room] = {}
        self._free: list[Room] = []

    def take(self, size: int) -> memoryview:
        """Wait until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._held() + size <= self._budget)
            buffer = self._reused(size) or _room(size)
            self._taken[id(buffer)] = buffer
            return memoryview(buffer)

    def give(self, view: memoryview) -> None:
        """Whole or cut short; nobody uses it any more."""
        with self._changed:
            buffer = self._taken.pop(id(view.obj))
            self._free = [*self._free, buffer] if self._taken else []
            self._changed.notify_all()

    def _held(self) -> int:
        return sum(map(len, self._taken.values()))

    def _reused(self, size: int) -> Room | None:
        """One that was used for a part of this size; those of other sizes are let go of, so that memory stays within the budget."""
        fitting: Callable[[Room], bool] = lambda b: len(b) == size  # noqa: E731
        found = next(filter(fitting, self._free), None)
        self._free = [b for b in self._free if b is not found and fitting(b)]
        return found
