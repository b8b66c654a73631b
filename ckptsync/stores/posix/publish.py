"""Publish a new file in a directory, so that its name survives a power cut.

A rename or a link gives the name in one step, and fsync of the directory makes it durable, as those
of the directories above. On a file server the step may have succeeded although it fails: the answer
can be lost, and the client tries once more and learns that there is nothing to rename, or that the
name is taken. So before such an answer is believed, the file under the name is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckptsync import safe_open
from ckptsync.safe_open import OpenFiles

_NO_LINKS_HERE = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)
_RENAME_NOREPLACE = 1

GiveName = Callable[[int, str, str, os.stat_result], None]
"""`replace` or `claim`."""


def replace(directory_fd: int, part: str, last: str, status: os.stat_result) -> None:
    """Rename the draft ``part`` to ``last`` in an open directory; replace what has that name.

    ``status``: of the draft. If it has the name already, that is no error: only an answer was lost.
    Raise OSError.
    """
    try:
        os.rename(part, last, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except FileNotFoundError:
        if not _has_name(directory_fd, last, status):
            raise


def claim(directory_fd: int, part: str, last: str, status: os.stat_result) -> None:
    """Give the draft ``part`` the name ``last``, and remove its own.

    ``status``: of the draft. If it has the name already, that is no error. Raise FileExistsError,
    once the directory is durable, if another file has the name; OSError.
    """
    try:
        os.link(part, last, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False)
    except FileExistsError:
        if not _has_name(directory_fd, last, status):
            # the caller reports the name as taken, so it has to survive a power cut
            sync_directory(directory_fd)
            raise
    except OSError as e:
        if e.errno not in _NO_LINKS_HERE:
            raise
        rename_if_free(directory_fd, part, last)
        return
    # another writer of the same file may have removed the temporary name
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=directory_fd)


def rename_if_free(directory_fd: int, part: str, last: str) -> None:
    """Rename ``part`` to ``last`` where there are no hard links.

    Raise OSError: EEXIST, once the directory is durable, if the name is taken; ENOTSUP without
    renameat2.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(
            errno.ENOTSUP, "neither hard links nor renameat2 here: a name cannot be claimed"
        ) from None
    if (
        rename(directory_fd, os.fsencode(part), directory_fd, os.fsencode(last), _RENAME_NOREPLACE)
        == 0
    ):
        return
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        sync_directory(directory_fd)
    raise OSError(code, f"neither hard links nor an exclusive rename here: {os.strerror(code)}")


def sync_directory(directory_fd: int) -> None:
    """Make the names in an open directory durable, where the system can; raise OSError."""
    try:
        os.fsync(directory_fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # the answer of file systems that have no such thing to do
            raise


def sync_path(directory: Path) -> None:
    """Make the names in a directory durable; raise OSError."""
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_directory(directory_fd)
    finally:
        os.close(directory_fd)


def _has_name(directory_fd: int, last: str, status: os.stat_result) -> bool:
    """Return whether ``last`` is the name of the file with this status."""
    try:
        named_status = os.stat(last, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named_status, status)


_MOST = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class DurableDirectories:
    """Directories beneath ``root``, which must exist. Threads may share it.

    Directories whose own names are known to be durable stay open: while one is open, no directory
    that another process makes in its place can have its inode number. Methods raise OSError.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._durable = OpenFiles(_MOST)

    @contextlib.contextmanager
    def opened(self, parts: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Open the root and each directory of a path, made if missing; yield the descriptors.

        They are closed afterwards. Names are not durable yet (`make_durable`). Another process may
        delete a directory as long as it is empty (FileNotFoundError); a link or file is an OSError.
        """
        with contextlib.ExitStack() as stack:
            descriptors = [os.open(self._root, _DIRECTORY)]
            stack.callback(safe_open.close_quietly, descriptors[0])
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptors[-1])
                descriptors.append(
                    os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptors[-1])
                )
                stack.callback(safe_open.close_quietly, descriptors[-1])
            yield tuple(descriptors)

    def make_durable(self, parts: Sequence[str], descriptors: Sequence[int]) -> None:
        """Make the names of all directories of a path durable, by descriptors that `opened` yields.

        Another writer may have made them, and be killed before it syncs them.
        """
        for n, (parent_fd, directory_fd) in enumerate(itertools.pairwise(descriptors), start=1):
            path = "/".join(parts[:n])
            durable = self._durable.get(path)
            if durable is None or not durable.is_same(directory_fd):
                sync_directory(parent_fd)
                self._durable.put(path, os.dup(directory_fd))

    def remove_empty(self, parts: Sequence[str]) -> None:
        """Remove a directory, and those above it, up to the first that cannot be removed.

        That one is not empty, or belongs to another user; no error is raised for it.
        """
        while parts:
            try:
                with safe_open.parent_of(self._root, "/".join(parts)) as (parent_fd, last):
                    os.rmdir(last, dir_fd=parent_fd)
            except FileNotFoundError:
                pass  # another process removed it, and may have been killed before the one above
            except OSError:
                return  # not empty, or not ours to delete: an empty directory does no harm
            parts = parts[:-1]

    def sync(self, parts: Sequence[str]) -> None:
        """Make the names in a directory durable, whoever changed them."""
        directory_fd = safe_open.open_below(self._root, parts, _DIRECTORY)
        try:
            sync_directory(directory_fd)
        finally:
            safe_open.close_quietly(directory_fd)

    def forget_older(self, seconds: float) -> None:
        """Close directories that were opened longer ago: an open directory cannot be unmounted."""
        self._durable.forget_older(seconds)
