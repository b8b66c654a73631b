"""Files beneath a directory, reached component by component: no link is followed, at the end or on the way.

The root itself may be a link, since the operator named it.  Functions here raise `OSError`; `is_absence` says which of them
mean that there is no such regular file.

`OpenFiles` keeps a few of them open, so that reading many pieces of one file opens it once and the kernel reads ahead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ckptsync.errors import Corrupt
from ckptsync.paths import checked_path

# O_PATH asks for no permission but search, and on NFS costs no round trip: a directory on the way is only passed through.
PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe under a checkpoint's name must not hang the reader
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_NFS_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")  # a deleted file that some NFS client still has open


def is_absence(e: OSError) -> bool:
    """Nothing is there, or a link, or a socket: in any case no file that may be read."""
    return e.errno in _ABSENT


def let_go(at: int) -> None:
    """Close a descriptor that nothing was written through: nothing can be lost with it, so that an error says nothing."""
    with contextlib.suppress(OSError):
        os.close(at)


def open_directory(root: str, way: Sequence[str], flags: int = PASS) -> int:
    """A descriptor of the directory ``way`` beneath ``root``, for the caller to close."""
    at = os.open(root, flags)
    for part in way:
        try:
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=at)
        finally:
            let_go(at)
        at = below
    return at


def held(at: int, path: str) -> str:
    """A root that is the open directory ``at``, whatever its ``path`` comes to mean meanwhile; the path itself where the system has no names for what is open."""
    name = f"/proc/self/fd/{at}"
    return name if os.path.isdir(name) else path  # noqa: PTH112 - no path of a file


@contextlib.contextmanager
def parent_of(root: str, name: str) -> Iterator[tuple[int, str]]:
    """The directory that ``name`` is in, and the last part of ``name``."""
    *way, last = name.split("/")
    at = open_directory(root, way)
    try:
        yield at, last
    finally:
        let_go(at)


def open_file(root: str, name: str) -> int:
    """A descriptor of a regular file, for the caller to close."""
    with parent_of(root, name) as (at, last):
        fd = os.open(last, _FILE, dir_fd=at)
    try:
        _regular(os.fstat(fd), name)
    except BaseException:
        let_go(fd)
        raise
    return fd


def stat_file(root: str, name: str) -> os.stat_result:
    """What `os.stat` says of a regular file."""
    with parent_of(root, name) as (at, last):
        return _regular(os.stat(last, dir_fd=at, follow_symlinks=False), name)


def stat_opened(root: str, name: str) -> os.stat_result:
    """As `stat_file`, of a file that was opened: so a client of NFS asks the server, and not what it remembers (close-to-open, nfs(5))."""
    fd = open_file(root, name)
    try:
        return os.fstat(fd)
    finally:
        let_go(fd)


def unlink(root: str, name: str) -> None:
    """Take a regular file's name away."""
    with parent_of(root, name) as (at, last):
        _regular(os.stat(last, dir_fd=at, follow_symlinks=False), name)
        os.unlink(last, dir_fd=at)


def refresh(root: str, name: str) -> None:
    """Let no directory on the way to ``name`` be remembered to lack it.

    A client of NFS drops what it remembers of a directory's names once it sees that the directory has changed, and opening one for reading, as
    `PASS` does not, makes it ask (nfs(5), "Directory entry caching"; Linux, fs/nfs/dir.c, nfs_lookup_verify_inode).
    """
    with contextlib.suppress(PermissionError):  # it may be passed through without being read: then only time tells
        let_go(open_directory(root, name.split("/")[:-1], os.O_RDONLY | os.O_DIRECTORY))


def _regular(found: os.stat_result, name: str) -> os.stat_result:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return found


def read_at(fd: int, start: int, out: memoryview) -> int:
    """Fill ``out``; fewer bytes than it holds are returned only where the file ends."""
    view, done = out.cast("B") if out.nbytes else out, 0
    while done < out.nbytes:
        count = os.preadv(fd, [view[done:]], start + done)
        if not count:
            break
        done += count
    return done


Odd = Literal["link", "special file", "name"]
"""What is no file of a checkpoint: a symbolic link; a pipe, socket or device; whatever has a name that `checked_path` refuses."""
Passed = Callable[[str, Odd], object]


def nobody(_name: str, _odd: Odd) -> None:
    """Is told, and nobody wants to know."""


def walk(root: str, prefix: str, skips: Callable[[str], bool], passed: Passed = nobody) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file below ``prefix`` ("" or ending in "/"), sorted by whole name.

    ``skips`` is asked about the last part of every file's and directory's name.  Names that `checked_path` refuses are no
    checkpoint's and are left out; ``passed`` is told of all that is.  What vanishes meanwhile was never there.  No descriptor is open while the caller works.
    """
    for key, found in sorted(_listing(root, prefix, skips, passed)):
        if found is None:
            yield from walk(root, prefix + key, skips, passed)
        else:
            yield prefix + key, found


def directories(root: str, prefix: str, skips: Callable[[str], bool]) -> list[str]:
    """The names of those directly below ``prefix``, in any order; as `walk` for the rest."""
    return [key[:-1] for key, found in _listing(root, prefix, skips) if found is None]


def _listing(
    root: str, prefix: str, skips: Callable[[str], bool], passed: Passed = nobody
) -> Iterator[tuple[str, os.stat_result | None]]:
    """One directory: files with what stat says, directories with a slash and ``None``.

    The slash makes names sort as the whole paths do: ``a.b`` comes before ``a/b``.
    """
    try:
        at = open_directory(root, prefix.split("/")[:-1], os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        if prefix and is_absence(e):
            return
        e.filename = prefix or root  # else it is the last part alone
        raise
    try:
        with os.scandir(at) as entries:
            for entry in entries:
                if skips(entry.name) or _NFS_REMAINS.fullmatch(entry.name):
                    continue
                if not _is_plain(entry.name):
                    passed(prefix + entry.name, "name")
                elif entry.is_dir(follow_symlinks=False):
                    yield entry.name + "/", None
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        yield entry.name, entry.stat(follow_symlinks=False)
                else:
                    passed(prefix + entry.name, "link" if entry.is_symlink() else "special file")
    finally:
        let_go(at)


def _is_plain(part: str) -> bool:
    try:
        return bool(checked_path(part))
    except Corrupt:
        return False  # the question was whether it is refused


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
        return read_at(self._fd, start, out)

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
