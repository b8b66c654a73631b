"""The only place that tries again: what failed transiently, with growing waits, for a while.

A store that has worked in this process is rightly configured. What refuses it from then on (a key
that was changed in the server, a certificate that has ended, a bucket that is away) is a failure
like any other: it passes when somebody changes that, and is no reason to end.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptsync.errors import ConfigError, Transient, without_frames
from ckptsync.quantities import backoff
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, StoreWrapper

T = TypeVar("T")
FIRST = 0.25  # seconds that the first wait has at most; each next one twice as many
CAP = 30.0

log = logging.getLogger(__name__)


class Persistence:
    """How long to try again, for all threads of a store.

    It is shared, so that an error that all threads see is logged once.

    Waits are drawn between nothing and a bound that doubles ("full jitter",
    aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter): workers that failed together
    do not come back together.
    """

    def __init__(
        self,
        patience: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._patience, self._clock, self._chance = patience, clock, chance
        self._sleep = sleep or _sleep
        self._lock = threading.Lock()
        self._has_worked = False
        self._failing = 0  # operations that have failed and are being tried again
        self._since: float | None = None  # when something failed first since all worked

    def call(self, fn: Callable[[], T], may_repeat: Callable[[], bool] = lambda: True) -> T:
        """Return what ``fn`` returns.

        Call it again while it raises Transient, for at most ``patience`` seconds.

        Then the last error is raised. No try is made before `Transient.after`: where that is later
        than patience lasts, it is raised at once. A ConfigError is Transient, too, once anything
        has worked. Any other error is raised as it is, and so is one after which ``may_repeat``
        returns false.
        """
        tries, first = 0, 0.0
        is_waiting = False
        try:
            while True:
                try:
                    result = self._once(fn)
                except Transient as e:
                    if not may_repeat():
                        raise
                    error = without_frames(e)
                else:
                    break
                if not tries:
                    first = self._clock()
                tries += 1
                wait = self._wait(error, tries, first)
                if not is_waiting:
                    is_waiting = True
                    self._log_failure(error)
                self._sleep(wait)
                if progress_signs.is_shutting_down():
                    raise _given_up(error, tries, self._clock() - first)
        finally:
            if is_waiting:
                with self._lock:
                    self._failing -= 1
        self._log_recovery()
        return result

    def _once(self, fn: Callable[[], T]) -> T:
        try:
            result = fn()
        except ConfigError as e:
            if not self._has_worked:
                raise
            raise Transient(str(e), hint=e.hint) from e
        self._has_worked = True
        return result

    def _wait(self, error: Transient, tries: int, first: float) -> float:
        """Return the seconds until the next try; raise ``error`` where none is left."""
        progress_signs.sign()
        spent = self._clock() - first
        left = self._patience - spent
        if left <= 0 or error.after > left or progress_signs.is_shutting_down():
            raise _given_up(error, tries, spent)
        return min(left, max(error.after, self._chance() * backoff(tries, FIRST, CAP)))

    def _log_failure(self, error: Transient) -> None:
        with self._lock:
            self._failing += 1
            is_first = self._since is None
            if is_first:
                self._since = self._clock()
        if is_first:
            log.warning("%s: trying again for up to %.0f s", error, self._patience)

    def _log_recovery(self) -> None:
        if self._since is None or self._failing:
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            log.warning("the store works again after %.1f s", self._clock() - since)


def _sleep(seconds: float) -> None:
    """Sleep, but not into the end of the process."""
    until = time.monotonic() + seconds
    while not progress_signs.is_shutting_down() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.25))


def _given_up(error: Transient, tries: int, seconds: float) -> Transient:
    if tries > 1:
        error.hint = "; ".join(
            filter(None, [error.hint, f"given up after {tries} tries in {seconds:.0f} s"])
        )
    return error


class Retrying(StoreWrapper):
    """Try again what fails transiently in another store.

    A write is tried again if none of its chunks was taken yet, or if they can be iterated over
    again (no iterator); not if they were what failed. A listing that breaks goes on behind the last
    name.
    """

    def __init__(self, store: Store, persistence: Persistence) -> None:
        super().__init__(store)
        self._persistence = persistence

    def names(self, prefix: str) -> Iterator[Entry]:
        last = ""

        def begin() -> tuple[Entry | None, Iterator[Entry]]:
            entries = self.inner.names(prefix)
            return next((entry for entry in entries if entry.name > last), None), entries

        while True:
            entry, entries = self._persistence.call(begin)
            with contextlib.suppress(Transient, ConfigError):  # then list again, behind the last
                while entry is not None:
                    last = entry.name
                    yield entry
                    entry = next(entries, None)
                return

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        return self._persistence.call(lambda: self.inner.dirs(prefix, start))

    def size(self, name: str) -> int:
        return self._persistence.call(lambda: self.inner.size(name))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._persistence.call(lambda: self.inner.read_into(name, start, out))

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._put(chunks, lambda source: self.inner.write(name, source, about))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._put(chunks, lambda source: self.inner.create(name, source, about))

    def delete(self, name: str) -> None:
        self._persistence.call(lambda: self.inner.delete(name))

    def _put(self, chunks: Iterable[Chunk], put: Callable[[Iterable[Chunk]], None]) -> None:
        source = _Repeatable(chunks)
        self._persistence.call(lambda: put(source), lambda: not source.is_spent)


class _Repeatable:
    """Chunks that know whether they can be read again from the beginning.

    They cannot if an iterator has begun, or if they raised an error.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self.is_spent = False

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for chunk in self._chunks:
                self.is_spent = isinstance(self._chunks, Iterator)
                yield chunk
        except Exception:
            self.is_spent = True
            raise
