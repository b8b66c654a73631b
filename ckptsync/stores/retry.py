"""The only place that tries again: what failed transiently, with growing waits, for a while.

A store that has worked in this process is rightly configured.  What refuses it from then on (a key that was changed in the server, a certificate that
has ended, a bucket that is away) is a failure like any other: it passes when somebody changes that, and is no reason to end.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptsync.errors import ConfigError, Transient
from ckptsync.stores import ending, signs
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, StoreWrapper

T = TypeVar("T")
FIRST = 0.25  # seconds that the first wait has at most; each next one twice as many
CAP = 30.0

log = logging.getLogger(__name__)


class Persistence:
    """How long to try again; one for all threads of a store, so that what all of them see is said once.

    Waits are drawn between nothing and a bound that doubles ("full jitter", aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter):
    workers that failed together do not come back together.
    """

    def __init__(
        self,
        patience: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._patience, self._clock, self._sleep, self._chance = patience, clock, sleep or _pause, chance
        self._lock = threading.Lock()
        self._has_worked = False
        self._failing = 0  # operations that have failed and are being tried again
        self._away: float | None = None  # since when, once something was given up and nothing has worked again

    def call(self, fn: Callable[[], T]) -> T:
        """What ``fn`` gives.  It is called again while it raises Transient, for at most ``patience`` seconds after it first did; then that is raised.

        Not before `Transient.after`: where that is later than patience lasts, it is raised at once.  A ConfigError is Transient, too, once anything
        has worked.  Any other error is raised as it is.
        """
        try:
            result = self._once(fn)
        except Transient as e:
            last, since = e, self._clock()
        else:
            if self._away is not None:
                self._say_back()
            return result
        wait = self._wait(last, 1, since)
        self._say_failing(last)
        try:
            result = self._again(fn, last, wait, since)
        except BaseException as e:
            with self._lock:
                self._failing -= 1
                self._away = since if self._away is None and isinstance(e, Transient) else self._away
            raise
        with self._lock:
            self._failing -= 1
            self._away = since if self._away is None and not self._failing else self._away
        self._say_back()
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

    def _again(self, fn: Callable[[], T], last: Transient, wait: float, since: float) -> T:
        for tries in itertools.count(2):
            self._sleep(wait)
            if ending.is_near():
                raise _given_up(last, tries - 1, self._clock() - since)
            try:
                return self._once(fn)
            except Transient as e:
                last = e
            wait = self._wait(last, tries, since)
        raise AssertionError

    def _wait(self, last: Transient, tries: int, since: float) -> float:
        """Seconds until the next try; raises ``last`` where none is left."""
        signs.give()
        spent = self._clock() - since
        left = self._patience - spent
        if left <= 0 or last.after > left or ending.is_near():
            raise _given_up(last, tries, spent)
        return min(left, max(last.after, self._chance() * min(CAP, FIRST * 2.0 ** min(tries - 1, 32))))

    def _say_failing(self, e: Transient) -> None:
        """Once: not again while what was given up has not worked since."""
        with self._lock:
            self._failing += 1
            is_first = self._failing == 1 and self._away is None
        if is_first:
            log.warning("%s: trying again for up to %.0f s", e, self._patience)

    def _say_back(self) -> None:
        with self._lock:
            since, self._away = self._away, None
        if since is not None:
            log.warning("works again after %.1f s", self._clock() - since)


def _pause(seconds: float) -> None:
    """Sleep, but not into the end of the process."""
    until = time.monotonic() + seconds
    while not ending.is_near() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.25))


def _given_up(e: Transient, tries: int, seconds: float) -> Transient:
    if tries > 1:
        e.hint = "; ".join(filter(None, [e.hint, f"given up after {tries} tries in {seconds:.0f} s"]))
    return e


class Retrying(StoreWrapper):
    """As the store it is around, but what fails transiently is tried again.

    A write is tried again if none of its chunks was taken yet, or if they can be iterated over again (no iterator); not if they were what failed.
    """

    def __init__(self, store: Store, persistence: Persistence) -> None:
        super().__init__(store)
        self._persistence = persistence

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says; a listing that breaks goes on behind the name that was given out last."""
        listing = _Listing(self.inner, prefix)
        while (entry := self._persistence.call(listing.following)) is not None:
            yield entry

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        return self._persistence.call(lambda: self.inner.dirs(prefix, start))

    def size(self, name: str) -> int:
        """As the contract says."""
        return self._persistence.call(lambda: self.inner.size(name))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        self._persistence.call(lambda: self.inner.read_into(name, start, out))

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._put(chunks, lambda source: self.inner.write(name, source, about))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._put(chunks, lambda source: self.inner.create(name, source, about))

    def delete(self, name: str) -> None:
        """As the contract says."""
        self._persistence.call(lambda: self.inner.delete(name))

    def _put(self, chunks: Iterable[Chunk], put: Callable[[Iterable[Chunk]], None]) -> None:
        source = _Source(chunks)

        def attempt() -> None:
            try:
                put(source)
            except Transient as e:
                if source.is_spent:
                    raise _NotAgain(e) from e
                raise

        try:
            self._persistence.call(attempt)
        except _NotAgain as e:
            raise e.error from None


class _NotAgain(Exception):
    """Trying again may help, but cannot be done here."""

    def __init__(self, error: Transient) -> None:
        super().__init__(str(error))
        self.error = error


class _Source:
    """Chunks that say whether they can be had again: not so where an iterator has begun, or where they failed themselves."""

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


class _Listing:
    """Names in order, begun again behind the last one if it breaks."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix, self._last = store, prefix, ""
        self._entries: Iterator[Entry] | None = None

    def following(self) -> Entry | None:
        """The next entry; `None` at the end."""
        self._entries = self._entries or self._store.names(self._prefix)
        try:
            found = next((entry for entry in self._entries if entry.name > self._last), None)
        except Transient:
            self._entries = None  # it is over for good: a generator that raised gives nothing more
            raise
        self._last = found.name if found else self._last
        return found
