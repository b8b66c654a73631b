"""Open files below a directory component by component, so that no link is followed.

The root itself may be a link, since the operator named it. Functions here raise `OSError`;
`is_absence` says whether that means that there is no such regular file. `ckptsync.walk` adds rules
for directories that a trainer writes to, and for spools, whose every step is examined.

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

# For directories on the way to a file: O_PATH asks for no permission but search, and costs no round
# trip on NFS.
PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
# a pipe under a checkpoint's name must not hang the reader
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_OPENED = re.compile(r"/dev/stdin|/dev/fd/[0-9]+|/proc/self/fd/[0-9]+")
# a deleted file that some NFS client still has open
NFS_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")


def is_absence(e: OSError) -> bool:
    """Return whether an error says that the path is no file: it is absent, a link, or a socket."""
    return e.errno in _ABSENT


def close_quietly(descriptor: int) -> None:
    """Close a descriptor that was only read from, and ignore an error: no data can be lost."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return at most ``limit + 1`` bytes of a file that the user names; links are followed.

    More than ``limit`` bytes mean that it is too long: the caller must check. Raises OSError, also
    for a directory, a pipe or a device, which may have no end. Only what the user's own shell has
    opened (``/dev/stdin``, ``/dev/fd/63``) is read whatever it is, and may block.
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
    """Write a whole file that everybody may read, in place of the file at ``path``; do not sync it.

    A draft with a random name is renamed to it, so no link that somebody put there is followed.
    Raises OSError; then the draft is deleted.
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


def open_below(root: str, parts: Sequence[str], flags: int = PASS) -> int:
    """Return a descriptor, for the caller to close, of the directory ``parts`` below ``root``.

    Only ``root`` may be a link. Raises OSError.
    """
    directory = os.open(root, flags)
    for part in parts:
        try:
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=directory)
        finally:
            close_quietly(directory)
        directory = below
    return directory


def path_of_open(directory: int, path: str) -> str:
    """Return a path that is the open directory ``directory``, whatever ``path`` names later.

    Return ``path`` itself where the system has no names for open files.
    """
    name = f"/proc/self/fd/{directory}"
    return name if os.path.isdir(name) else path  # noqa: PTH112 - no path of a file


@contextlib.contextmanager
def parent_of(root: str, name: str) -> Iterator[tuple[int, str]]:
    """Open the directory that ``name`` is in; yield its descriptor, and the last part of ``name``.

    The descriptor is closed at the end of the block. Raises OSError.
    """
    *folders, last = name.split("/")
    directory = open_below(root, folders)
    try:
        yield directory, last
    finally:
        close_quietly(directory)


def open_file(root: str, name: str) -> int:
    """Return a descriptor, for the caller to close, of a regular file; raise OSError if none."""
    with parent_of(root, name) as (directory, last):
        return open_regular(directory, last, name)


def open_regular(directory: int, last: str, name: str = "") -> int:
    """Return a descriptor, for reading, of the regular file ``last`` in the open ``directory``.

    The caller closes it. Raises OSError, FileNotFoundError for what is no regular file. ``name`` is
    for the error.
    """
    fd = os.open(last, _FILE, dir_fd=directory)
    try:
        _regular(os.fstat(fd), name or last)
    except BaseException:
        close_quietly(fd)
        raise
    return fd


def stat_file(root: str, name: str) -> os.stat_result:
    """Return what `os.stat` says of a regular file; raise OSError if there is none."""
    with parent_of(root, name) as (directory, last):
        return _regular(os.stat(last, dir_fd=directory, follow_symlinks=False), name)


def stat_opened(root: str, name: str) -> os.stat_result:
    """Return what `os.fstat` says of a regular file after opening it.

    Raise OSError if there is none.

    A client of NFS asks the server when a file is opened, and not its cache (close-to-open,
    nfs(5)).
    """
    fd = open_file(root, name)
    try:
        return os.fstat(fd)
    finally:
        close_quietly(fd)


def unlink(root: str, name: str) -> None:
    """Remove the name of a regular file; raise OSError if there is none."""
    with parent_of(root, name) as (directory, last):
        _regular(os.stat(last, dir_fd=directory, follow_symlinks=False), name)
        os.unlink(last, dir_fd=directory)


def refresh(root: str, name: str) -> None:
    """Make a client of NFS forget that ``name`` was absent, by opening the directory that it is in.

    Opening one for reading, unlike `PASS`, makes the client ask, and drop cached names if it has
    changed (nfs(5), "Directory entry caching"; Linux, fs/nfs/dir.c, nfs_lookup_verify_inode). A
    directory that may not be read is passed over. Raises any other OSError.
    """
    # it may be passed through without being read: then only time tells
    with contextlib.suppress(PermissionError):
        close_quietly(open_below(root, name.split("/")[:-1], os.O_RDONLY | os.O_DIRECTORY))


def _regular(info: os.stat_result, name: str) -> os.stat_result:
    """Return ``info`` if it is of a regular file; raise FileNotFoundError with ``name`` if not."""
    if not stat.S_ISREG(info.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return info


def read_at(fd: int, start: int, out: memoryview) -> int:
    """Fill ``out`` with the bytes from ``start``, and return how many were read.

    They are fewer than ``out`` holds only if the file ends there. Raises OSError.
    """
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

    Lazy; nothing if ``prefix`` is absent. ``skips`` is called with the last part of each name of a
    file or directory: True leaves it out silently, as NFS's remains of deleted files are.
    ``passed`` is called with the name of each other thing left out: a link, a special file, or a
    name that `checked_path` refuses. A file that vanishes meanwhile counts as absent. Raises
    OSError, also if ``root`` is absent.
    """
    directory = _open_prefix(root, prefix)
    if directory is None:
        return
    try:
        for name, info in tree(
            directory, prefix, partial(_leave_out, skips, passed), _raise_unless_gone
        ):
            if stat.S_ISREG(info.st_mode):
                yield name, info
            else:
                passed(name, "link" if stat.S_ISLNK(info.st_mode) else "special file")
    finally:
        close_quietly(directory)


def directories_below(root: str, prefix: str, skips: Callable[[str], bool]) -> list[str]:
    """Return the names of the directories directly below ``prefix``, in any order; no links.

    Names are skipped as in `files_below`; [] if ``prefix`` is absent. Raises OSError.
    """
    directory = _open_prefix(root, prefix)
    if directory is None:
        return []
    try:
        with os.scandir(directory) as entries:
            return [
                entry.name
                for entry in entries
                if not _leave_out(skips, lambda *_: None, prefix, entry.name)
                and entry.is_dir(follow_symlinks=False)
            ]
    finally:
        close_quietly(directory)


def open_directory_in(directory: int, path: str) -> int:
    """Return a descriptor, for reading, of the last part of ``path`` in an open directory.

    Raises OSError; a link is not followed.
    """
    return os.open(path.rpartition("/")[2], _LISTED, dir_fd=directory)


def tree(
    directory: int,
    prefix: str,
    skips: Callable[[str, str], bool],
    failed: Callable[[OSError, str], object],
    enter: Callable[[int, str], int] = open_directory_in,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and `lstat` of all but directories below an open directory, sorted by whole name.

    Lazy; follow no link. ``prefix`` comes before each name. ``skips`` is called with the prefix of
    a name and the name; a directory that it skips is not entered. ``failed`` is called with each
    error and its path: it raises, or the path counts as absent. ``enter`` opens a directory, given
    by its path, in an open one. While the caller works, the directories above the yielded file are
    open.
    """
    kept_entries: list[os.DirEntry[str]] = []
    keyed_entries: list[tuple[str, os.DirEntry[str]]] = []
    try:
        with os.scandir(directory) as entries:
            kept_entries += [entry for entry in entries if not skips(prefix, entry.name)]
    except OSError as e:
        failed(e, prefix)
    for entry in kept_entries:
        try:
            # The slash makes names sort as whole paths do: `a.b` comes before `a/b`.
            suffix = "/" if entry.is_dir(follow_symlinks=False) else ""
        except OSError as e:  # some file systems need a call for each entry
            failed(e, prefix + entry.name)
            continue
        keyed_entries.append((entry.name + suffix, entry))
    keyed_entries.sort(key=itemgetter(0))
    for key, entry in keyed_entries:
        path = prefix + key
        try:
            if key[-1] != "/":
                info = entry.stat(follow_symlinks=False)
            else:
                below = enter(directory, path[:-1])
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
    """Return a descriptor of the directory ``prefix``, or None if it is absent.

    Raises OSError, with the path in the store as its file name, also if the root is absent.
    """
    try:
        return open_below(root, prefix.split("/")[:-1], _LISTED & ~os.O_NOFOLLOW)
    except OSError as e:
        if prefix and is_absence(e):
            return None
        e.filename = prefix or root  # which is else the last part alone
        raise


def _leave_out(skips: Callable[[str], bool], passed: Passed, prefix: str, name: str) -> bool:
    """Return whether `files_below` leaves a name out; report a name that is no plain path.

    It is reported by a call of ``passed``.
    """
    if skips(name) or (name.startswith(".nfs") and NFS_REMAINS.fullmatch(name)):
        return True
    if is_plain_path(name):
        return False
    passed(prefix + name, "name")
    return True


def _raise_unless_gone(error: OSError, path: str) -> None:
    """Set ``path`` as the file name of ``error``, and raise it, unless the path is absent."""
    if not is_absence(error):
        error.filename = path
        raise error


MOST = 128  # far below the usual limit of 1024 descriptors, also where two checkpoints are overlaid


class OpenFile:
    """A descriptor that is closed when no reference to this object is left.

    So `OpenFiles` may drop a file while another thread reads it: the number is not reused under
    that thread. It has only methods, since a bare number would not keep the file open.
    """

    __slots__ = ("__weakref__", "_fd", "since")

    def __init__(self, fd: int) -> None:
        self._fd, self.since = fd, time.monotonic()
        weakref.finalize(self, os.close, fd)

    def read_at(self, start: int, out: memoryview) -> int:
        """Fill ``out`` from ``start`` as `read_at` does, and return how many bytes were read.

        Raises OSError.
        """
        return read_at(self._fd, start, out)

    def links(self) -> int:
        """Return how many names the file has: none once replaced or deleted. Raises OSError."""
        return os.fstat(self._fd).st_nlink

    def is_same(self, fd: int) -> bool:
        """Return whether ``fd`` is a descriptor of the same file. Raises OSError."""
        return os.path.sameopenfile(self._fd, fd)


class OpenFiles:
    """The files that were used last, open, by name. Threads may share it.

    ``most``: how many it keeps.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenFile | None:
        """Return the open file, or None if it is not kept; it becomes the one used last."""
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
            return self._files.get(name)

    def put(self, name: str, fd: int) -> OpenFile:
        """Keep an open file under ``name``, and return it; it now owns ``fd``, and closes it.

        It replaces a file of that name; if there are too many, the one used longest ago is dropped.
        A dropped file is closed when its last reader lets go of it.
        """
        file = OpenFile(fd)
        with self._lock:
            self._files[name] = file
            self._files.move_to_end(name)
            if len(self._files) > self._most:
                self._files.popitem(last=False)
        return file

    def forget(self, name: str) -> None:
        """Drop the file of that name, if there is one."""
        with self._lock:
            self._files.pop(name, None)

    def forget_older(self, seconds: float) -> None:
        """Drop the files that were opened more than ``seconds`` (monotonic clock) ago.

        A deleted file takes up space as long as it is open.
        """
        now = time.monotonic()
        with self._lock:
            for name in [n for n, file in self._files.items() if now - file.since > seconds]:
                del self._files[name]
