"""What every store promises.  The conformance suite is ``tests/store_contract.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ckptsync.errors import StoreError
from ckptsync.paths import checked_path

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A stored file.  ``mtime`` is in seconds on the store's own clock."""

    name: str
    size: int
    mtime: float


class Store(Protocol):
    """Somewhere to keep write-once files.

    Names are relative POSIX paths (`str`, since `Path` collapses double slashes).  Errors are `StoreError`; `NotFound` and
    `Exists` are permanent, every other one may be retried, so every method must be safe to call again.
    """

    url: str

    def names(self, prefix: str) -> Iterator[Entry]:
        """Every file whose name starts with ``prefix`` (whole path components: "", or ending in "/"), sorted by name.

        Unfinished writes are not names.  No link is followed.  A prefix that is not there has no names.
        """
        ...

    def size(self, name: str) -> int:
        """Bytes; raises NotFound."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raises NotFound, or Corrupt if the file ends before."""
        ...

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """All of it or none of it, durable on return.  Replaces what was there.

        A chunk is used before the next one is asked for: callers may reuse its buffer.  If ``chunks`` raises, nothing appears.
        """
        ...

    def create(self, name: str, chunks: Iterable[Chunk]) -> None:
        """As `write`, but raises Exists if the name is taken, also by another writer in between."""
        ...

    def delete(self, name: str) -> None:
        """Deleting what is not there is not an error."""
        ...


def checked_prefix(prefix: str) -> str:
    """``prefix`` itself if it is "" or a plain path and a slash; raises Corrupt, or ValueError, which is our bug."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r}: a prefix ends in a slash")
    if prefix:
        checked_path(prefix[:-1])
    return prefix


def read_all(store: Store, name: str, limit: int = 256 << 20) -> bytes:
    """A whole small file; raises NotFound, or StoreError above ``limit`` bytes."""
    size = store.size(name)
    if size > limit:
        raise StoreError(f"{name}: {size} bytes, at most {limit} expected")
    out = bytearray(size)
    store.read_into(name, 0, memoryview(out))
    return bytes(out)
