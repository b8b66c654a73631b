"""What every store promises, what only some stores can do, and the base class of wrappers.

The conformance suite is ``tests/support/store_contract.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import msgspec

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.safe_names import checked_path
from ckptsync.safe_open import Odd

Chunk = bytes | bytearray | memoryview


class Entry(msgspec.Struct, frozen=True, order=True, gc=False):
    """A stored file. ``mtime`` is in seconds on the store's own clock."""

    name: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a content before its first byte.

    ``size``: bytes in all; the store refuses chunks that are more or fewer, and nothing appears.
    ``origin``: says where the bytes come from, in words that are the same for the same bytes only
    (a node, a file, its size and mtime). The next write of the same name and origin continues one
    that was killed: it sends what is missing. Without an origin nothing is continued.

    ``share``: gives a new and empty file of this machine the content without writing a byte, where
    the file system can, and reads the chunks from it afterwards. So they are what is committed, and
    a store compares them all the same.
    """

    size: int | None = None
    origin: str = ""
    share: Callable[[int], None] | None = field(default=None, compare=False)


UNKNOWN = About()


class Store(Protocol):
    """Somewhere to keep write-once files. Threads may share it.

    Names are relative POSIX paths (`str`, since `Path` collapses double slashes). Errors are
    `StoreError`: `Transient` where the same call may succeed in a moment, any other (`NotFound`,
    `Exists`, a refusal, a full disk) where it will not. Every method is safe to call again.

    ``late``: seconds for which a name that another machine has written, or its length, may not be
    seen here yet (attribute caches of NFS). Only after so long is a file that should be there
    missing. ``is_exclusive``: whether `create` holds against writers elsewhere, too; no correctness
    may rest on it.
    """

    url: str
    late: float
    is_exclusive: bool

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield every file whose name starts with ``prefix``, sorted by name.

        ``prefix`` is whole path components: "", or ending in "/". One that is not there has no
        names. Unfinished writes are not names. No link is followed.
        """
        ...

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the names of the directories directly below ``prefix``, sorted.

        They are what stands between ``prefix`` (as in `names`) and the next slash of any name.

        ``start``: only what begins with it. As cheap as one level is, however much lies below.
        Where there are real directories, one without a file may be among them.
        """
        ...

    def size(self, name: str) -> int:
        """Return the bytes of a file; raise NotFound."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise NotFound, or Corrupt if the file ends before."""
        ...

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store all of it or none of it, durable on return; replace what was there.

        The store uses a chunk before it asks for the next one: callers may reuse its buffer. If
        ``chunks`` raises, nothing appears, and the error is raised as it is. After an error of the
        store's own, ``chunks`` that can be iterated over again (no iterator) may be.
        """
        ...

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists if the name is taken.

        The server sees another writer in between, too, where it can. A name that is taken before
        the first byte is sent costs no bytes on the wire. The bytes there may be the caller's own:
        the answer to an earlier call may have been lost, or the caller killed. Where the server's
        own checksum can be made of ``chunks`` here, the store uses them up and says whether they
        are what is there (``Exists.is_same``); otherwise the caller has to read the file.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file. Deleting what is not there is not an error."""
        ...


class StoreWrapper:
    """Pass every call on to another store; a subclass defines only the methods that it changes."""

    def __init__(self, store: Store) -> None:
        self._inner = store
        self.url, self.late, self.is_exclusive = store.url, store.late, store.is_exclusive

    @property
    def inner(self) -> Store:
        """The wrapped store."""
        return self._inner

    def names(self, prefix: str) -> Iterator[Entry]:
        return self.inner.names(prefix)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        return self.inner.dirs(prefix, start)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.inner.read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.inner.write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.inner.create(name, chunks, about)

    def delete(self, name: str) -> None:
        self.inner.delete(name)


def unwrapped(source: object) -> object:
    """Return what lies within all wrappers; ``source`` itself if it is no wrapper."""
    while isinstance(source, StoreWrapper):
        source = source.inner
    return source


def check_size(chunks: Iterable[Chunk], about: About) -> Iterator[Chunk]:
    """Yield the chunks; raise Incomplete if they are more or less than ``about.size`` bytes.

    The error comes after the last chunk at the latest.
    """
    size = 0
    for chunk in chunks:
        size += memoryview(chunk).nbytes
        if about.size is not None and size > about.size:
            break
        yield chunk
    if about.size is not None and size != about.size:
        raise Incomplete(
            f"got {size} bytes or more, expected {about.size}",
            hint="the source changed while it was read: try again",
        )


def too_short(name: str, end: int, start: int, size: int) -> Corrupt:
    """Return the error for a file that ends before the requested bytes.

    The file ends at byte ``end``; ``size`` bytes from ``start`` are expected.
    """
    return Corrupt(f"{name}: ends at byte {end}, {size} bytes from {start} expected")


def checked_prefix(prefix: str) -> str:
    """``prefix`` itself if it is "" or a plain path and a slash.

    Raises Corrupt, or ValueError, which is our bug.
    """
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r}: a prefix ends in a slash")
    if prefix:
        checked_path(prefix[:-1])
    return prefix


def read_all(store: Store, name: str, limit: int = 256 << 20) -> bytes:
    """Return the bytes of a small file; raise NotFound, or Corrupt above ``limit`` bytes.

    Nothing is read from a file that is too large.
    """
    size = store.size(name)
    if size > limit:
        raise Corrupt(f"{name}: {size} bytes, at most {limit} expected")
    out = bytearray(size)
    store.read_into(name, 0, memoryview(out))
    return bytes(out)


@runtime_checkable
class Rooted(Protocol):
    """A store in a directory elsewhere, which must be there, as a path must.

    As it lists, it meets what is no file.
    """

    def has_root(self) -> bool:
        """Return whether the directory is there."""
        ...

    def missing_parent(self) -> str:
        """Return the directory above it, if that is not there; else an empty string."""
        ...

    def make_root(self) -> None:
        """Make it, and what is missing above it; raises ConfigError."""
        ...

    def names_reporting(self, passed: Callable[[str, Odd], object]) -> Iterator[Entry]:
        """Yield all `names`; call ``passed`` with what is left out."""
        ...


def has_root(store: Store) -> bool:
    """Return whether a store's place is there; object stores have none to be missing."""
    return not isinstance(store, Rooted) or store.has_root()


@runtime_checkable
class KeepsDrafts(Protocol):
    """A store in directories, where killed writers leave drafts.

    In a bucket unfinished uploads are the server's.
    """

    def drafts(self) -> Iterator[Entry]:
        """Yield unfinished writes, in any order; they may be going on. No link is followed."""
        ...

    def remove_draft(self, name: str) -> bool:
        """Remove one, unless its writer is seen to be at work; return whether it is gone."""
        ...


ABANDONED_AFTER = 7 * 24 * 3600.0
"""s without a byte after which nobody is at work on a draft: as for uploads in a bucket."""


def abandoned_drafts(store: object, now: float) -> Iterator[Entry]:
    """Yield the drafts that nobody goes on with. ``now``: seconds on the store's clock."""
    inner = unwrapped(store)
    if isinstance(inner, KeepsDrafts):
        yield from (draft for draft in inner.drafts() if now - draft.mtime > ABANDONED_AFTER)


def remove_draft(store: object, name: str) -> bool:
    """Remove a draft, as `KeepsDrafts.remove_draft`."""
    inner = unwrapped(store)
    return isinstance(inner, KeepsDrafts) and inner.remove_draft(name)


@runtime_checkable
class Sliced(Protocol):
    """A store that need not list from the beginning."""

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        """Yield the files that follow ``after`` (all, if it is empty), in the server's own order.

        ``after`` need not be a file's name. Else as `Store.names`.
        """
        ...


SLICE = 2000  # names: two pages of S3


def slices(store: Store, prefix: str, cuts: Sequence[str]) -> list[Callable[[], list[Entry]]]:
    """Return calls that list ``prefix`` together, in the server's order, for `join_slices`.

    ``cuts`` are those of the last listing (`cuts_of`), or none. A slice ends at the cut that the
    next one begins behind, or, where that is gone, at the next that is left.
    """
    if not isinstance(store, Sliced):
        return [lambda: list(store.names(prefix))]
    return [partial(_slice, store, prefix, after, frozenset(cuts)) for after in ("", *cuts)]


def _slice(store: Sliced, prefix: str, after: str, ends: Collection[str]) -> list[Entry]:
    entries = []
    for entry in store.names_after(prefix, after):
        entries.append(entry)
        if entry.name in ends:
            break
    return entries


def join_slices(parts: Iterable[list[Entry]]) -> list[Entry]:
    """Join the listings of slices, and drop duplicates: where a cut is gone, two slices overlap."""
    first, *others = parts
    if not others:
        return first
    return list({entry.name: entry for part in (first, *others) for entry in part}.values())


def cuts_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the names at which to cut the next listing into slices.

    Each slice is then of whole pages, if nothing changes.
    """
    return tuple(entry.name for entry in entries[SLICE - 1 : -1 : SLICE])
