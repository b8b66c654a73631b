"""A new file in a directory of this machine, whose bytes come in any order and from several threads."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable

from ckptsync.errors import CkptsyncError, Transient
from ckptsync.stores import beneath
from ckptsync.stores.oserrors import Telling
from ckptsync.stores.posix.draft import Draft
from ckptsync.stores.writing import BLOCK, WORTH, is_on_disk


class Placing:
    """``name`` in a store, until `commit` or `give_up`.  ``left``: so many bytes an earlier try has left, holes among them.  Raises StoreError."""

    def __init__(self, name: str, size: int, draft: Draft, told: Telling, commit: Callable[[Draft], None]) -> None:
        self.name, self.size = name, size
        self.left = min(size, draft.left)
        self._draft, self._told, self._commit = draft, told, commit
        self._lock = threading.Lock()
        self._is_over = False
        with self._told.about(name):
            if draft.left != size:
                os.ftruncate(draft.fd, size)
            self._direct = _direct(draft.fd) if size >= WORTH else -1

    def read_at(self, start: int, out: memoryview) -> None:
        """What an earlier try has left there; holes are zeros."""
        with self._told.about(self.name):
            beneath.read_at(self._draft.fd, start, out)

    def write_at(self, start: int, view: memoryview) -> None:
        """All of it, past the page cache where that is quicker."""
        with self._told.about(self.name):
            if self._direct >= 0 and not (start % BLOCK or len(view) % BLOCK):
                try:
                    _write(self._direct, start, view)
                except OSError as e:
                    if e.errno != errno.EINVAL:
                        raise
                else:
                    return  # else: this file system cannot, or the memory does not begin where it should
            _write(self._draft.fd, start, view)

    def let_go(self, start: int, size: int) -> None:
        """What was written there is wanted no more: the disk may begin with it, and memory is left to others."""
        with self._told.about(self.name):
            os.posix_fadvise(self._draft.fd, start, size, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """It is whole: durable, and under its name, on return."""
        try:
            with self._told.about(self.name):
                os.fsync(self._draft.fd)
                self._commit(self._draft)
        except BaseException as e:
            self.give_up(e)
            raise
        if self._is_first():
            self._draft.release()

    def give_up(self, error: BaseException) -> None:
        """What is there stays for the next try if that may end better, as after an interruption.  May be called again."""
        if not self._is_first():
            return
        if not self._draft.may_stay or (isinstance(error, CkptsyncError) and not isinstance(error, Transient)):
            self._draft.remove()
        self._draft.release()

    def _is_first(self) -> bool:
        """Whether this call ends it."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first and self._direct >= 0:
            with contextlib.suppress(OSError):  # what counts is the other descriptor's
                os.close(self._direct)
        return is_first


def _direct(fd: int) -> int:
    """Another descriptor of the file, for writing past the page cache; -1 where there is none."""
    if not is_on_disk(fd):
        return -1
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return -1  # no /proc, or a file system that cannot: through the cache, then


def _write(fd: int, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)
