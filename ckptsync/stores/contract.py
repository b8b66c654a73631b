"""What every store promises.  The conformance suite is ``tests/store_contract.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.paths import checked_path

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A stored file.  ``mtime`` is in seconds on the store's own clock."""

    name: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a content before its first byte.

    ``size``: bytes in all; chunks that bring more or fewer are refused, and nothing appears.  ``origin``: says where the bytes come from, in
    words of which nobody else's are the same unless his bytes are (a node, a file, its size and mtime).  A write that was killed is continued by
    the next one of the same name and origin, which sends what is missing; without an origin nothing is continued.

    ``share``: given a new and empty file of this machine, lets it have the content without a byte being written, where their file system can,
    and brings the chunks out of it when they are asked for next.  So they are what is committed, and a store compares them all the same.
    """

    size: int | None = None
    origin: str = ""
    share: Callable[[int], None] | None = field(default=None, compare=False)


UNKNOWN = About()


class Store(Protocol):
    """Somewhere to keep write-once files.  Threads may share it.

    Names are relative POSIX paths (`str`, since `Path` collapses double slashes).  Errors are `StoreError`: `Transient` where the same may succeed
    in a moment, any other (`NotFound`, `Exists`, a refusal, a full disk) where it will not.  So every method is safe to call again.

    ``late``: seconds for which a name that another machine has written, or its length, may not be seen here yet (attribute caches of NFS).
    Only after so long is a file that should be there missing.  ``is_exclusive``: whether `create` holds against writers elsewhere, too; no
    correctness may rest on it.
    """

    url: str
    late: float
    is_exclusive: bool

    def names(self, prefix: str) -> Iterator[Entry]:
        """Every file whose name starts with ``prefix`` (whole path components: "", or ending in "/"), sorted by name.

        Unfinished writes are not names.  No link is followed.  A prefix that is not there has no names.
        """
        ...

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """What stands between ``prefix`` (as in `names`) and the next slash of any name, sorted, of that only what begins with ``start``.

        As cheap as one level is, however much lies below.  Where there are real directories one may be told that has no names in it.
        """
        ...

    def size(self, name: str) -> int:
        """Bytes; raises NotFound."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raises NotFound, or Corrupt if the file ends before."""
        ...

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """All of it or none of it, durable on return.  Replaces what was there.

        A chunk is used before the next one is asked for: callers may reuse its buffer.  If ``chunks`` raises, nothing appears, and the error is
        raised as it is.  ``chunks`` that can be iterated over again (no iterator) may be, after an error of the store's.
        """
        ...

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As `write`, but raises Exists if the name is taken, where the server can tell also by another writer in between.

        A name that is seen to be taken before the first byte is sent costs no bytes on the wire.  Whoever is told Exists may find his own bytes: the
        answer to an earlier call may have been lost, or the caller killed.  Where the server's own checksum can be made of ``chunks`` here, the store
        uses them up and says whether they are what is there (``Exists.is_same``); otherwise the caller has to read it back.
        """
        ...

    def delete(self, name: str) -> None:
        """Deleting what is not there is not an error."""
        ...


class StoreWrapper:
    """As the store that it wraps: a subclass defines only the methods that it changes."""

    def __init__(self, store: Store) -> None:
        self._inner = store
        self.url, self.late, self.is_exclusive = store.url, store.late, store.is_exclusive

    @property
    def inner(self) -> Store:
        """The wrapped store."""
        return self._inner

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        return self.inner.names(prefix)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        return self.inner.dirs(prefix, start)

    def size(self, name: str) -> int:
        """As the contract says."""
        return self.inner.size(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        self.inner.read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self.inner.write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self.inner.create(name, chunks, about)

    def delete(self, name: str) -> None:
        """As the contract says."""
        self.inner.delete(name)


def unwrapped(source: object) -> object:
    """Return what lies within all wrappers; ``source`` itself if it is no wrapper."""
    while isinstance(source, StoreWrapper):
        source = source.inner
    return source


def announced(chunks: Iterable[Chunk], about: About) -> Iterator[Chunk]:
    """The chunks; raises Incomplete, at the latest after the last one, if they are not ``about.size`` bytes."""
    size = 0
    for chunk in chunks:
        size += memoryview(chunk).nbytes
        if about.size is not None and size > about.size:
            break
        yield chunk
    if about.size is not None and size != about.size:
        raise Incomplete(
            f"{size} bytes or more came where {about.size} were announced",
            hint="the source changed while it was read: try again",
        )


def checked_prefix(prefix: str) -> str:
    """``prefix`` itself if it is "" or a plain path and a slash; raises Corrupt, or ValueError, which is our bug."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r}: a prefix ends in a slash")
    if prefix:
        checked_path(prefix[:-1])
    return prefix


def read_all(store: Store, name: str, limit: int = 256 << 20) -> bytes:
    """Return a whole small file; raise NotFound, or Corrupt above ``limit`` bytes, of which none is fetched."""
    size = store.size(name)
    if size > limit:
        raise Corrupt(f"{name}: {size} bytes, at most {limit} expected")
    out = bytearray(size)
    store.read_into(name, 0, memoryview(out))
    return bytes(out)
