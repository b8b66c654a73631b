"""Drafts that killed writers have left in a store's directories, and that nobody goes on with.

In a bucket unfinished uploads are the server's, and writers remove those that were given up (`s3.orphans`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from ckptsync.stores.contract import Entry, unwrapped

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
