"""A store that is not there yet: what is told of it is its location, and whoever asks more hears that it is being waited for.

So pinning begins with the process, however long a mount or a network takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptsync.errors import Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store


class Awaited:
    """As the store that `came` brings; until then everything raises Transient."""

    def __init__(self, url: str) -> None:
        self.url, self.late, self.is_exclusive = url, 0.0, False
        self._store: Store | None = None

    def came(self, store: Store) -> None:
        """It is there."""
        self.late, self.is_exclusive = store.late, store.is_exclusive
        self._store = store

    @property
    def _there(self) -> Store:
        if self._store is None:
            raise Transient(f"{self.url}: not reached yet", hint="it is asked again every few seconds")
        return self._store

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        return self._there.names(prefix)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        return self._there.dirs(prefix, start)

    def size(self, name: str) -> int:
        """As the contract says."""
        return self._there.size(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        self._there.read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._there.write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._there.create(name, chunks, about)

    def delete(self, name: str) -> None:
        """As the contract says."""
        self._there.delete(name)
