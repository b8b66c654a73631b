"""What the operating system says, as errors that the operator can act on."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ckptsync.errors import Exists, StoreError

HINTS = {
    errno.ENOSPC: "the store's disk is full: make room; sending goes on where it stopped",
    errno.EDQUOT: "the quota on the store is used up: raise it or make room; sending goes on where it stopped",
    errno.EACCES: "the user that ckptsync runs as needs to read, write and search the store's directories",
    errno.EPERM: "the user that ckptsync runs as needs to read, write and search the store's directories",
    errno.EROFS: "the store is mounted read-only",
    errno.ESTALE: "the file server forgot this file or directory; trying again finds it by name",
    errno.ENOTDIR: "a file or a link stands where a directory should be; links are not followed in a store",
    errno.ELOOP: "links are not followed in a store",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE)",
}


def store_error(name: str, e: OSError) -> StoreError:
    """The StoreError that says what the operating system said about ``name``, and what to do."""
    if e.errno == errno.EEXIST:
        return Exists(f"{name}: already there")
    return StoreError(f"{name}: {(e.strerror or str(e)).lower()}", hint=HINTS.get(e.errno or 0, ""))


@contextlib.contextmanager
def told_of(name: str) -> Iterator[None]:
    """Within it an OSError is a StoreError about ``name``; a name that is taken is Exists."""
    try:
        yield
    except OSError as e:
        raise store_error(name, e) from e
