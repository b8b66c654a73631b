"""Every access to what lies in a spool: by descriptors of directories that `ckptsync.walk.open_directory` has examined, never through a link.

A path here is relative to a spool (``<output_dir>/_ckptsync/…``) and is opened step by step for each call, so that nobody can change what it means in
between, and everything may be deleted at any moment.  Directories are made with mode 0700, whatever the umask.  Files are made under names of chance, new and
no links, and renamed to their own.  A file that is not a regular one of this user's is no file.

Functions raise OSError unless they say otherwise; `ckptsync.walk.UnsafeSpool` is one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ckptsync.errors import ConfigError, Incomplete, StoreError
from ckptsync.walk import UnsafeSpool, open_directory, open_spool, open_step, split

NO_LINKS = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
LARGEST = 64 * 1024 * 1024  # bytes of a small file: the commit of 500,000 files
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in a file's location is not waited for
FRESH = ".fresh-"  # begins the name of a file that is being written


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """What the system refuses below ``path``, as one of our errors: Incomplete (gone), ConfigError (not ours), StoreError (the disk)."""
    try:
        yield
    except UnsafeSpool:
        raise
    except PermissionError as e:
        raise ConfigError(f"{path}: may not be written by uid {os.geteuid()}", hint="run the worker as the user who trains") from e
    except (FileNotFoundError, NotADirectoryError) as e:
        raise Incomplete(f"{path}: gone", hint="it is made again with the next look") from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}", hint="look at the disk that the trainer writes to") from e


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a directory in a spool; outside of one there is none to be had here."""
    if not split(folder)[1]:
        raise UnsafeSpool(folder, "in no spool", hint="this is a defect of ckptsync: report it")
    fd = open_directory(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def make(folder: Path) -> None:
    """A directory, and those above it as far as they are in the spool; never the output directory, which somebody may just have removed."""
    with contextlib.suppress(FileNotFoundError), opened(folder):
        return
    home, steps = split(folder)
    fd = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    at = home
    try:
        for n, step in enumerate(steps):
            at /= step
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700, dir_fd=fd)
            below = open_step(fd, step, at) if n else open_spool(fd, home)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)


def make_new(folder: Path) -> None:
    """A directory that was not there, in one that is; raises FileExistsError for one that was."""
    with opened(folder.parent) as fd:
        os.mkdir(folder.name, 0o700, dir_fd=fd)


def names(folder: Path) -> list[str]:
    """What is in a directory, in order."""
    with opened(folder) as fd:
        return names_in(fd)


def names_in(folder: int) -> list[str]:
    """The same of an open directory."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def children(folder: Path) -> list[Path]:
    """Paths of all that is in it; none where nothing was ever kept, or somebody deleted it.  Raises as `refusals`."""
    with contextlib.suppress(Incomplete), refusals(folder):
        return [folder / name for name in names(folder)]
    return []


def status(path: Path) -> os.stat_result | None:
    """What is there, without following a link; ``None`` if nothing is."""
    try:
        with opened(path.parent) as fd:
            return os.stat(path.name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_folder(path: Path) -> bool:
    """Whether a directory is there."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def read(path: Path, largest: int = LARGEST, last: int = 0) -> bytes | None:
    """What a file says, or its ``last`` bytes; ``None`` if there is none, or it is longer than ``largest``."""
    try:
        with opened(path.parent) as fd, os.fdopen(_regular(fd, path.name, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest and not last:
                return None
            file.seek(max(0, size - last) if last else 0)
            return file.read(largest)
    except FileNotFoundError:
        return None


def write(path: Path, data: bytes) -> None:
    """A small file, whole or not at all; never in a directory that somebody has just removed."""
    with opened(path.parent) as fd, _fresh(fd) as (name, out):
        out.write(data)
        out.close()
        os.replace(name, path.name, src_dir_fd=fd, dst_dir_fd=fd)


def written(folder: Path, name: str, told: object) -> None:
    """The same of JSON."""
    write(folder / name, json.dumps(told).encode() + b"\n")


def append(path: Path) -> BinaryIO:
    """A file to add to, for the caller to close."""
    with opened(path.parent) as fd:
        return os.fdopen(_regular(fd, path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def lock_file(path: Path, *, is_new: bool = True) -> int:
    """A descriptor to lock, for the caller to close; ``is_new``: make the file if it is not there."""
    with opened(path.parent) as fd:
        return _regular(fd, path.name, os.O_RDWR | (os.O_CREAT if is_new else 0))


def create(path: Path) -> bool:
    """Whether this call made an empty file there: of several callers one is told so."""
    with opened(path.parent) as fd:
        try:
            os.close(os.open(path.name, os.O_WRONLY | _NEW, 0o600, dir_fd=fd))
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def copy_of(like: int, beside: Path, target: int, name: str) -> Iterator[BinaryIO]:
    """A new file in the directory ``beside`` for a copy of ``like``, an open one; at the end it gets its ``name`` in an open directory, unless the caller raises, or has closed it.

    Others may do with it no more than with ``like``.
    """
    # trainers write weights that are their user's alone (safetensors 0.8), and some files are read only
    mode = os.fstat(like).st_mode & 0o777 | stat.S_IWUSR  # and never S_ISUID: the copy is this user's
    with opened(beside) as fd, _fresh(fd, mode) as (fresh, out):
        yield out  # who sets its times has flushed it
        if out.closed:
            return
        out.flush()
        os.replace(fresh, name, src_dir_fd=fd, dst_dir_fd=target)


class Tree:
    """Files below a directory, by names that have directories in them: those are made as they are needed, and stay open until the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[str, int] = {}

    def __enter__(self) -> Tree:  # noqa: PYI034  # no class is derived from it
        make_in(self._root)
        self._open[""] = open_directory(self._root)
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def place(self, name: str) -> tuple[int, str]:
        """The directory that a file belongs into, open, and its last part."""
        folder, _, last = name.rpartition("/")
        return self._folder(folder), last

    def _folder(self, name: str) -> int:
        if name not in self._open:
            above, _, last = name.rpartition("/")
            fd = self._folder(above)
            with contextlib.suppress(FileExistsError):
                os.mkdir(last, 0o700, dir_fd=fd)
            self._open[name] = open_step(fd, last, self._root / name)
        return self._open[name]


def make_in(folder: Path) -> None:
    """A directory, in one that is there."""
    with opened(folder.parent) as fd, contextlib.suppress(FileExistsError):
        os.mkdir(folder.name, 0o700, dir_fd=fd)


def link(source: int, name: str, target: int, new: str) -> None:
    """A further name, in one open directory, of a file in another.  Raises FileNotFoundError for what is no regular file."""
    os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    found = os.stat(new, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):  # a link took the file's location since it was seen
        os.unlink(new, dir_fd=target)
        raise FileNotFoundError(errno.ENOENT, "no longer a regular file", name)


def link_or_copy(source: Path, path: Path) -> None:
    """A second name for a small file of the spool, or a copy where there are no links."""
    with opened(source.parent) as fd, opened(path.parent) as to:
        try:
            link(fd, source.name, to, path.name)
        except OSError as e:
            if e.errno not in (errno.EPERM, *NO_LINKS):
                raise
            with (
                os.fdopen(_regular(fd, source.name, os.O_RDONLY), "rb") as file,
                copy_of(file.fileno(), path.parent, to, path.name) as out,
            ):
                shutil.copyfileobj(file, out)
                out.flush()
                mtime = os.fstat(file.fileno()).st_mtime_ns
                os.utime(out.fileno(), ns=(mtime, mtime))


def pulse(path: Path) -> None:
    """Let a file's time be now."""
    with opened(path.parent) as fd:
        os.utime(path.name, dir_fd=fd, follow_symlinks=False)


def unlink(path: Path) -> None:
    """Take a file's name away; it may be gone."""
    with contextlib.suppress(FileNotFoundError), opened(path.parent) as fd:
        os.unlink(path.name, dir_fd=fd)


def rename(path: Path, target: Path) -> None:
    """Move a file or a directory within the spool; a file that stands there goes."""
    with opened(path.parent) as fd, opened(target.parent) as to:
        os.rename(path.name, target.name, src_dir_fd=fd, dst_dir_fd=to)


def renamed(path: Path, target: Path) -> bool:
    """Whether we moved it: not if somebody stands there already (with something in it), nor if it is gone."""
    try:
        rename(path, target)
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            return False
        raise
    return True


def remove(path: Path) -> None:
    """With all that is in it; it may be gone.  A link goes, and not what it leads to."""
    with contextlib.suppress(FileNotFoundError), opened(path.parent) as fd:
        remove_in(fd, path.name)


def newest(path: Path) -> float:
    """When something was last done to a directory, or to anything in it, seconds since the epoch: a rename shows in the ctime alone."""
    with opened(path.parent) as fd:
        return _newest(fd, path.name)


def _newest(above: int, name: str) -> float:
    info = os.stat(name, dir_fd=above, follow_symlinks=False)
    times = [info.st_mtime, info.st_ctime]
    if stat.S_ISDIR(info.st_mode):
        with _below(above, name) as fd:
            times += [_newest(fd, each) for each in names_in(fd)]
    return max(times)


def remove_in(above: int, name: str) -> None:
    """The same in an open directory.  Raises FileNotFoundError if it is gone."""
    if name in (".", ".."):
        raise UnsafeSpool(Path(name), "leads out of the spool", hint="remove the file that says so")
    try:
        os.unlink(name, dir_fd=above)
    except IsADirectoryError:
        with _below(above, name) as fd:
            for each in names_in(fd):
                with contextlib.suppress(FileNotFoundError):  # another is removing it, too
                    remove_in(fd, each)
        os.rmdir(name, dir_fd=above)


@contextlib.contextmanager
def _below(above: int, name: str) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _fresh(fd: int, mode: int = 0o600) -> Iterator[tuple[str, BinaryIO]]:
    """A new file under a name of chance, which goes at the end if it is still there."""
    name = f"{FRESH}{secrets.token_hex(8)}"
    with os.fdopen(os.open(name, os.O_RDWR | _NEW, mode, dir_fd=fd), "wb") as out:
        try:
            yield name, out
        finally:
            with contextlib.suppress(OSError):  # it has its own name now, or somebody deleted the directory
                os.unlink(name, dir_fd=fd)


def _regular(fd: int, name: str, flags: int) -> int:
    """Raises FileNotFoundError for what is no regular file of this user's, or has other names where it is added to."""
    try:
        file = os.open(name, flags | _OLD, 0o600, dir_fd=fd)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
            raise FileNotFoundError(errno.ENOENT, "no regular file of this user's", name) from e
        raise
    found = os.fstat(file)
    is_shared = bool(flags & os.O_APPEND) and found.st_nlink > 1
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), os.fstat(fd).st_uid) or is_shared:
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "no regular file of this user's alone", name)
    return file
