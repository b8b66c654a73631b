"""Write a file in parts, and send only those that an earlier try has not left; commit last.

Nothing about an unfinished write is kept on this machine. Parts begin where the file's size alone
says, so a write that was killed finds them again at the server. What they are there (an S3
multipart upload, ranges of a partial file) is a `PartUpload`'s business.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from ckptsync.errors import Exists, StoreError
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import About, Chunk, check_size
from ckptsync.threads import ThreadPool

PART = 16 << 20
MIB = 1 << 20
UNBUFFERED = 256 << 10  # bytes of a file that needs no room in the buffers
MOST = 10_000  # parts of a file: S3's limit
# where the size is not known, parts double after so many: 10,000 of them reach beyond 5 TB
_STEP = 1000


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file: ``data`` are its bytes from ``start``, ``number`` counts from 1.

    The buffer of ``data`` is used again afterwards.
    """

    number: int
    start: int
    data: memoryview


class PartUpload(Protocol):
    """An unfinished file at the server.

    Every method is safe to call again; several threads call `is_there` and `put`.
    """

    def is_there(self, part: FilePart) -> bool:
        """Return whether an earlier try has left exactly these bytes there.

        Known without sending them.  Called before `put`: the first call takes up an earlier try's
        upload, or begins one.
        """
        ...

    def put(self, part: FilePart) -> None:
        """Store it."""
        ...

    def commit(self, size: int) -> None:
        """Give the file its name; raise Exists if it is to be created and the name is taken."""
        ...

    def abandon(self) -> None:
        """Remove what is there: nobody will continue it."""
        ...


class PartTarget(Protocol):
    """A name of a store that is about to be written."""

    def put_whole(self, data: memoryview) -> None:
        """Store a content that fits into one part.

        Raise Exists if it is to be created and the name is taken.
        """
        ...

    def begin(self) -> PartUpload:
        """Return an earlier try's unfinished file of the same origin, or a new one."""
        ...


def part_size(size: int | None, number: int = 1, least: int = PART) -> int:
    """Return the bytes of part ``number`` (but the last) of a file of ``size`` bytes.

    Whole MiB, and as many that `MOST` parts suffice.
    """
    if size is None:
        return least << ((number - 1) // _STEP)
    return max(least, -(-size // MOST // MIB) * MIB if size > least * MOST else 0)


class UploadPool:
    """The threads and the memory with which one store uploads parts, for all its writers.

    At most ``threads`` parts and ``budget`` bytes are in flight at once.
    """

    def __init__(self, threads: int, budget: int) -> None:
        self._pool = ThreadPool(threads, thread_name_prefix="ckptsync-part")
        self._memory = _Memory(budget)

    def send(
        self, target: PartTarget, chunks: Iterable[Chunk], about: About, least: int = PART
    ) -> None:
        """Write ``chunks`` to ``target``.

        Raises what they raise, and Incomplete if they are not ``about.size`` bytes.

        A file of at most `UNBUFFERED` bytes waits for no buffer: who writes it may be making the
        chunks of a larger file that holds all buffers, and both would wait for ever.
        """
        if about.size is not None and about.size <= min(UNBUFFERED, least):
            target.put_whole(memoryview(b"".join(map(bytes, check_size(chunks, about)))))
            return
        with contextlib.closing(_cut(chunks, about, least, self._memory)) as parts:
            first, is_last = next(parts)
            try:
                upload = None if is_last else target.begin()
                if upload is None:
                    target.put_whole(first.data)
            except BaseException:
                self._memory.give(first.data)
                raise
            if upload is None:
                self._memory.give(first.data)
            else:
                self._send_parts(upload, chain([first], (part for part, _ in parts)), about)

    def _send_parts(self, upload: PartUpload, parts: Iterable[FilePart], about: About) -> None:
        """Send parts by several threads.

        The first error of theirs is raised as soon as the next part is there.
        """
        running: set[Future[None]] = set()
        stopped = threading.Event()
        size = 0

        def put(part: FilePart) -> None:
            try:
                if stopped.is_set():
                    return
                if upload.is_there(part):
                    progress_signs.count_kept(len(part.data))
                else:
                    upload.put(part)
            finally:
                self._memory.give(part.data)

        try:
            for part in parts:
                try:
                    running = _unfinished(running, 0)
                except BaseException:
                    self._memory.give(part.data)
                    raise
                size = part.start + len(part.data)
                running.add(self._pool.submit(progress_signs.keep_context(put), part))
            while running:
                running = _unfinished(running, None)
            upload.commit(size)
        except BaseException as e:
            stopped.set()
            # a buffer must not be used again, nor an upload be ended, while it is being sent
            wait(running)
            # The next try may bring the same bytes if the store failed, or somebody stopped us; not
            # if the source did, or came too late.
            may_go_on = (isinstance(e, StoreError) and not isinstance(e, Exists)) or not isinstance(
                e, Exception
            )
            if not (about.origin and may_go_on):
                # the first error is the one to tell; what is left is removed as stale later
                with contextlib.suppress(StoreError):
                    upload.abandon()
            raise


def _unfinished(running: set[Future[None]], timeout: float | None) -> set[Future[None]]:
    """Wait for one; return those that still run, and raise the error of one that does not."""
    done, left = wait(running, timeout, FIRST_COMPLETED) if running else (set(), set())
    for future in done:
        future.result()
    return left


def _cut(
    chunks: Iterable[Chunk], about: About, least: int, memory: _Memory
) -> Generator[tuple[FilePart, bool], None, None]:
    """Yield chunks as parts, and whether each is the last one.

    The caller gives the parts' buffers back.
    """

    def take(number: int) -> memoryview:
        size = part_size(about.size, number, least)
        return memory.take(size if about.size is None else max(1, min(size, about.size)))

    number, start, filled = 1, 0, 0
    room: memoryview | None = take(number)
    try:
        for chunk in check_size(chunks, about):
            view = memoryview(chunk)
            rest = view.cast("B") if view.nbytes else memoryview(b"")
            while len(rest):
                assert room is not None
                if filled == len(room):  # given out only now, since more follows
                    part, room = FilePart(number, start, room), None
                    yield part, False
                    number, start, filled = number + 1, start + filled, 0
                    room = take(number)
                count = min(len(rest), len(room) - filled)
                room[filled : filled + count] = rest[:count]
                filled, rest = filled + count, rest[count:]
        assert room is not None
        last, room = FilePart(number, start, room[:filled]), None
    finally:
        if room is not None:
            memory.give(room)
    yield last, True


class _Memory:
    """Buffers, of at most ``budget`` bytes together; a single one may be larger."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._changed = threading.Condition()
        self._taken: dict[int, bytearray | mmap.mmap] = {}
        self._free: list[bytearray | mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """Wait until there is room.

        Free buffers of other sizes are let go of, so that memory stays within the budget.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._taken or sum(map(len, self._taken.values())) + size <= self._budget
                )
            )
            self._free = [buffer for buffer in self._free if len(buffer) == size]
            if self._free:
                buffer = self._free.pop()
            elif (
                size >= MIB
            ):  # the system's own memory: of what several threads let go of, malloc keeps a lot
                buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                buffer = bytearray(size)
            self._taken[id(buffer)] = buffer
            return memoryview(buffer)

    def give(self, view: memoryview) -> None:
        """Take a buffer back, whole or cut short; nobody uses it any more."""
        with self._changed:
            buffer = self._taken.pop(id(view.obj))
            self._free = [*self._free, buffer] if self._taken else []
            self._changed.notify_all()
