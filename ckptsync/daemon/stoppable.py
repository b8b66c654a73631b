"""A store around a store that ends a write between two chunks once a stop is asked for.

Nothing unfinished stays behind, but for parts of a file that the next start goes on with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ckptsync.errors import Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store


class Stoppable:
    """As the store it is around, until ``is_stopping``: from then on writes raise Transient, since the same succeeds after the next start.

    What they had written is kept to be continued where the store can do that (`About.origin`), and removed elsewhere.
    ``handed``: bytes that were given to be written since the process began, those of tries that failed among them.
    """

    def __init__(self, store: Store, is_stopping: Callable[[], bool]) -> None:
        self._store, self._is_stopping = store, is_stopping
        self.url, self.late, self.is_exclusive = store.url, store.late, store.is_exclusive
        self.handed = 0
        self._lock = threading.Lock()

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        return self._store.names(prefix)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        return self._store.dirs(prefix, start)

    def size(self, name: str) -> int:
        """As the contract says."""
        return self._store.size(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        self._store.read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._store.write(name, self._stoppable(name, chunks), about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._store.create(name, self._stoppable(name, chunks), about)

    def delete(self, name: str) -> None:
        """As the contract says."""
        self._store.delete(name)

    def _stoppable(self, name: str, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        until = _Until(self._is_stopping, name, chunks, self._count)
        return iter(until) if isinstance(chunks, Iterator) else until

    def _count(self, size: int) -> None:
        with self._lock:  # several files are written at once
            self.handed += size


class _Until:
    """Chunks, until a stop is asked for; those that can be had again can be had again."""

    def __init__(self, is_stopping: Callable[[], bool], name: str, chunks: Iterable[Chunk], count: Callable[[int], None]) -> None:
        self._is_stopping, self._name, self._chunks, self._count = is_stopping, name, chunks, count

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            if self._is_stopping():
                raise Transient(f"{self._name}: not written, the service is stopping", hint="the next start goes on with it")
            yield chunk
            self._count(memoryview(chunk).nbytes)
