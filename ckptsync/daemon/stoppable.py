"""A store around a store that ends a write between two chunks once a stop is asked for.

Nothing unfinished stays behind, but for parts of a file that the next start goes on with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ckptsync.errors import Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, StoreWrapper


class Stoppable(StoreWrapper):
    """As the store it is around, until ``is_stopping``: from then on writes raise Transient, since the same succeeds after the next start.

    What they had written is kept to be continued where the store can do that (`About.origin`), and removed elsewhere.
    ``handed``: bytes that were given to be written since the process began, those of tries that failed among them.
    """

    def __init__(self, store: Store, is_stopping: Callable[[], bool]) -> None:
        super().__init__(store)
        self._is_stopping = is_stopping
        self.handed = 0
        self._lock = threading.Lock()

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self.inner.write(name, self._stoppable(name, chunks), about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self.inner.create(name, self._stoppable(name, chunks), about)

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
