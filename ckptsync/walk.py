"""Walking a directory that somebody else is writing to: no link is followed, and what vanishes on the way was not there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError

OURS = "_ckptsync"
_PATH = attrgetter("path")
_NO_CONTENT = (OURS, ".ckptsync")  # a spool, and the records of a store that somebody copied by hand
DEEPEST = 32  # real checkpoints nest three deep
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# safetensors 0.8's temporary name, torch DCP's, a download's, and the sentinel of Trainer's just-in-time save
_PARTIAL = re.compile(r"\.tmp.{6}|\.metadata\.tmp|.+\.part|checkpoint-is-incomplete\.txt", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Stat:
    """A regular file: POSIX path below the root that was walked, bytes, mtime in ns, and which file it really is.

    ``ctime`` (ns) and ``links`` are no part of what it is, since every pin changes them; see `was_touched`.
    """

    path: str
    size: int
    mtime: int
    inode: int
    device: int
    ctime: int = field(default=0, compare=False)
    links: int = field(default=0, compare=False)

    def is_file_of(self, other: Stat) -> bool:
        """Whether both are one file: the same inode, or (a reflink) a copy with the same size and mtime."""
        return (self.inode, self.device) == (other.inode, other.device) or (self.size, self.mtime) == (other.size, other.mtime)

    def was_touched(self, later: Stat) -> bool:
        """Whether somebody did something to it in between: also if he set its mtime back, which only ctime tells.

        A name that was linked or taken away (a pin, rotation) changes ctime, too, and says nothing of the bytes.
        """
        return self != later or (self.ctime != later.ctime and self.links == later.links)


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a root.  ``partial``: files that a writer has not finished.  ``others``: links, sockets and the like."""

    files: tuple[Stat, ...] = ()
    partial: tuple[Stat, ...] = ()
    others: tuple[str, ...] = ()


def walk(root: Path, only: Collection[str] | None = None) -> Listing:
    """Everything below ``root`` in order of names; nothing if it is gone or a link.  Raises ConfigError (may not be read).

    ``only``: of what lies directly in it just these names, where the rest is not of the same checkpoint.
    """
    files: list[Stat] = []
    partial: list[Stat] = []
    others: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open(root, _DIRECTORY)
        except OSError as e:
            _vanished_or_raise(e, root)
            return Listing()
        stack.callback(os.close, fd)
        for path, info in _below(fd, "", root) if only is None else _named(fd, only, root):
            if not stat.S_ISREG(info.st_mode):
                others.append(path)
                continue
            found = partial if _PARTIAL.fullmatch(path.rpartition("/")[2]) else files
            found.append(_stat(path, info))
    return Listing(tuple(sorted(files, key=_PATH)), tuple(sorted(partial, key=_PATH)), tuple(sorted(others)))


def look(fd: int, path: str) -> Stat:
    """The state of an open file, under the name it is known by."""
    return _stat(path, os.fstat(fd))


def open_file(root: Path, path: str) -> int:
    """A descriptor of a regular file below ``root``, with no link followed; raises Incomplete (gone) or ConfigError."""
    with opened_parent(root, path) as (parent, name):
        return open_in(parent, name, root, path)


def open_in(parent: int, name: str, root: Path, path: str) -> int:
    """The same in a directory that is open; ``root`` and ``path`` are for who reads the error."""
    try:
        # not blocking: a pipe that took the file's place would wait for a writer for ever
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except OSError as e:
        _vanished_or_raise(e, f"{root}/{path}")
        raise Incomplete(f"{root}/{path}: gone") from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Incomplete(f"{root}/{path}: no longer a regular file")
    return fd


@contextlib.contextmanager
def opened_parent(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """The directory that holds ``path`` below ``root``, opened link-free, and the last component; raises as `open_file`."""
    *folders, name = path.split("/")
    with contextlib.ExitStack() as stack:
        fd: int | None = None
        for folder in (str(root), *folders):
            try:
                fd = os.open(folder, _DIRECTORY, dir_fd=fd)
            except OSError as e:
                _vanished_or_raise(e, f"{root}/{path}")
                raise Incomplete(f"{root}/{path}: gone") from e
            stack.callback(os.close, fd)
        assert fd is not None
        yield fd, name


def _below(fd: int, prefix: str, root: Path, depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
    if depth > DEEPEST:
        raise Corrupt(f"{root}/{prefix}: {depth} directories deep, at most {DEEPEST} expected")
    try:
        with os.scandir(fd) as entries:
            names = sorted(e.name for e in entries if e.name not in _NO_CONTENT)
    except OSError as e:
        _vanished_or_raise(e, f"{root}/{prefix}")
        return
    for name in names:
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            below = os.open(name, _DIRECTORY, dir_fd=fd) if stat.S_ISDIR(info.st_mode) else None
        except OSError as e:
            _vanished_or_raise(e, f"{root}/{prefix}{name}")
            continue
        if below is None:
            yield prefix + name, info
            continue
        try:
            yield from _below(below, f"{prefix}{name}/", root, depth + 1)
        finally:
            os.close(below)


def _named(fd: int, names: Collection[str], root: Path) -> Iterator[tuple[str, os.stat_result]]:
    for name in sorted(names):
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as e:
            _vanished_or_raise(e, f"{root}/{name}")
            continue
        if not stat.S_ISDIR(info.st_mode):
            yield name, info


def _stat(path: str, info: os.stat_result) -> Stat:
    return Stat(path, info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev, info.st_ctime_ns, info.st_nlink)


def _vanished_or_raise(error: OSError, path: object) -> None:
    """Trainers delete while we look (rotation; on NFS, files go stale), and a link is as good as nothing: nothing else is silent."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or error.errno in (errno.ELOOP, errno.ESTALE):
        return
    if isinstance(error, PermissionError):
        raise ConfigError(f"{path}: may not be read by uid {os.geteuid()}", hint="run the worker as the user who trains") from error
    raise StoreError(f"{path}: {error.strerror}", hint="look at the disk that the trainer writes to") from error
