"""Reads and writes a spool's files by descriptors of its directories, never through a link.

Other users may be able to replace directories by links, and everything in a spool may be deleted at
any moment.  So each directory is opened step by step (`ckptsync.walk.open_directory` examines it),
and files are named relative to that descriptor.

A path here lies in a spool (``<output_dir>/_ckptsync/…``).  A caller that reads several files holds
their directory open (`open_folder`, `open_folder_in`) and uses the functions ``…_in``; a single
file is reached by its path.  No descriptor outlives a listing, a pin or an upload, so a spool that
was removed and made again is the new one at the next call.

Directories are made with mode 0700, whatever the umask.  Files are written under random names, new
and no links, and then renamed.  A file that is not a regular one of this user's counts as missing.

Functions raise OSError unless they say otherwise; `ckptsync.walk.UnsafeSpool` is one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ckptsync.errors import ConfigError, Incomplete, StoreError
from ckptsync.walk import (
    UnsafeSpool,
    open_directory,
    open_spool,
    open_step,
    opened_directory,
    split,
)

NO_LINKS = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
LARGEST = 64 * 1024 * 1024  # bytes of a small file: the commit of 500,000 files
_STRETCH = 8 * 1024 * 1024  # bytes after which a stop is noticed
_FICLONE = 0x40049409  # _IOW(0x94, 9, int), the same on every Linux we run on
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in a file's location is not waited for
DRAFT_PREFIX = ".fresh-"  # begins the name of a file that is being written


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Raise one of ckptsync's errors for an OSError in the block, about ``path``.

    Incomplete: it is gone.  ConfigError: this user may not write it.  StoreError: anything else,
    mostly the disk.  UnsafeSpool stays what it is.
    """
    try:
        yield
    except UnsafeSpool:
        raise
    except PermissionError as e:
        raise ConfigError(
            f"{path}: may not be written by uid {os.geteuid()}",
            hint="run the worker as the user who trains",
        ) from e
    except (FileNotFoundError, NotADirectoryError) as e:
        raise Incomplete(f"{path}: gone", hint="the next scan makes it again") from e
    except OSError as e:
        raise StoreError(
            f"{path}: {e.strerror}", hint="look at the disk that the trainer writes to"
        ) from e


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Open a directory of a spool and yield its descriptor.

    Raise UnsafeSpool for any other directory.
    """
    if not split(folder)[1]:
        raise UnsafeSpool(folder, "in no spool", hint="this is a defect of ckptsync: report it")
    with opened_directory(folder) as fd:
        yield fd


@contextlib.contextmanager
def open_folder_in(above: int, path: Path) -> Iterator[int]:
    """Open ``path``, a directory in an open directory of a spool, and yield its descriptor."""
    fd = open_step(above, path.name, path)
    try:
        yield fd
    finally:
        os.close(fd)


def make_folders(folder: Path) -> None:
    """Make a directory and its parents in the spool, if they do not exist.

    Never makes the output directory: raises FileNotFoundError if somebody has removed it.
    """
    with contextlib.suppress(FileNotFoundError), open_folder(folder):
        return
    home, steps = split(folder)
    fd = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    path = home
    try:
        for n, step in enumerate(steps):
            path /= step
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700, dir_fd=fd)
            below = open_step(fd, step, path) if n else open_spool(fd, home)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)


def make_new_folder(folder: Path) -> None:
    """Make a directory in an existing one; raise FileExistsError if it exists already."""
    with open_folder(folder.parent) as fd:
        os.mkdir(folder.name, 0o700, dir_fd=fd)


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a directory."""
    with open_folder(folder) as fd:
        return list_names_in(fd)


def list_names_in(folder: int) -> list[str]:
    """Return the sorted names in an open directory."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def list_paths(folder: Path) -> list[Path]:
    """Return the paths of everything in a directory; none if it does not exist.

    Raises as `translate_errors`.
    """
    with contextlib.suppress(Incomplete), translate_errors(folder):
        return [folder / name for name in list_names(folder)]
    return []


def status(path: Path) -> os.stat_result | None:
    """Return the status of a file, without following a link; None if it does not exist."""
    try:
        with open_folder(path.parent) as fd:
            return status_in(fd, path.name)
    except FileNotFoundError:
        return None


def status_in(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a file of an open directory; None if it does not exist."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_folder(path: Path) -> bool:
    """Return whether a path is a directory."""
    info = status(path)
    return info is not None and stat.S_ISDIR(info.st_mode)


def read(path: Path, largest: int = LARGEST, last: int = 0) -> bytes | None:
    """Return the bytes of a file, or its last ``last`` bytes.

    None if there is no file, or it is longer than ``largest`` bytes and ``last`` is 0.
    """
    try:
        with open_folder(path.parent) as fd:
            return read_in(fd, path.name, largest, last)
    except FileNotFoundError:
        return None


def read_in(folder: int, name: str, largest: int = LARGEST, last: int = 0) -> bytes | None:
    """Return the bytes of a file of an open directory, or None, as `read` does."""
    try:
        with os.fdopen(_open_regular(folder, name, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest and not last:
                return None
            file.seek(max(0, size - last) if last else 0)
            return file.read(largest)
    except FileNotFoundError:
        return None


def write(path: Path, data: bytes) -> None:
    """Write or replace a small file, whole or not at all, in an existing directory."""
    with open_folder(path.parent) as fd:
        write_in(fd, path.name, data)


def write_in(folder: int, name: str, data: bytes) -> None:
    """Write a small file in an open directory, as `write` does."""
    with _create_draft(folder) as (draft, out):
        out.write(data)
        out.close()
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


def write_json(folder: Path, name: str, value: object) -> None:
    """Write a small file of JSON, whole or not at all."""
    write(folder / name, json.dumps(value).encode() + b"\n")


def append(path: Path) -> BinaryIO:
    """Open a file to append to, and make it if it does not exist; the caller closes it."""
    with open_folder(path.parent) as fd:
        return os.fdopen(_open_regular(fd, path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def lock_file(path: Path, *, is_new: bool = True) -> int:
    """Return the descriptor of a file to lock, which the caller closes.

    ``is_new``: make the file if it does not exist; else that raises FileNotFoundError.
    """
    with open_folder(path.parent) as fd:
        return _open_regular(fd, path.name, os.O_RDWR | (os.O_CREAT if is_new else 0))


def create(path: Path) -> bool:
    """Create an empty file.

    Return whether this call created it, which is true for one caller only.
    """
    with open_folder(path.parent) as fd:
        try:
            os.close(os.open(path.name, os.O_WRONLY | _NEW, 0o600, dir_fd=fd))
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def create_copy(source: int, folder: Path, target: int, name: str) -> Iterator[BinaryIO]:
    """Yield a new file in the directory ``folder``, for a copy of the open file ``source``.

    At the end of the block it is renamed to ``name`` in the open directory ``target``, over a file
    of that name; it is removed if the block raises, or has closed it.  Nothing is copied here.  It
    gets the permissions of ``source``, and may be written by this user.
    """
    # Trainers write weights that are their user's alone (safetensors 0.8), and some files are read
    # only.  Never S_ISUID: the copy is this user's.
    mode = os.fstat(source).st_mode & 0o777 | stat.S_IWUSR
    with open_folder(folder) as fd, _create_draft(fd, mode) as (draft, out):
        yield out  # who sets its times has flushed it
        if out.closed:
            return
        out.flush()
        os.replace(draft, name, src_dir_fd=fd, dst_dir_fd=target)


class Tree:
    """Makes the directories of files below ``root``, and keeps them open until the block ends.

    ``root`` itself is made at the beginning of the block.
    """

    def __init__(self, root: Path) -> None:
        """Remember the root; open nothing yet."""
        self._root = root
        self._open: dict[str, int] = {}

    def __enter__(self) -> Tree:  # noqa: PYI034  # no class is derived from it
        """Make ``root`` if it is missing, and open it."""
        make_folder(self._root)
        self._open[""] = open_directory(self._root)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the directories."""
        while self._open:
            os.close(self._open.popitem()[1])

    def place(self, name: str) -> tuple[int, str]:
        """Return a file's directory, open and made if it is missing; and its last name."""
        folder, _, last = name.rpartition("/")
        return self._folder(folder), last

    def _folder(self, name: str) -> int:
        """Return the descriptor of a directory below the root, opened or made at its first use."""
        if name not in self._open:
            above, _, last = name.rpartition("/")
            fd = self._folder(above)
            with contextlib.suppress(FileExistsError):
                os.mkdir(last, 0o700, dir_fd=fd)
            self._open[name] = open_step(fd, last, self._root / name)
        return self._open[name]


def make_folder(folder: Path) -> None:
    """Make a directory in an existing one, unless it exists already."""
    with open_folder(folder.parent) as fd, contextlib.suppress(FileExistsError):
        os.mkdir(folder.name, 0o700, dir_fd=fd)


def link(source: int, name: str, target: int, new: str) -> None:
    """Link a file of one open directory into another.

    Raise FileNotFoundError if it is no regular file.
    """
    os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    linked = os.stat(new, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISREG(linked.st_mode):  # a link took the file's location since it was seen
        os.unlink(new, dir_fd=target)
        raise FileNotFoundError(errno.ENOENT, "no longer a regular file", name)


def link_or_copy(source: Path, path: Path) -> None:
    """Link a small file of the spool to ``path``, or copy it, with its time, without links.

    Raise FileExistsError if a link finds ``path`` taken; a copy replaces what is there.
    """
    with open_folder(source.parent) as fd, open_folder(path.parent) as target:
        try:
            link(fd, source.name, target, path.name)
        except OSError as e:
            if e.errno not in (errno.EPERM, *NO_LINKS):
                raise
            with (
                os.fdopen(_open_regular(fd, source.name, os.O_RDONLY), "rb") as file,
                create_copy(file.fileno(), path.parent, target, path.name) as out,
            ):
                status_of_source = os.fstat(file.fileno())
                copy_bytes(file.fileno(), out.fileno(), status_of_source.st_size)
                os.utime(
                    out.fileno(), ns=(status_of_source.st_mtime_ns, status_of_source.st_mtime_ns)
                )


def copy_bytes(source: int, target: int, size: int) -> None:
    """Copy an open file's first ``size`` bytes, or all it has, into an empty open file.

    By a reflink where possible: then all of the file is copied.
    """
    with contextlib.suppress(OSError):  # most file systems have no reflinks
        clone(source, target)
        return
    done = 0
    while count := os.sendfile(target, source, done, min(_STRETCH, max(0, size - done))):
        done += count


def clone(source: int, target: int) -> None:
    """Make an open file share the blocks of another.

    Raise OSError as most file systems refuse that.
    """
    fcntl.ioctl(target, _FICLONE, source)


def touch(path: Path) -> None:
    """Set a file's times to now."""
    with open_folder(path.parent) as fd:
        os.utime(path.name, dir_fd=fd, follow_symlinks=False)


def unlink(path: Path) -> None:
    """Remove a file; do nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError), open_folder(path.parent) as fd:
        os.unlink(path.name, dir_fd=fd)


def rename(path: Path, target: Path) -> None:
    """Move a file or directory within the spool; replace a file or empty directory there."""
    with open_folder(path.parent) as fd, open_folder(target.parent) as target_folder:
        os.rename(path.name, target.name, src_dir_fd=fd, dst_dir_fd=target_folder)


def try_rename(path: Path, target: Path) -> bool:
    """Move a file or directory as `rename` does; return whether that was possible.

    False if the source does not exist, or the target is a directory that is not empty.
    """
    try:
        rename(path, target)
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            return False
        raise
    return True


def remove(path: Path) -> None:
    """Remove a file, or a directory with everything in it; do nothing if it does not exist.

    Of a link only the link is removed.
    """
    with contextlib.suppress(FileNotFoundError), open_folder(path.parent) as fd:
        remove_in(fd, path.name)


def last_change(path: Path) -> float:
    """Return when a directory, or anything in it, was last changed: seconds since the epoch.

    The later of mtime and ctime counts, since a rename changes the ctime alone.
    """

    def of(above: int, name: str) -> float:
        """Return the time of a file, or the latest time of a directory and everything in it."""
        info = os.stat(name, dir_fd=above, follow_symlinks=False)
        times = [info.st_mtime, info.st_ctime]
        if stat.S_ISDIR(info.st_mode):
            with _open_below(above, name) as fd:
                times += [of(fd, each) for each in list_names_in(fd)]
        return max(times)

    with open_folder(path.parent) as fd:
        return of(fd, path.name)


def remove_in(above: int, name: str) -> None:
    """Remove a file, or a directory with everything in it, from an open directory.

    Raises FileNotFoundError if it does not exist, UnsafeSpool for the names '.' and '..'.
    """
    if name in (".", ".."):
        raise UnsafeSpool(
            Path(name),
            "'.' and '..' are not allowed in a spool path",
            hint="delete the file in _ckptsync that contains this name, such as a marker",
        )
    try:
        os.unlink(name, dir_fd=above)
    except IsADirectoryError:
        with _open_below(above, name) as fd:
            for each in list_names_in(fd):
                with contextlib.suppress(FileNotFoundError):  # another is removing it, too
                    remove_in(fd, each)
        os.rmdir(name, dir_fd=above)


@contextlib.contextmanager
def _open_below(above: int, name: str) -> Iterator[int]:
    """Open a directory in an open one, never through a link, and yield its descriptor."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _create_draft(fd: int, mode: int = 0o600) -> Iterator[tuple[str, BinaryIO]]:
    """Create a file under a random name, and yield both.

    At the end remove what still has that name.
    """
    name = f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
    with os.fdopen(os.open(name, os.O_RDWR | _NEW, mode, dir_fd=fd), "wb") as out:
        try:
            yield name, out
        finally:
            # it has its own name now, or somebody deleted the directory
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)


def _open_regular(fd: int, name: str, flags: int) -> int:
    """Return the descriptor of a regular file of this user's, or of its directory's owner.

    Raise FileNotFoundError for any other, or one that may not be opened.  Also for a file with
    further links, if it is opened to append.
    """
    try:
        descriptor = os.open(name, flags | _OLD, 0o600, dir_fd=fd)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
            raise FileNotFoundError(errno.ENOENT, "no regular file of this user's", name) from e
        raise
    status_of_file = os.fstat(descriptor)
    is_shared = bool(flags & os.O_APPEND) and status_of_file.st_nlink > 1
    if (
        not stat.S_ISREG(status_of_file.st_mode)
        or status_of_file.st_uid not in (os.geteuid(), os.fstat(fd).st_uid)
        or is_shared
    ):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file of this user's alone", name)
    return descriptor
