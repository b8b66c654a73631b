"""A store that dies: for tests of what a killed process leaves behind.

for lives in itertools.count():
    store = MemoryStore()
    try:
        work(Dying(store, lives))
    except Crash:
        ...  # nothing half done is visible in ``store``; the work, done again, completes it
    else:
        break  # it lived to the end: every point of death has been tried
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, StoreWrapper

T = TypeVar("T")


class Crash(BaseException):
    """The process is dead.  No `Exception`: code that is dead handles no errors."""


class Watched(StoreWrapper):
    """A store in front of another, to which something happens in each call.

    A subclass says what happens around a call that reads, and around one that changes something,
    and what to the chunks that are written: here, nothing.
    """

    def around_read(self, call: Callable[[], T]) -> T:
        """Do what reads."""
        return call()

    def around_change(self, call: Callable[[], T]) -> T:
        """Do what changes something."""
        return call()

    def passing(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of a file that is written."""
        yield from chunks

    def names(self, prefix: str) -> Iterator[Entry]:
        yield from self.around_read(lambda: list(self.inner.names(prefix)))

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        return self.around_read(lambda: self.inner.dirs(prefix, start))

    def size(self, name: str) -> int:
        return self.around_read(lambda: self.inner.size(name))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.around_read(lambda: self.inner.read_into(name, start, out))

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.around_change(lambda: self.inner.write(name, self.passing(chunks), about))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.around_change(lambda: self.inner.create(name, self.passing(chunks), about))

    def delete(self, name: str) -> None:
        self.around_change(lambda: self.inner.delete(name))


class Dying(Watched):
    """A store in front of ``store`` that dies at the ``lives``-th moment, and stays dead for every
    call.

    A mutating call (write, create, delete) has three moments: before it, in the middle of its
    chunks, after its effect. So ``lives`` from 0 upwards tries every death there is.
    """

    def __init__(self, store: Store, lives: int) -> None:
        super().__init__(store)
        self._lives, self._is_dead = lives, False
        self._lock = threading.Lock()

    def around_read(self, call: Callable[[], T]) -> T:
        self._live()
        return call()

    def around_change(self, call: Callable[[], T]) -> T:
        self._pass_moment()
        result = call()
        self._pass_moment()
        return result

    def passing(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks; die after half of the first one, or before the end of an empty file."""
        is_first = True
        for chunk in chunks:
            if is_first and self._lives == 0:
                yield memoryview(chunk)[: len(chunk) // 2]
            if is_first:
                self._pass_moment()
            is_first = False
            yield chunk
        if is_first:
            self._pass_moment()

    def _pass_moment(self) -> None:
        """Count one moment; raise Crash at the last one, and ever after."""
        self._live()
        with self._lock:
            self._is_dead = self._lives == 0
            self._lives -= 1
        self._live()

    def _live(self) -> None:
        """Raise Crash if the store is dead."""
        if self._is_dead:
            raise Crash
