"""A store that fails transiently now and then: before its effect, between chunks, after its effect
(the answer is lost).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptsync.errors import Transient
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store
from tests.support.crashing_store import Watched

T = TypeVar("T")


class Flaky(Watched):
    """As ``store``, but every ``nth`` moment is a failure.

    A write has one before, one between chunks and one after its effect.
    """

    def __init__(self, store: Store, nth: int) -> None:
        super().__init__(store)
        self._nth, self._moments = nth, itertools.count(1)
        self.failures = 0

    def names(self, prefix: str) -> Iterator[Entry]:
        self._pass_moment()
        for n, entry in enumerate(self.inner.names(prefix)):
            if n == 1:  # and not at every name, else a long listing would never end
                self._pass_moment()
            yield entry

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        # none after the effect: whoever is told Exists may find his own bytes, and tests count
        # winners
        self._pass_moment()
        self.inner.create(name, self.passing(chunks), about)

    def around_read(self, call: Callable[[], T]) -> T:
        self._pass_moment()
        result = call()
        self._pass_moment()
        return result

    around_change = around_read

    def passing(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for n, chunk in enumerate(chunks):
            yield chunk
            if n == 0:
                self._pass_moment()

    def _pass_moment(self) -> None:
        if next(self._moments) % self._nth == 0:
            self.failures += 1
            raise Transient("the server said 503")


class FailsAt(Flaky):
    """Fails at the ``nth`` moment only."""

    def _pass_moment(self) -> None:
        if next(self._moments) == self._nth:
            raise Transient("the server said 503")
