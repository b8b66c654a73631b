"""Walking a directory that somebody else is writing to: no link is followed, and what vanishes on the way was not there.

A spool (`OURS`) is opened step by step: each directory from there on is a directory, this user's, and writable by nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
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


_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # asks for no right to list
_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NOBODY = 65534
_made_as: dict[tuple[int, int], int] = {}  # device and user: whose a new file of that user is there


class UnsafeSpool(ConfigError, PermissionError):
    """A directory of the spool belongs to somebody else, may be written by others, or is none: nothing in it is read, written or removed.

    Also an `OSError`, since it is what opening a path raises.
    """

    def __init__(self, path: Path, why: str, *, hint: str) -> None:
        super().__init__(f"{path}: {why}", hint=hint)
        self.errno, self.strerror = errno.EACCES, why

    def __str__(self) -> str:
        return str(self.args[0])


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
            fd = open_directory(root)
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


def open_directory(path: Path) -> int:
    """A descriptor of a directory that is no link; the path before its last part is the caller's to trust.

    Of a directory in a spool only the output directory is: from ``_ckptsync`` on each step is opened in the one before it and examined.
    Raises OSError; `UnsafeSpool` where a step is not this user's alone.
    """
    home, steps = split(path)
    if not steps:
        return os.open(home, _DIRECTORY)
    above = os.open(home, _SEARCH)
    try:
        fd = open_spool(above, home)
    finally:
        os.close(above)
    try:
        at = home / steps[0]
        for step in steps[1:]:
            at /= step
            below = open_step(fd, step, at)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The output directory, and the steps from there into its spool, ``_ckptsync`` first; no steps for a path that is in no spool."""
    parts = path.parts
    if OURS not in parts:
        return path, ()
    at = len(parts) - 1 - parts[::-1].index(OURS)
    return Path(*parts[:at]), parts[at:]


def open_step(above: int, name: str, path: Path) -> int:
    """A directory in an open one of a spool; ``path`` is for who reads the error.  Raises as `open_directory`."""
    if name == "..":
        raise UnsafeSpool(path, "leads out of the spool", hint="remove the file that says so")
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=above)
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise UnsafeSpool(path, "no directory, but a link or a file", hint=f"look who made it, and remove {path}") from None
    return _examined(fd, path)


def _open_below(above: int, name: str, root: Path) -> int:
    return open_step(above, name, root / name) if split(root)[1] else os.open(name, _DIRECTORY, dir_fd=above)


def is_kept(info: os.stat_result, fd: int | None = None) -> bool:
    """Whether a directory belongs to this user or root, and nobody else can remove or replace a name in it that is not his own.

    Its group may write, since some systems give each user a group of his own and a umask for it.  ``fd``: where it is open, file systems
    are asked whose files this user's are there (NFS's ``all_squash``, mounts with ``uid=``).
    """
    is_ours = info.st_uid == 0 or (_is_ours(fd, info) if fd is not None else info.st_uid == os.geteuid())
    return is_ours and (not info.st_mode & stat.S_IWOTH or bool(info.st_mode & stat.S_ISVTX))


def open_spool(above: int, home: Path) -> int:
    """The spool of an output directory that is open; ``home`` is for who reads the error.  Raises as `open_directory`.

    It may be a link to a directory elsewhere, if nobody else can have made that.
    """
    path, info = home / OURS, os.stat(OURS, dir_fd=above, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        return open_step(above, OURS, path)
    around = os.fstat(above)
    if {info.st_uid, around.st_uid} - {
        os.geteuid(),
        0,
    } or around.st_mode & _WRITE:  # sticky or not: a link of ours from elsewhere can be moved there
        raise UnsafeSpool(path, "a link that somebody else may have made", hint=f"remove it, or let nobody else write to {home}")
    return _examined(os.open(OURS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above), path)


def _examined(fd: int, path: Path) -> int:
    """``fd`` itself, of a directory that is this user's alone; what others may write to by its mode alone, they may no more."""
    try:
        _check_alone(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_alone(fd: int, path: Path) -> None:
    info = os.fstat(fd)
    if not _is_ours(fd, info):
        hint = "run the worker as the user who trains; remove the directory if it is nobody's"
        raise UnsafeSpool(path, f"belongs to uid {info.st_uid}, and this is uid {os.geteuid()}", hint=hint)
    if info.st_mode & _WRITE and not os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        os.fchmod(fd, info.st_mode & 0o777 & ~_WRITE)  # a service may not set S_ISGID, which directories inherit
        if os.fstat(fd).st_mode & _WRITE:
            raise UnsafeSpool(path, "others may write there, and its mode cannot be changed", hint="mount it with dir_mode=0755")


def _is_ours(fd: int, info: os.stat_result) -> bool:
    """Whether an open directory is this user's, or, where servers and mounts decide whose a file is, has the owner of a new file of his.

    Root tries this only where its files become nobody's, as NFS's ``root_squash`` makes them, and makes nothing in another user's directory.
    """
    user = os.geteuid()
    if info.st_uid == user or (user == 0 and info.st_uid != _NOBODY):
        return info.st_uid == user
    if (info.st_dev, user) not in _made_as:
        name = f".owner-{secrets.token_hex(8)}"
        try:
            made = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
        except OSError:
            return False  # not to be written to either way
        try:
            _made_as[info.st_dev, user] = os.fstat(made).st_uid
        finally:
            os.close(made)
            with contextlib.suppress(OSError):  # in somebody else's directory he may take it away first
                os.unlink(name, dir_fd=fd)
    return info.st_uid == _made_as[info.st_dev, user]


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
        fd = -1
        for folder in ("", *folders):
            try:
                fd = _open_below(fd, folder, root) if folder else open_directory(root)
            except OSError as e:
                _vanished_or_raise(e, f"{root}/{path}")
                raise Incomplete(f"{root}/{path}: gone") from e
            stack.callback(os.close, fd)
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
            below = _open_below(fd, name, root) if stat.S_ISDIR(info.st_mode) else None
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
    if isinstance(error, UnsafeSpool):
        raise error
    if isinstance(error, PermissionError):
        raise ConfigError(f"{path}: may not be read by uid {os.geteuid()}", hint="run the worker as the user who trains") from error
    raise StoreError(f"{path}: {error.strerror}", hint="look at the disk that the trainer writes to") from error
