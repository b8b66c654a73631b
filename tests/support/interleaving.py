"""Several nodes on one store, one step of one of them at a time, in an order that is given: races
that can be had again.

A step is what a store does at once: a listing, a size, a read, the moment in which a file gets its
name.  On a store that cannot create exclusively, looking whether a name is free and writing it are
two steps.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from ckptsync.errors import Exists, NotFound
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store
from ckptsync.stores.memory import MemoryStore
from tests.support.crashing_store import Watched

T = TypeVar("T")


class Turns:
    """Who goes next is drawn from ``dice`` whenever all who still run wait for their turn."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._waiting: set[str] = set()
        self._next = ""
        self._one_at_a_time: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def run(self, work: Mapping[str, Callable[[], object]]) -> dict[str, object]:
        """What each gave, or the exception that it raised."""
        outcomes: dict[str, object] = {}

        def live(name: str) -> None:
            try:
                outcomes[name] = work[name]()
            except BaseException as e:  # noqa: BLE001 - whoever asked for the outcome judges it
                outcomes[name] = e
            with self._changed:
                self._running.discard(name)
                self._deal()

        self._running = set(work)
        threads = [threading.Thread(target=live, args=(name,)) for name in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def take(self, name: str) -> None:
        """Wait for a turn of ``name``; of its threads one at a time.

        Returns at once if its work has ended.
        """
        with self._one_at_a_time[name], self._changed:
            if name not in self._running:
                return
            self._waiting.add(name)
            self._deal()
            self._changed.wait_for(lambda: self._next == name)
            self._next = ""
            self._waiting.discard(name)

    def _deal(self) -> None:
        if self._waiting and self._waiting == self._running and not self._next:
            self._next = self._dice.choice(sorted(self._waiting))
            self._changed.notify_all()


class OneOf(Watched):
    """A node's view of a store that others use, too.

    ``late`` and everything else are the store's.
    """

    def __init__(self, store: Store, node: str, turns: Turns, *, is_exclusive: bool = True) -> None:
        super().__init__(store)
        self.is_exclusive, self._node, self._turns = is_exclusive, node, turns

    def around_read(self, call: Callable[[], T]) -> T:
        self._turns.take(self._node)
        return call()

    def passing(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks, then wait for the turn in which the name is given."""
        yield from chunks
        self._turns.take(self._node)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._check_free(name)
        if self.is_exclusive:
            self.inner.create(name, self.passing(chunks), about)
            return
        content = [bytes(chunk) for chunk in chunks]
        self._check_free(name)
        self.inner.write(name, self.passing(content), about)

    def delete(self, name: str) -> None:
        self._turns.take(self._node)
        self.inner.delete(name)

    def _check_free(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self.size(name)
            raise Exists(f"{name}: already there")


def raced(
    seed: int,
    store: MemoryStore,
    work: Mapping[str, Callable[[Store], object]],
    *,
    is_exclusive: bool,
) -> dict[str, object]:
    """Run all nodes' works at once, in the order that ``seed`` draws; return what each gave."""
    turns = Turns(random.Random(seed))
    stores = {node: OneOf(store, node, turns, is_exclusive=is_exclusive) for node in work}
    return turns.run({node: lambda node=node: work[node](stores[node]) for node in work})  # type: ignore[misc]
