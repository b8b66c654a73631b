"""One listing asked for in several pieces at once, where a server gives it page by page and can begin anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from ckptsync.stores.contract import Entry, Store

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
