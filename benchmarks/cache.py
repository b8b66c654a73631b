"""The page cache: what of some files is in it, and putting them out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(files: Iterable[Path]) -> None:
    """Ask the kernel to forget their pages.

    They are written out first, since what is not cannot be forgotten.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached(files: Iterable[Path]) -> float:
    """The share of their pages that is in memory, 0 to 1 (mincore(2))."""
    there = total = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages,
        ):
            count = -(-size // mmap.PAGESIZE)
            seen = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(pages)
            if _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), seen):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            del first
            there, total = there + sum(n & 1 for n in seen), total + count
    return there / total if total else 0.0
