"""Write a file in parts, several at once; send only parts that are not there; commit last.

A large upload must survive a kill without sending everything again, and without notes on this
machine. So parts begin where the file's size alone says, and a write that was killed finds its
parts again at the server, by comparing bytes or checksums. How parts are kept (an S3 multipart
upload, ranges of a partial file) is in the store's `PartUpload`.
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
UNBUFFERED = 256 << 10  # bytes of a file that is sent without one of the buffers
MOST = 10_000  # parts of a file: S3's limit
# where the size is not known, parts double after so many: 10,000 of them reach beyond 5 TB
_STEP = 1000


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file: ``data`` are its bytes from ``start``; ``number`` counts from 1.

    The buffer of ``data`` is used again after the part was sent.
    """

    number: int
    start: int
    data: memoryview


class PartUpload(Protocol):
    """An unfinished file at the server.

    Every method is safe to call again; several threads call `reuse_part` and `put`.
    """

    def reuse_part(self, part: FilePart) -> bool:
        """Return True, and count a part as sent, if an earlier try has left exactly these bytes.

        Nothing of the part is sent; after False the caller calls `put`. The first call also chooses
        an unfinished upload to continue, or begins one.
        """
        ...

    def put(self, part: FilePart) -> None:
        """Send a part that is not there; on return its buffer may be used again."""
        ...

    def commit(self, size: int) -> None:
        """Give the file of ``size`` bytes its name.

        Raise Exists if it is to be created and the name is taken.
        """
        ...

    def abandon(self) -> None:
        """Remove the unfinished file: nobody will continue it."""
        ...


class PartTarget(Protocol):
    """A name of a store that is about to be written."""

    def put_whole(self, data: memoryview) -> None:
        """Store a content that fits into one part; raise Exists if a new name is taken."""
        ...

    def begin(self) -> PartUpload:
        """Return the unfinished file of an earlier try of the same origin, or a new one."""
        ...


def part_size(size: int | None, number: int = 1, least: int = PART) -> int:
    """Return the bytes of a part, at least ``least``: whole MiB, so many that `MOST` parts suffice.

    ``size``: bytes of the file; None if unknown: then parts double after each thousand. ``number``:
    of the part, from 1. The last part of a file may be smaller.
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
        self._memory = _Buffers(budget)

    def send(
        self, target: PartTarget, chunks: Iterable[Chunk], about: About, least: int = PART
    ) -> None:
        """Write ``chunks`` to ``target``: whole if one part holds them, else in several parts.

        A part has ``least`` bytes or more, and waits for a buffer. A file of at most `UNBUFFERED`
        bytes waits for none: its writer may produce the chunks of a larger file that holds all
        buffers, and both would wait for ever.

        Raise what ``chunks`` raise, Incomplete if they are not ``about.size`` bytes, and the
        target's errors.
        """
        if about.size is not None and about.size <= min(UNBUFFERED, least):
            target.put_whole(memoryview(b"".join(map(bytes, check_size(chunks, about)))))
            return
        with contextlib.closing(_cut_parts(chunks, about, least, self._memory)) as parts:
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
        """Send parts by several threads, then commit.

        The first error of a thread is raised when the next part is there. After an error it waits
        for running parts. The upload stays for the next try if ``about`` has an origin, and the
        error is a StoreError but Exists, or an interrupt; else it is abandoned.
        """
        running: set[Future[None]] = set()
        stopped = threading.Event()
        size = 0

        def put(part: FilePart) -> None:
            """Send a part unless it is there or sending was stopped; give its buffer back."""
            try:
                if stopped.is_set():
                    return
                if upload.reuse_part(part):
                    progress_signs.count_kept(len(part.data))
                else:
                    upload.put(part)
            finally:
                self._memory.give(part.data)

        try:
            for part in parts:
                try:
                    running = _check_running(running, 0)
                except BaseException:
                    self._memory.give(part.data)
                    raise
                size = part.start + len(part.data)
                running.add(self._pool.submit(progress_signs.keep_context(put), part))
            while running:
                running = _check_running(running, None)
            upload.commit(size)
        except BaseException as e:
            stopped.set()
            # a buffer must not be used again, nor an upload be ended, while it is being sent
            wait(running)
            # The next try may bring the same bytes if the store failed, or somebody stopped us; not
            # if the source did, or came too late.
            may_continue = (
                isinstance(e, StoreError) and not isinstance(e, Exists)
            ) or not isinstance(e, Exception)
            if not (about.origin and may_continue):
                # the first error is the one to tell; what is left is removed as stale later
                with contextlib.suppress(StoreError):
                    upload.abandon()
            raise


def _check_running(running: set[Future[None]], timeout: float | None) -> set[Future[None]]:
    """Wait up to ``timeout`` seconds (None: for ever) until a call ends; return those that run.

    Raise the error of one that failed.
    """
    done, unfinished = wait(running, timeout, FIRST_COMPLETED) if running else (set(), set())
    for future in done:
        future.result()
    return unfinished


def _cut_parts(
    chunks: Iterable[Chunk], about: About, least: int, memory: _Buffers
) -> Generator[tuple[FilePart, bool], None, None]:
    """Yield the chunks as parts of ``least`` bytes or more, and whether each is the last one.

    Without bytes it is one empty part. Waits until ``memory`` has a buffer for the next part; the
    caller gives the parts' buffers back to it. Raise as `check_size`.
    """

    def take_buffer(number: int) -> memoryview:
        """Return the buffer for a part; wait until there is memory."""
        size = part_size(about.size, number, least)
        return memory.take(size if about.size is None else max(1, min(size, about.size)))

    number, start, filled = 1, 0, 0
    buffer: memoryview | None = take_buffer(number)
    try:
        for chunk in check_size(chunks, about):
            view = memoryview(chunk)
            unread = view.cast("B") if view.nbytes else memoryview(b"")
            while len(unread):
                assert buffer is not None
                # a full part is yielded only now: one more byte shows that it is not the last
                if filled == len(buffer):
                    part, buffer = FilePart(number, start, buffer), None
                    yield part, False
                    number, start, filled = number + 1, start + filled, 0
                    buffer = take_buffer(number)
                count = min(len(unread), len(buffer) - filled)
                buffer[filled : filled + count] = unread[:count]
                filled, unread = filled + count, unread[count:]
        assert buffer is not None
        last, buffer = FilePart(number, start, buffer[:filled]), None
    finally:
        if buffer is not None:
            memory.give(buffer)
    yield last, True


class _Buffers:
    """Buffers of at most ``budget`` bytes together; a single one may be larger."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._changed = threading.Condition()
        self._used: dict[int, bytearray | mmap.mmap] = {}
        self._free: list[bytearray | mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """Wait until ``size`` bytes fit into the budget, or no buffer is used; return a buffer.

        Free buffers of other sizes are dropped, so that memory stays within the budget.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._used or sum(map(len, self._used.values())) + size <= self._budget
            )
            self._free = [buffer for buffer in self._free if len(buffer) == size]
            if self._free:
                buffer = self._free.pop()
            elif size >= MIB:
                # not malloc's memory: of what several threads free, malloc keeps a lot
                buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                buffer = bytearray(size)
            self._used[id(buffer)] = buffer
            return memoryview(buffer)

    def give(self, view: memoryview) -> None:
        """Take back a buffer, by a view of it, and wake those who wait; nobody uses it any more."""
        with self._changed:
            buffer = self._used.pop(id(view.obj))
            self._free = [*self._free, buffer] if self._used else []
            self._changed.notify_all()
