"""Writing a new file front to back.

A large file's bytes go to the disk directly where they can (`O_DIRECT`): copying them into the page cache costs more time than anything else
that is done with them, and pushes what the trainer and others read out of memory.  Elsewhere they are let go of as they are written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

LET_GO = 32 << 20
"""Bytes after which what was written through the cache is let go of: the disk begins with it at once, and memory is left to others."""
BLOCK = 4 << 10  # what a disk addresses, at most
WORTH = 256 << 10  # bytes of a chunk below which waiting for the disk costs more than the cache


class Output:
    """Chunks are appended to the empty file behind ``fd``.  Nothing is durable before `sync`.  Raises OSError.

    ``written``: bytes that the file has so far.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.written = self._told = 0
        self._flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self._may_be_direct = is_on_disk(fd)

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        """All of it."""
        view = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        done = self._add_directly(view)
        if done == len(view):
            return
        self._write(view[done:])
        if self.written - self._told >= LET_GO:
            os.posix_fadvise(self._fd, 0, self.written, os.POSIX_FADV_DONTNEED)
            self._told = self.written

    def skip(self, count: int) -> None:
        """The file has the next ``count`` bytes already."""
        self.written = os.lseek(self._fd, self.written + count, os.SEEK_SET)

    def sync(self) -> None:
        """Everything is on the disk."""
        os.fsync(self._fd)

    def _add_directly(self, view: memoryview) -> int:
        """Write its whole blocks past the cache, if they and the file's end lie as the disk wants them; how many bytes these were."""
        size = len(view) - len(view) % BLOCK
        if not self._may_be_direct or size < WORTH or self.written % BLOCK:
            return 0
        before = self.written
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | os.O_DIRECT)
            self._write(view[:size])
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self._may_be_direct = False  # this file system cannot, or the caller's memory does not begin where it should
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags)
        return self.written - before

    def _write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.write(self._fd, view[done:])
            done += count
            self.written += count


def chunk_room(size: int) -> memoryview:
    """Memory for a chunk of ``size`` bytes, one at least, that begins where a disk wants it to: of any other the bytes go through the cache."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def is_on_disk(fd: int) -> bool:
    """Whether a block device of this machine holds the file.

    Network file systems, and those that check what they store, have devices without a number; they do better with a cache in between.
    """
    return os.major(os.fstat(fd).st_dev) != 0
