"""A store that is not there yet: what is told of it is its location, and whoever asks more hears that it is being waited for.

So pinning begins with the process, however long a mount or a network takes.
"""

from __future__ import annotations

from ckptsync.errors import Transient
from ckptsync.stores.contract import Store, StoreWrapper


class Awaited(StoreWrapper):
    """As the store that `came` brings; until then everything raises Transient."""

    def __init__(self, url: str) -> None:  # no store to wrap yet
        self.url, self.late, self.is_exclusive = url, 0.0, False
        self._store: Store | None = None

    def came(self, store: Store) -> None:
        """It is there."""
        self.late, self.is_exclusive = store.late, store.is_exclusive
        self._store = store

    @property
    def inner(self) -> Store:
        """The store that came; raise Transient until then."""
        if self._store is None:
            raise Transient(f"{self.url}: not reached yet", hint="it is asked again every few seconds")
        return self._store
