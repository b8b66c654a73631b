"""Open files below a directory component by component, so that no link is followed.

The root itself may be a link, since the operator named it. Functions here raise `OSError`;
`is_absence` says which of them mean that there is no such regular file. `ckptsync.walk` does the
same for directories that a trainer writes to, and for spools, which are examined on the way.

`OpenFiles` keeps a few files open, so that reading many pieces of one file opens it once and the
kernel reads ahead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Literal

from ckptsync.errors import Corrupt
from ckptsync.safe_names import checked_path

# O_PATH asks for no permission but search, and on NFS costs no round trip: a directory on the way
# is only passed through.
PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
# a pipe under a checkpoint's name must not hang the reader
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_OPENED = re.compile(r"/dev/stdin|/dev/fd/[0-9]+|/proc/self/fd/[0-9]+")
# a deleted file that some NFS client still has open
NFS_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")


def is_absence(e: OSError) -> bool:
    """Return whether an error says that the path is no file: absent, a link, or a socket."""
    return e.errno in _ABSENT


def close_quietly(at: int) -> None:
    """Close a descriptor that was only read from; an error of closing it is ignored.

    Nothing can be lost with it.
    """
    with contextlib.suppress(OSError):
        os.close(at)


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return at most ``limit + 1`` bytes of a regular file that the user names, through links.

    A pipe could be waited for without end, and a device has none; what the user's own shell has
    opened (``/dev/stdin``, ``/dev/fd/63``) is read as it is.
    """
    is_opened = _OPENED.fullmatch(os.fspath(path)) is not None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_opened else os.O_NONBLOCK))
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not is_opened and not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return file.read(limit + 1)


def replace_named(path: Path, data: bytes) -> None:
    """Write a file that everybody may read, whole, in place of what has its name.

    Through no link that somebody put there, whatever its draft is called.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, 0o644)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def open_below(root: str, way: Sequence[str], flags: int = PASS) -> int:
    """Return a descriptor of the directory ``way`` below ``root``, for the caller to close."""
    at = os.open(root, flags)
    for part in way:
        try:
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=at)
        finally:
            close_quietly(at)
        at = below
    return at


def path_of_open(at: int, path: str) -> str:
    """Return a root that is the open directory ``at``, whatever its ``path`` names later.

    The path itself where the system has no names for what is open.
    """
    name = f"/proc/self/fd/{at}"
    return name if os.path.isdir(name) else path  # noqa: PTH112 - no path of a file


@contextlib.contextmanager
def parent_of(root: str, name: str) -> Iterator[tuple[int, str]]:
    """Open the directory that ``name`` is in; give it, and the last part of ``name``."""
    *way, last = name.split("/")
    at = open_below(root, way)
    try:
        yield at, last
    finally:
        close_quietly(at)


def open_file(root: str, name: str) -> int:
    """Return a descriptor of a regular file, for the caller to close."""
    with parent_of(root, name) as (at, last):
        return open_regular(at, last, name)


def open_regular(at: int, last: str, name: str = "") -> int:
    """Return a descriptor of the regular file ``last`` in an open directory.

    ``name`` is for the error.
    """
    fd = os.open(last, _FILE, dir_fd=at)
    try:
        _regular(os.fstat(fd), name or last)
    except BaseException:
        close_quietly(fd)
        raise
    return fd


def stat_file(root: str, name: str) -> os.stat_result:
    """Return what `os.stat` says of a regular file."""
    with parent_of(root, name) as (at, last):
        return _regular(os.stat(last, dir_fd=at, follow_symlinks=False), name)


def stat_opened(root: str, name: str) -> os.stat_result:
    """Return what `os.stat` says of a regular file, once it was opened.

    So a client of NFS asks the server, and not what it remembers (close-to-open, nfs(5)).
    """
    fd = open_file(root, name)
    try:
        return os.fstat(fd)
    finally:
        close_quietly(fd)


def unlink(root: str, name: str) -> None:
    """Take a regular file's name away."""
    with parent_of(root, name) as (at, last):
        _regular(os.stat(last, dir_fd=at, follow_symlinks=False), name)
        os.unlink(last, dir_fd=at)


def refresh(root: str, name: str) -> None:
    """Let no directory on the way to ``name`` be remembered to lack it.

    A client of NFS drops what it remembers of a directory's names once it sees that the directory
    has changed, and opening one for reading, as `PASS` does not, makes it ask (nfs(5), "Directory
    entry caching"; Linux, fs/nfs/dir.c, nfs_lookup_verify_inode).
    """
    # it may be passed through without being read: then only time tells
    with contextlib.suppress(PermissionError):
        close_quietly(open_below(root, name.split("/")[:-1], os.O_RDONLY | os.O_DIRECTORY))


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
"""What is no file of a checkpoint: a link; a pipe, socket or device; a name that is not plain."""
Passed = Callable[[str, Odd], object]


def is_plain_path(name: str) -> bool:
    """Return whether `checked_path` takes a name."""
    try:
        checked_path(name)
    except Corrupt:
        return False
    return True


def files_below(
    root: str, prefix: str, skips: Callable[[str], bool], passed: Passed = lambda *_: None
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every regular file below ``prefix`` ("" or ending in "/"), sorted by whole name.

    ``skips`` is asked about the last part of every file's and directory's name. Names that
    `checked_path` refuses are no checkpoint's and are left out; ``passed`` is called with all that
    is. What vanishes meanwhile was never there.
    """
    at = _open_prefix(root, prefix)
    if at is None:
        return
    try:
        for name, info in tree(at, prefix, partial(_is_skipped, skips, passed), _raise_unless_gone):
            if stat.S_ISREG(info.st_mode):
                yield name, info
            else:
                passed(name, "link" if stat.S_ISLNK(info.st_mode) else "special file")
    finally:
        close_quietly(at)


def directories_below(root: str, prefix: str, skips: Callable[[str], bool]) -> list[str]:
    """Return the names of the directories directly below ``prefix``, in any order.

    As `files_below` for the rest.
    """
    at = _open_prefix(root, prefix)
    if at is None:
        return []
    try:
        with os.scandir(at) as entries:
            return [
                entry.name
                for entry in entries
                if not _is_skipped(skips, lambda *_: None, prefix, entry.name)
                and entry.is_dir(follow_symlinks=False)
            ]
    finally:
        close_quietly(at)


def open_directory_in(at: int, path: str) -> int:
    """Return a descriptor of the directory in an open one that ``path`` ends with, for reading."""
    return os.open(path.rpartition("/")[2], _LISTED, dir_fd=at)


def tree(
    at: int,
    prefix: str,
    skips: Callable[[str, str], bool],
    failed: Callable[[OSError, str], object],
    enter: Callable[[int, str], int] = open_directory_in,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all but directories below an open directory, sorted by whole name; follow no link.

    ``prefix`` comes before each name. ``skips`` is asked with what comes before a name, and the
    name; a directory that it skips is not entered. ``failed`` gets each error and its path: it
    raises, or what it is about was never there. ``enter`` opens a directory in an open one, by its
    path. While the caller works, the directories on the way to what was yielded are open.
    """
    named: list[os.DirEntry[str]] = []
    listed: list[tuple[str, os.DirEntry[str]]] = []
    try:
        with os.scandir(at) as entries:
            named += [entry for entry in entries if not skips(prefix, entry.name)]
    except OSError as e:
        failed(e, prefix)
    for entry in named:
        try:
            # The slash makes names sort as whole paths do: `a.b` comes before `a/b`.
            end = "/" if entry.is_dir(follow_symlinks=False) else ""
        except OSError as e:  # some file systems have to be asked about each
            failed(e, prefix + entry.name)
            continue
        listed.append((entry.name + end, entry))
    listed.sort(key=itemgetter(0))
    for key, entry in listed:
        path = prefix + key
        try:
            if key[-1] != "/":
                info = entry.stat(follow_symlinks=False)
            else:
                below = enter(at, path[:-1])
        except OSError as e:
            failed(e, path)
            continue
        if key[-1] != "/":
            yield path, info
            continue
        try:
            yield from tree(below, path, skips, failed, enter)
        finally:
            close_quietly(below)


def _open_prefix(root: str, prefix: str) -> int | None:
    """Return a descriptor of the directory ``prefix``, or None if it is not there.

    The root must be there.  Raises OSError, with the path in the store as its name.
    """
    try:
        return open_below(root, prefix.split("/")[:-1], _LISTED & ~os.O_NOFOLLOW)
    except OSError as e:
        if prefix and is_absence(e):
            return None
        e.filename = prefix or root  # else it is the last part alone
        raise


def _is_skipped(skips: Callable[[str], bool], passed: Passed, prefix: str, name: str) -> bool:
    if skips(name) or (name.startswith(".nfs") and NFS_REMAINS.fullmatch(name)):
        return True
    if is_plain_path(name):
        return False
    passed(prefix + name, "name")
    return True


def _raise_unless_gone(error: OSError, path: str) -> None:
    if not is_absence(error):
        error.filename = path
        raise error


MOST = 128  # far below the usual limit of 1024 descriptors, also where two checkpoints are overlaid


class OpenFile:
    """A descriptor that is closed when nobody refers to it any more.

    So a file may be dropped from `OpenFiles` while another thread reads it: its number is not
    reused under that thread. Methods only, since a bare number would not keep the file open.
    """

    __slots__ = ("__weakref__", "_fd", "since")

    def __init__(self, fd: int) -> None:
        self._fd, self.since = fd, time.monotonic()
        weakref.finalize(self, os.close, fd)

    def read_at(self, start: int, out: memoryview) -> int:
        """Fill ``out``; fewer bytes than it holds are returned only where the file ends.

        Raises OSError.
        """
        return read_at(self._fd, start, out)

    def links(self) -> int:
        """How many names the file has; none once it was replaced or deleted.  Raises OSError."""
        return os.fstat(self._fd).st_nlink

    def is_same(self, fd: int) -> bool:
        """Whether ``fd`` is a descriptor of the same file.  Raises OSError."""
        return os.path.sameopenfile(self._fd, fd)


class OpenFiles:
    """The files used last, by name.  Threads may share it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenFile | None:
        """Return the open file, if it is kept."""
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
            return self._files.get(name)

    def put(self, name: str, fd: int) -> OpenFile:
        """Keep an open file in place of what has this name; the one used longest ago may go."""
        file = OpenFile(fd)
        with self._lock:
            self._files[name] = file
            self._files.move_to_end(name)
            if len(self._files) > self._most:
                self._files.popitem(last=False)
        return file

    def forget(self, name: str) -> None:
        """Keep the file no longer."""
        with self._lock:
            self._files.pop(name, None)

    def forget_older(self, seconds: float) -> None:
        """Close the files that were opened longer ago.

        A deleted file that is kept open still takes up space.
        """
        now = time.monotonic()
        with self._lock:
            for name in [n for n, file in self._files.items() if now - file.since > seconds]:
                del self._files[name]
