"""A few files kept open, so that reading many pieces of one file opens it once and the kernel reads ahead."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable

from ckptsync.stores import beneath

MOST = 128  # far below the usual limit of 1024 descriptors, also where two checkpoints are overlaid


class OpenFile:
    """A descriptor that is closed when nobody refers to it any more.

    So a file may be dropped from `OpenFiles` while another thread reads it: its number is not reused under that thread.
    Methods only, since a bare number would not keep the file open.
    """

    __slots__ = ("__weakref__", "_fd", "since")

    def __init__(self, fd: int) -> None:
        self._fd, self.since = fd, time.monotonic()
        weakref.finalize(self, os.close, fd)

    def read_at(self, start: int, out: memoryview) -> int:
        """Fill ``out``; fewer bytes than it holds are returned only where the file ends.  Raises OSError."""
        return beneath.read_at(self._fd, start, out)

    def links(self) -> int:
        """How many names the file has; none once it was replaced or deleted.  Raises OSError."""
        return os.fstat(self._fd).st_nlink

    def is_same(self, fd: int) -> bool:
        """Whether ``fd`` is a descriptor of the same file.  Raises OSError."""
        return os.path.sameopenfile(self._fd, fd)


class OpenFiles:
    """The files used last, by name.  Threads may share it."""

    def __init__(self, open_file: Callable[[str], int], most: int = MOST) -> None:
        self._open_file, self._most = open_file, most
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenFile:
        """The open file; raises what ``open_file`` raises."""
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
                return self._files[name]
        return self.reopen(name)

    def reopen(self, name: str) -> OpenFile:
        """The file that is under this name now."""
        self.forget(name)
        file = OpenFile(self._open_file(name))  # not under the lock: a slow server would hold up every reader
        with self._lock:
            self._files[name] = file
            if len(self._files) > self._most:
                self._files.popitem(last=False)
        return file

    def forget(self, name: str) -> None:
        """The next `get` opens the file again."""
        with self._lock:
            self._files.pop(name, None)

    def forget_older(self, seconds: float) -> None:
        """Let go of files opened longer ago: a deleted file that is kept open still takes up space."""
        now = time.monotonic()
        with self._lock:
            for name in [n for n, file in self._files.items() if now - file.since > seconds]:
                del self._files[name]
