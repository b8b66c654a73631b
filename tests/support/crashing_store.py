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

from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, StoreWrapper


class Crash(BaseException):
    """The process is dead.  No `Exception`: code that is dead handles no errors."""


class Dying(StoreWrapper):
    """A store in front of ``store`` that dies at the ``lives``-th moment, and stays dead for every
    call.

    A mutating call (write, create, delete) has three moments: before it, in the middle of its
    chunks, after its effect. So ``lives`` from 0 upwards tries every death there is.
    """

    def __init__(self, store: Store, lives: int) -> None:
        super().__init__(store)
        self._lives, self._is_dead = lives, False
        self._lock = threading.Lock()

    def names(self, prefix: str) -> Iterator[Entry]:
        self._live()
        yield from self.inner.names(prefix)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        self._live()
        return self.inner.dirs(prefix, start)

    def size(self, name: str) -> int:
        self._live()
        return self.inner.size(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._live()
        self.inner.read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._mutate(lambda: self.inner.write(name, self._dying(chunks), about))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._mutate(lambda: self.inner.create(name, self._dying(chunks), about))

    def delete(self, name: str) -> None:
        self._mutate(lambda: self.inner.delete(name))

    def _mutate(self, effect: Callable[[], None]) -> None:
        self._pass_moment()
        effect()
        self._pass_moment()

    def _dying(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The moment in the middle: half of the first chunk has been taken, or nothing of an empty
        file.
        """
        is_first = True
        for chunk in chunks:
            if is_first and self._is_last_moment():
                yield memoryview(chunk)[: len(chunk) // 2]
            if is_first:
                self._pass_moment()
            is_first = False
            yield chunk
        if is_first:
            self._pass_moment()

    def _is_last_moment(self) -> bool:
        return self._lives == 0

    def _pass_moment(self) -> None:
        self._live()
        with self._lock:
            self._is_dead = self._lives == 0
            self._lives -= 1
        self._live()

    def _live(self) -> None:
        if self._is_dead:
            raise Crash
