"""Several files of one save at once.  The worker's only threads are here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckptsync.errors import StoreError, Transient
from ckptsync.stores import signs
from ckptsync.worker.snapshot import Passed, nothing

T = TypeVar("T")
R = TypeVar("R")


class Together:
    """``threads`` at once, until one fails: then the others end at their next chunk, and its error is raised.

    ``hook`` is told by one thread at a time.  For one use after the other, by one caller.
    """

    def __init__(self, threads: int, passed: Passed = nothing) -> None:
        self.threads = threads
        self.hook = passed
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def passed(self, count: int) -> None:
        """For whoever handles chunks within `each`; raises StoreError once another has failed."""
        with self._lock:
            self._go_on()
            signs.give()
            self.hook(count)

    def each(self, work: Callable[[T], R], items: Sequence[T], threads: int = 0) -> list[R]:
        """``work`` done on each of them, begun in their order; the results in their order.  Returns, or raises, when nothing runs any more."""
        count = min(threads or self.threads, len(items))
        if count <= 1:
            return [work(item) for item in items]
        found: dict[int, R] = {}
        following = iter(range(len(items)))  # one for all: a future for each item would cost more than a small file's digest
        turns = threading.Lock()

        def run() -> None:
            while True:
                with turns:
                    n = next(following, None)
                if n is None:
                    return
                found[n] = self._guarded(work, items[n])

        with ThreadPoolExecutor(count, thread_name_prefix="ckptsync-file") as pool:
            futures = [pool.submit(signs.carried(run)) for _ in range(count)]
            try:
                for future in futures:
                    future.result()
            except BaseException as e:  # noqa: BLE001 - raised below, or another that came before it
                with self._lock:
                    self._error = first = self._error or e
                pool.shutdown(cancel_futures=True)
                self._error = None
                raise first from first.__cause__
        return [found[n] for n in range(len(items))]

    def _guarded(self, work: Callable[[T], R], item: T) -> R:
        try:
            self._go_on()
            return work(item)
        except BaseException as e:
            with self._lock:
                self._error = self._error or e
            raise

    def _go_on(self) -> None:
        if self._error is not None:  # of its kind: what may pass lets stores keep what of the others was sent
            kind = Transient if isinstance(self._error, Transient) else StoreError
            raise kind("ended, since another file failed")
