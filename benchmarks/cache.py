"""The page cache: how much of some files is in it, and how to put them out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(files: Iterable[Path]) -> None:
    """Write files to the disk, and ask the kernel to drop their pages."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(files: Iterable[Path]) -> float:
    """Return the share of the files' pages that is in memory, 0 to 1 (mincore(2))."""
    present = total = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages,
        ):
            count = -(-size // mmap.PAGESIZE)
            states = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(pages)
            if _LIBC.mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), states
            ):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            del first
            present, total = present + sum(n & 1 for n in states), total + count
    return present / total if total else 0.0
