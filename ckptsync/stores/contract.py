"""What every store promises, what only some stores can do, and the base class of wrappers.

All packages write and read checkpoints through the seven methods of `Store`, so a kind of store is
a class with these methods. What a kind can do beyond them is a small Protocol of its own (`Rooted`,
`KeepsDrafts`, `Sliced`), with a function that works for stores without it, too. The tests that
every store passes are in ``tests/support/store_contract.py``.
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
    """What is known of a content before its first byte is sent.

    ``size``: bytes in all; a write of more or fewer fails, and nothing appears. ``origin``: names
    where the bytes come from (a node, a file, its size and mtime); the same origin means the same
    bytes. The next write of the same name and origin continues one that was killed: it sends what
    is missing. Without an origin nothing is continued.

    ``share``: a function that gives a new and empty file, by its descriptor, the content without
    writing a byte, where the file system can. The chunks are then read from that file, and compared
    with it.
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
    missing. ``is_exclusive``: whether `create` excludes writers on other machines, too; no
    correctness may depend on it.
    """

    url: str
    late: float
    is_exclusive: bool

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield every file whose name starts with ``prefix``, sorted by name.

        ``prefix`` is whole path components: "", or ending in "/". Without such files nothing is
        yielded. Unfinished writes are left out. No link is followed.
        """
        ...

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the names of the directories directly below ``prefix``, sorted.

        A directory is the text between ``prefix`` (as in `names`) and the next slash of any name.
        Only those that begin with ``start`` are returned. One level is listed, however much lies
        below. Where the store has real directories, an empty one may be among them.
        """
        ...

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise NotFound."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise NotFound, or Corrupt if the file ends before."""
        ...

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store all of the content or none of it, durable on return; replace what has the name.

        The store uses a chunk before it asks for the next one, so callers may reuse its buffer. If
        ``chunks`` raises, nothing appears, and the error is raised unchanged. After an error of the
        store's own, ``chunks`` may be iterated over again, if they are no iterator.
        """
        ...

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists if the name is taken.

        The server refuses another writer in between, too, where it can. A name that is taken before
        the first byte is sent costs no transfer. The taken name may hold the caller's own bytes:
        the answer to an earlier call may have been lost, or the caller killed. Where the server's
        checksum can be computed from ``chunks``, the store reads them to their end and says whether
        they are the stored bytes (``Exists.is_same``); otherwise the caller has to read the file.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file; do nothing if it is not there."""
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
    """Yield the chunks; raise Incomplete if they are more or fewer bytes than ``about.size``.

    The first chunk that exceeds the size is not yielded. Without a size nothing is checked.
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
    """Return the error for a file that ends at byte ``end``, before ``size`` from ``start``."""
    return Corrupt(f"{name}: ends at byte {end}, {size} bytes from {start} expected")


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` itself if it is "" or a plain path and a slash.

    Raise Corrupt if the path is not plain, ValueError without the slash, which is our bug.
    """
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r}: a prefix ends in a slash")
    if prefix:
        checked_path(prefix[:-1])
    return prefix


def read_all(store: Store, name: str, limit: int = 256 << 20) -> bytes:
    """Return the bytes of a small file; raise NotFound, or Corrupt above ``limit`` bytes.

    A file that is too large is not read. Raise StoreError.
    """
    size = store.size(name)
    if size > limit:
        raise Corrupt(f"{name}: {size} bytes, at most {limit} expected")
    out = bytearray(size)
    store.read_into(name, 0, memoryview(out))
    return bytes(out)


@runtime_checkable
class Rooted(Protocol):
    """A store in a directory of a server, which must exist before it is used.

    Its listings meet entries that are no files, and can report them.
    """

    def has_root(self) -> bool:
        """Return whether the directory exists."""
        ...

    def missing_parent(self) -> str:
        """Return the directory above the root if that is missing, else an empty string."""
        ...

    def make_root(self) -> None:
        """Make the directory, and missing ones above it; raise ConfigError if refused."""
        ...

    def names_reporting(self, passed: Callable[[str, Odd], object]) -> Iterator[Entry]:
        """Yield all `names`; call ``passed`` with each entry that is left out, and its kind."""
        ...


def has_root(store: Store) -> bool:
    """Return whether a store's directory exists; True for stores without one (buckets)."""
    return not isinstance(store, Rooted) or store.has_root()


@runtime_checkable
class KeepsDrafts(Protocol):
    """A store in directories, where killed writers leave unfinished files (drafts).

    A bucket has unfinished uploads instead, which `s3` removes by itself.
    """

    def drafts(self) -> Iterator[Entry]:
        """Yield unfinished files, in any order; writers may be at work. No link is followed."""
        ...

    def remove_draft(self, name: str) -> bool:
        """Remove an unfinished file, unless its writer holds it; return whether it is gone."""
        ...


ABANDONED_AFTER = 7 * 24 * 3600.0
"""Seconds without a byte after which a draft, or an upload in a bucket, has no writer any more."""


def abandoned_drafts(store: object, now: float) -> Iterator[Entry]:
    """Yield the drafts that were last written to more than `ABANDONED_AFTER` before ``now``.

    ``now`` is in seconds on the store's clock. Stores without drafts have none.
    """
    inner = unwrapped(store)
    if isinstance(inner, KeepsDrafts):
        yield from (draft for draft in inner.drafts() if now - draft.mtime > ABANDONED_AFTER)


def remove_draft(store: object, name: str) -> bool:
    """Remove a draft as `KeepsDrafts.remove_draft` does; return False if the store keeps none."""
    inner = unwrapped(store)
    return isinstance(inner, KeepsDrafts) and inner.remove_draft(name)


@runtime_checkable
class Sliced(Protocol):
    """A store whose listing can begin after any name."""

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        """Yield the files below ``prefix`` that follow ``after``, in the server's own order.

        ``after`` need not be a file's name; if it is empty, all files are yielded.
        """
        ...


SLICE = 2000  # names of a slice: two pages of S3


def slices(store: Store, prefix: str, cuts: Sequence[str]) -> list[Callable[[], list[Entry]]]:
    """Return functions that list ``prefix`` together, each one slice, for `join_slices`.

    ``cuts`` are the names at which the last listing was cut (`cuts_of`), or none. A slice ends at
    the name after which the next slice begins; if that name was deleted, at the next cut that still
    exists. A store that is not `Sliced` gets one function for all.
    """
    if not isinstance(store, Sliced):
        return [lambda: list(store.names(prefix))]
    return [partial(_slice, store, prefix, after, frozenset(cuts)) for after in ("", *cuts)]


def _slice(store: Sliced, prefix: str, after: str, ends: Collection[str]) -> list[Entry]:
    """List the files after ``after``, up to and with the first whose name is in ``ends``."""
    entries = []
    for entry in store.names_after(prefix, after):
        entries.append(entry)
        if entry.name in ends:
            break
    return entries


def join_slices(parts: Iterable[list[Entry]]) -> list[Entry]:
    """Return the entries of all slices (at least one) in order, and each name once.

    After a deleted cut two slices overlap.
    """
    first, *more = parts
    if not more:
        return first
    return list({entry.name: entry for part in (first, *more) for entry in part}.values())


def cuts_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return each `SLICE`-th name but the last entry's: there the next listing is cut."""
    return tuple(entry.name for entry in entries[SLICE - 1 : -1 : SLICE])
