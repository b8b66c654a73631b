"""The steps after which a new file has its name, and keeps it through a power cut.

Each of them may have been done although it fails: the answer of a file server can be lost, and the client asks once more and is told
that there is nothing to rename, or that the name is taken.  So the file itself is looked at before it is believed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

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
