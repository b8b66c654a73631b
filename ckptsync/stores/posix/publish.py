"""Publish a new file in a directory, so that its name survives a power cut: the directories on its way, and the step that gives it its name.

That step may have been done although it fails: the answer of a file server can be lost, and the client asks once more and is told
that there is nothing to rename, or that the name is taken.  So the file itself is looked at before it is believed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ckptsync.stores import beneath
from ckptsync.stores.beneath import OpenFile

_NO_LINKS_HERE = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_RENAME_NOREPLACE = 1


def replace(at: int, part: str, last: str, made: os.stat_result) -> None:
    """Give the file ``made``, which is ``part`` in the directory ``at``, the name ``last``; raises OSError."""
    try:
        os.rename(part, last, src_dir_fd=at, dst_dir_fd=at)
    except FileNotFoundError:
        if not _is_named(at, last, made):
            raise


def claim(at: int, part: str, last: str, made: os.stat_result) -> None:
    """As `replace`, but raises FileExistsError if the name is another file's."""
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
    with contextlib.suppress(FileNotFoundError):  # who came for the same, and saw that it is there, may have cleared up
        os.unlink(part, dir_fd=at)


def rename_if_free(at: int, part: str, last: str) -> None:
    """For file systems without hard links."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOTSUP, "neither hard links nor renameat2 here: a name cannot be claimed") from None
    if rename(at, os.fsencode(part), at, os.fsencode(last), _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        sync_directory(at)
    raise OSError(code, f"neither hard links nor an exclusive rename here: {os.strerror(code)}")


def sync_directory(at: int) -> None:
    """The names in it are durable; raises OSError."""
    try:
        os.fsync(at)
    except OSError as e:
        if e.errno != errno.EINVAL:  # the answer of file systems that have no such thing to do
            raise


def _is_named(at: int, last: str, made: os.stat_result) -> bool:
    try:
        found = os.stat(last, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino)


MOST = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class Ways:
    """Directories beneath ``root``, which must exist.  Raises OSError.  Threads may share it.

    Those whose own names are known to be durable are kept open: while one is, no directory that somebody else makes in its place can
    have its number.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._durable: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def made(self, way: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Descriptors of the root and of every directory on the way, made where it was missing.

        Somebody else may delete one as long as it is empty (FileNotFoundError): only with a file in the last one they stay, and may be `secure`d.
        """
        with contextlib.ExitStack() as stack:
            found = [os.open(self._root, _DIRECTORY)]
            stack.callback(beneath.let_go, found[0])
            for part in way:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=found[-1])
                found.append(os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=found[-1]))
                stack.callback(beneath.let_go, found[-1])
            yield tuple(found)

    def secure(self, way: Sequence[str], made: Sequence[int]) -> None:
        """See that the names of all directories on the way are durable, also of those that another writer made and may not live to sync."""
        for n, (above, at) in enumerate(itertools.pairwise(made), start=1):
            path = "/".join(way[:n])
            if not self._is_durable(path, at):
                sync_directory(above)
                self._keep(path, OpenFile(os.dup(at)))

    def after_delete(self, way: Sequence[str]) -> None:
        """Of a file: that it is gone is durable, and directories that this leaves empty go, too: trainers take a directory for a checkpoint."""
        with contextlib.suppress(FileNotFoundError):  # gone, with everything in it
            self.settle(way)
        self.drop_empty(way)

    def drop_empty(self, way: Sequence[str]) -> None:
        """A directory and those above it, as far as nothing is in them."""
        while way:
            try:
                with beneath.parent_of(self._root, "/".join(way)) as (at, last):
                    os.rmdir(last, dir_fd=at)
            except FileNotFoundError:
                pass  # somebody else has, and may have died over the one above
            except OSError:
                return  # not empty, or not ours to delete: an empty directory does no harm
            way = way[:-1]

    def settle(self, way: Sequence[str]) -> None:
        """What was done to the names in a directory is durable, whoever did it."""
        at = beneath.open_directory(self._root, way, _DIRECTORY)
        try:
            sync_directory(at)
        finally:
            beneath.let_go(at)

    def forget_older(self, seconds: float) -> None:
        """Let go of directories opened longer ago: what is kept open cannot be unmounted."""
        now = time.monotonic()
        with self._lock:
            for path in [p for p, kept in self._durable.items() if now - kept.since > seconds]:
                del self._durable[path]

    def _is_durable(self, path: str, at: int) -> bool:
        with self._lock:
            kept = self._durable.get(path)
        return kept is not None and kept.is_same(at)

    def _keep(self, path: str, directory: OpenFile) -> None:
        with self._lock:
            self._durable[path] = directory
            self._durable.move_to_end(path)
            if len(self._durable) > MOST:
                self._durable.popitem(last=False)
