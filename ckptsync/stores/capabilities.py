"""What only some stores can do: list in slices, tell of what is no file, and find the drafts that killed writers have left.

In a bucket unfinished uploads are the server's, and writers remove those that were given up (`s3.multipart`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from ckptsync.stores.contract import Entry, Store, unwrapped

SLICE = 2000  # names of a piece: two pages of S3


@runtime_checkable
class Sliced(Protocol):
    """A store that need not list from the beginning."""

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        """As `Store.names`, in the server's own order, and of that what follows ``after`` (all, if it is empty), whether or not that is there still."""
        ...


def pieces(store: Store, prefix: str, cuts: Sequence[str]) -> list[Callable[[], list[Entry]]]:
    """What `joined` makes into all that ``store.names(prefix)`` gives, in the server's order; ``cuts`` are those of the last time (`cuts_of`), or none.

    A piece ends at the cut that the next one begins behind, or, where that is gone, at the next that is left.
    """
    if not isinstance(store, Sliced):
        return [lambda: list(store.names(prefix))]
    ends = frozenset(cuts)
    return [partial(_piece, store, prefix, after, ends) for after in ("", *cuts)]


def joined(parts: Iterable[Sequence[Entry]]) -> list[Entry]:
    """Each name once: where a cut is gone, two pieces have what lies behind it."""
    return list({entry.name: entry for part in parts for entry in part}.values())


def cuts_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Where to cut the next listing, so that each piece is of whole pages if nothing changes."""
    return tuple(entry.name for entry in entries[SLICE - 1 : -1 : SLICE])


def _piece(store: Sliced, prefix: str, after: str, ends: Collection[str]) -> list[Entry]:
    found = []
    for entry in store.names_after(prefix, after):
        found.append(entry)
        if entry.name in ends:
            break
    return found


GIVEN_UP = 7 * 24 * 3600.0
"""s without a byte after which nobody is at work on a draft: as for uploads in a bucket."""


@runtime_checkable
class Sweeping(Protocol):
    """A store in directories."""

    def drafts(self) -> Iterator[Entry]:
        """Unfinished writes, in any order; they may be going on.  No link is followed."""
        ...

    def drop(self, name: str) -> bool:
        """Remove one, unless its writer is seen to be at work; whether it is gone."""
        ...


def given_up(store: object, now: float) -> Iterator[Entry]:
    """Those that nobody goes on with.  ``now``: seconds on the store's clock."""
    inner = _sweeping(store)
    yield from (e for e in (inner.drafts() if inner else ()) if now - e.mtime > GIVEN_UP)


def drop(store: object, name: str) -> bool:
    """As `Sweeping.drop`."""
    inner = _sweeping(store)
    return inner is not None and inner.drop(name)


def _sweeping(store: object) -> Sweeping | None:
    inner = unwrapped(store)
    return inner if isinstance(inner, Sweeping) else None
