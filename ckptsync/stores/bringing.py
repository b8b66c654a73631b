"""Stored files to a directory of this machine: ranges of them at once, each digested on its way from the network to the disk.

A file appears whole, durable and proven, or not at all.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptsync.stores.ahead import Reads
from ckptsync.stores.arrival import Arrival, Told, Wanted
from ckptsync.stores.posix.store import PosixStore

BUFFER = 1 << 20
THREADS = 8

_Range = tuple[Arrival, tuple[int, int]]


def bring(source: Reads, target: PosixStore, wanted: Iterable[Wanted], threads: int = THREADS, told: Told = lambda _: None) -> None:
    """All of them; ``BUFFER`` bytes of memory a thread.  ``told`` is called by any thread.

    Raises Corrupt where bytes are not those of the digest, NotFound, StoreError: the other threads end too, and what has its name is whole.
    """
    bringing = _Bringing(source, target, wanted, told)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptsync-bring") as pool:
        for _ in range(threads):
            pool.submit(bringing.work)
    bringing.end()


class _Bringing:
    """Ranges, one after the other, for as many threads as come for them."""

    def __init__(self, source: Reads, target: PosixStore, wanted: Iterable[Wanted], told: Told) -> None:
        self._source, self._target, self._told = source, target, told
        self._ranges = self._all(wanted)
        self._lock = threading.Lock()
        self._open: set[Arrival] = set()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Until there is no range left, or a thread has failed."""
        try:
            buffer = memoryview(mmap.mmap(-1, BUFFER))  # begins where a disk wants memory to begin
            while found := self._next():
                arrival, span = found
                if arrival.bring(span, buffer, self._told):
                    with self._lock:
                        self._open.discard(arrival)
        except BaseException as e:  # noqa: BLE001  raised by `end`
            with self._lock:
                self._error = self._error or e

    def end(self) -> None:
        """After the last thread: raises what the first to fail has raised."""
        for arrival in self._open if self._error else ():
            arrival.give_up(self._error)  # type: ignore[arg-type]  # it is there
        if self._error:
            raise self._error

    def _next(self) -> _Range | None:
        with self._lock:
            return None if self._error else next(self._ranges, None)

    def _all(self, wanted: Iterable[Wanted]) -> Iterator[_Range]:
        """Only one thread at a time goes on with it."""
        for each in wanted:
            arrival = Arrival(self._source, self._target, each)
            self._open.add(arrival)
            for span in each.ranges():
                yield arrival, span
