"""Stored files to a directory of this machine: ranges of them at once, each digested on its way from the network to the disk.

A file appears whole, durable and proven, or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from ckptsync.errors import CkptsyncError, Corrupt, NotFound
from ckptsync.stores.ahead import Reads
from ckptsync.stores.arrival import Arrival, Told, Wanted
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.writing import chunk_room

BUFFER = 1 << 20
THREADS = 8

Failed = Callable[[Wanted, CkptsyncError], object]
"""Told of a file that cannot be had, as its bytes are wrong or not there."""
_Range = tuple[Arrival, tuple[int, int]]


def bring(
    source: Reads,
    target: PosixStore,
    wanted: Iterable[Wanted],
    threads: int = THREADS,
    told: Told = lambda _: None,
    *,
    failed: Failed | None = None,
) -> None:
    """All of them; ``BUFFER`` bytes of memory a thread.  ``told`` is called by any thread.

    Raises Corrupt where bytes are not those of the digest, NotFound, StoreError: the other threads end too, and what has its name is whole.
    With ``failed``, called by one thread at a time, the first two concern their file alone, and the others are brought.  What interrupts the caller
    ends the threads at the next few bytes; a call of the same goes on from there.
    """
    bringing = _Bringing(source, target, wanted, told, failed)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptsync-bring") as pool:
        try:
            wait([pool.submit(bringing.work) for _ in range(threads)])
        except BaseException as e:
            bringing.stop(e)
            raise
        finally:
            pool.shutdown()
            bringing.give_up()
    bringing.end()


class _Stopped(Exception):
    """Another thread has failed, or the caller was interrupted."""


class _Bringing:
    """Ranges, one after the other, for as many threads as come for them."""

    def __init__(self, source: Reads, target: PosixStore, wanted: Iterable[Wanted], told: Told, failed: Failed | None) -> None:
        self._source, self._target, self._told, self._failed = source, target, told, failed
        self._ranges = self._all(wanted)
        self._lock = threading.Lock()
        self._open: dict[Arrival, int] = {}  # how many threads are at it
        self._spoilt: dict[Arrival, CkptsyncError] = {}
        self._error: BaseException | None = None

    def work(self) -> None:
        """Until there is no range left, or a thread has failed."""
        try:
            buffer = chunk_room(BUFFER)
            while found := self._next():
                self._bring(*found, buffer)
        except BaseException as e:  # noqa: BLE001  raised by `end`
            self.stop(e)

    def stop(self, error: BaseException) -> None:
        """No thread goes on; the first error is the one that counts."""
        with self._lock:
            self._error = self._error or error

    def give_up(self) -> None:
        """After the last thread: let go of what is not whole."""
        for arrival in self._open:
            arrival.give_up(self._spoilt.get(arrival) or self._error or _Stopped())

    def end(self) -> None:
        """Raises what the first to fail has raised."""
        if self._error:
            raise self._error

    def _bring(self, arrival: Arrival, span: tuple[int, int], buffer: memoryview) -> None:
        is_there = False
        try:
            is_there = arrival.bring(span, buffer, self._tell)
        except (Corrupt, NotFound) as e:
            if not self._failed:
                raise
            self._spoil(arrival, e, self._failed)
        finally:
            self._leave(arrival, is_there=is_there)

    def _spoil(self, arrival: Arrival, error: CkptsyncError, failed: Failed) -> None:
        with self._lock:
            if arrival not in self._spoilt:
                self._spoilt[arrival] = error
                failed(arrival.wanted, error)

    def _leave(self, arrival: Arrival, *, is_there: bool) -> None:
        """The last thread to leave a spoilt file lets go of it: until then its descriptors are in use."""
        with self._lock:
            self._open[arrival] -= 1
            spoilt = self._spoilt.get(arrival) if not self._open[arrival] else None
            if is_there or spoilt:
                del self._open[arrival]
        if spoilt:
            arrival.give_up(spoilt)

    def _tell(self, count: int) -> None:
        if self._error:
            raise _Stopped
        self._told(count)

    def _next(self) -> _Range | None:
        with self._lock:
            for arrival, span in self._ranges if not self._error else ():
                if arrival not in self._spoilt:
                    self._open[arrival] = self._open.get(arrival, 0) + 1
                    return arrival, span
        return None

    def _all(self, wanted: Iterable[Wanted]) -> Iterator[_Range]:
        """Only one thread at a time goes on with it."""
        for each in wanted:
            arrival = Arrival(self._source, self._target, each)
            for span in each.ranges():
                yield arrival, span
