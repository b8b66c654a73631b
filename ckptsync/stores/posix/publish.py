"""Publish a new file in a directory, so that its name survives a power cut.

The names of the directories above it are durable too.

Giving the name may have succeeded although it fails: the answer of a file server can be lost, and
the client tries once more and learns that there is nothing to rename, or that the name is taken. So
the file itself is looked at before such an answer is believed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from ckptsync import safe_open
from ckptsync.safe_open import OpenFiles

_NO_LINKS_HERE = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)
_RENAME_NOREPLACE = 1

GiveName = Callable[[int, str, str, os.stat_result], None]
"""`replace` or `claim`."""


def replace(at: int, part: str, last: str, made: os.stat_result) -> None:
    """Give the file ``made``, which is ``part`` in the directory ``at``, the name ``last``.

    Raises OSError.
    """
    try:
        os.rename(part, last, src_dir_fd=at, dst_dir_fd=at)
    except FileNotFoundError:
        if not _is_named(at, last, made):
            raise


def claim(at: int, part: str, last: str, made: os.stat_result) -> None:
    """Give the file ``made`` a new name; raise FileExistsError if the name is another file's."""
    try:
        os.link(part, last, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except FileExistsError:
        if not _is_named(at, last, made):
            sync_directory(at)  # so that what is said to be there is still there after a power cut
            raise
    except OSError as e:
        if e.errno not in _NO_LINKS_HERE:
            raise
        rename_if_free(at, part, last)
        return
    # who came for the same, and saw that it is there, may have cleared up
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=at)


def rename_if_free(at: int, part: str, last: str) -> None:
    """Give a file a new name where there are no hard links.

    Raises OSError, with EEXIST if the name is taken.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(
            errno.ENOTSUP, "neither hard links nor renameat2 here: a name cannot be claimed"
        ) from None
    if rename(at, os.fsencode(part), at, os.fsencode(last), _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        sync_directory(at)
    raise OSError(code, f"neither hard links nor an exclusive rename here: {os.strerror(code)}")


def sync_directory(at: int) -> None:
    """Make the names in an open directory durable; raise OSError."""
    try:
        os.fsync(at)
    except OSError as e:
        if e.errno != errno.EINVAL:  # the answer of file systems that have no such thing to do
            raise


def _is_named(at: int, last: str, made: os.stat_result) -> bool:
    try:
        named = os.stat(last, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, made)


_MOST = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class DurableDirectories:
    """Directories beneath ``root``, which must exist.  Raises OSError.  Threads may share it.

    Those whose own names are known to be durable are kept open: while one is, no directory that
    somebody else makes in its place can have its number.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._durable = OpenFiles(_MOST)

    @contextlib.contextmanager
    def opened(self, way: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Give descriptors of the root and of every directory on the way, made where missing.

        Somebody else may delete one as long as it is empty (FileNotFoundError): only with a file in
        the last one they stay, and may be made durable.
        """
        with contextlib.ExitStack() as stack:
            descriptors = [os.open(self._root, _DIRECTORY)]
            stack.callback(safe_open.close_quietly, descriptors[0])
            for part in way:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptors[-1])
                descriptors.append(
                    os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptors[-1])
                )
                stack.callback(safe_open.close_quietly, descriptors[-1])
            yield tuple(descriptors)

    def make_durable(self, way: Sequence[str], made: Sequence[int]) -> None:
        """Make the names of all directories on the way durable.

        That includes directories that another writer made, since it may be killed before it syncs
        them.
        """
        for n, (above, at) in enumerate(itertools.pairwise(made), start=1):
            path = "/".join(way[:n])
            durable = self._durable.get(path)
            if durable is None or not durable.is_same(at):
                sync_directory(above)
                self._durable.put(path, os.dup(at))

    def remove_empty(self, way: Sequence[str]) -> None:
        """Remove a directory, and those above it, as far as nothing is in them."""
        while way:
            try:
                with safe_open.parent_of(self._root, "/".join(way)) as (at, last):
                    os.rmdir(last, dir_fd=at)
            except FileNotFoundError:
                pass  # somebody else has, and may have died over the one above
            except OSError:
                return  # not empty, or not ours to delete: an empty directory does no harm
            way = way[:-1]

    def sync(self, way: Sequence[str]) -> None:
        """Make durable what was done to the names in a directory, whoever did it."""
        at = safe_open.open_below(self._root, way, _DIRECTORY)
        try:
            sync_directory(at)
        finally:
            safe_open.close_quietly(at)

    def forget_older(self, seconds: float) -> None:
        """Let go of directories opened longer ago: what is kept open cannot be unmounted."""
        self._durable.forget_older(seconds)
