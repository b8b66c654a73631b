"""The operating system's errors as StoreErrors, each with a hint that the operator can act on.

One table says what to do for each errno, another which errors pass by themselves: those are
Transient, and are tried again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass

from ckptsync.errors import Exists, StoreError, Transient

_RIGHTS = "the user that ckptsync runs as needs to read, write and search the store's directories"
_SERVER = "check the file server and the network; ckptsync tries again"
HINTS = {
    errno.ENOSPC: "the store's disk is full: make room; sending goes on where it stopped",
    errno.EDQUOT: (
        "the quota on the store is used up: raise it or make room; sending goes on where it stopped"
    ),
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "the store is mounted read-only: mount it for writing",
    errno.EFBIG: "the store's file system, or `ulimit -f`, allows no file as large as this",
    errno.ENAMETOOLONG: (
        "the store's file system allows no name as long as this: rename it, or use another file"
        " system"
    ),
    errno.EIO: "the disk or its controller fails: see the kernel's log (dmesg)",
    errno.ESTALE: (
        "stale NFS handle: the server no longer knows this file or directory; trying again opens it"
        " by name"
    ),
    errno.ENOTDIR: (
        "a file or a link stands where a directory should be; links are not followed in a store"
    ),
    errno.ELOOP: "links are not followed in a store",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE)",
    errno.ENFILE: "this machine has too many files open (fs.file-max)",
    errno.ENOLCK: "file locks are unavailable at this moment: check the file server (NFS: lockd)",
    errno.ETIMEDOUT: _SERVER,
    errno.ENOTCONN: _SERVER,
}
PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
    }
)
"""Codes of errors that may be over in a moment.

So may EIO on a remote file system: soft mounts of NFS return it if the server is silent (nfs(5)).
"""


@dataclass(frozen=True, slots=True)
class StoreErrors:
    """Makes StoreErrors from the operating system's errors, for the store at ``root``.

    ``is_remote``: the files are on a server, which may answer again after EIO.
    """

    root: str
    is_remote: bool = False

    def error(self, name: str, e: OSError) -> StoreError:
        """Return the error about ``name``: Exists for EEXIST, Transient if it may pass, StoreError.

        What may pass: `PASSING`, and on a remote file system EIO.
        """
        if e.errno == errno.EEXIST:
            return Exists(f"{name}: already there")
        code = errno.ETIMEDOUT if e.errno == errno.EIO and self.is_remote else e.errno or 0
        kind = Transient if code in PASSING else StoreError
        return kind(
            f"{name}: {(e.strerror or str(e)).lower()}, in the store {self.root}",
            hint=HINTS.get(code, ""),
        )

    @contextlib.contextmanager
    def about(self, name: str) -> Iterator[None]:
        """Raise each OSError of this block as the StoreError about ``name``."""
        try:
            yield
        except OSError as e:
            raise self.error(name, e) from e
