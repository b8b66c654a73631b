"""The only place that tries again after a transient failure, with growing waits.

Networks and servers fail for seconds, and a long upload must not end for that; yet retries in
several layers multiply. So stores raise Transient, and `Persistence` alone waits and calls again,
for a limited time.

A store that has worked in this process is configured correctly. If it refuses later (a key that was
changed in the server, a certificate that has expired, a bucket that is missing), that is a failure
like any other: it passes when somebody corrects it, and is no reason to end.
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
FIRST = 0.25  # s: the first wait is at most so long, each next one at most twice the one before
CAP = 30.0  # s: the longest wait

log = logging.getLogger(__name__)


class Persistence:
    """How long to try again, for all threads of a store.

    It is shared, so that an error that all threads see is logged once.

    Waits are random, between 0 and a bound that doubles ("full jitter",
    aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter): workers that failed together
    do not come back together.

    ``patience``: seconds after a call's first failure for which it is tried again. The other
    parameters are replaced by tests.
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
        self._failing = 0  # calls that have failed and are being tried again
        # when the first of them failed, on `clock`
        self._failing_since: float | None = None

    def call(self, fn: Callable[[], T], may_repeat: Callable[[], bool] = lambda: True) -> T:
        """Call ``fn`` until it does not raise Transient; return its result.

        It sleeps between tries. ``patience`` seconds after the first failure, or if a shutdown was
        announced, the last error is raised. No try is made before `Transient.after`: if that is
        later than patience lasts, the error is raised at once. A ConfigError counts as Transient
        once any call has worked. Other errors are raised unchanged, and so is one after which
        ``may_repeat`` returns false.

        A warning is logged for a failure while no other call is failing, and when all work again.
        """
        tries, first = 0, 0.0
        is_waiting = False
        try:
            while True:
                try:
                    result = self._try_once(fn)
                except Transient as e:
                    if not may_repeat():
                        raise
                    error = without_frames(e)
                else:
                    break
                if not tries:
                    first = self._clock()
                tries += 1
                wait = self._seconds_to_wait(error, tries, first)
                if not is_waiting:
                    is_waiting = True
                    self._log_failure(error)
                self._sleep(wait)
                if progress_signs.is_shutting_down():
                    raise _add_tries(error, tries, self._clock() - first)
        finally:
            if is_waiting:
                with self._lock:
                    self._failing -= 1
        self._log_recovery()
        return result

    def _try_once(self, fn: Callable[[], T]) -> T:
        """Return what ``fn`` returns; raise a ConfigError as Transient if a call worked before."""
        try:
            result = fn()
        except ConfigError as e:
            if not self._has_worked:
                raise
            raise Transient(str(e), hint=e.hint) from e
        self._has_worked = True
        return result

    def _seconds_to_wait(self, error: Transient, tries: int, first_failure: float) -> float:
        """Return the seconds until the next try, and count a sign of progress.

        ``tries``: how many have failed; ``first_failure``: when the first did, on the clock. Raise
        ``error``, of the last one, if no time is remaining, or less than ``error.after``, or if a
        shutdown was announced.
        """
        progress_signs.sign()
        spent = self._clock() - first_failure
        remaining = self._patience - spent
        if remaining <= 0 or error.after > remaining or progress_signs.is_shutting_down():
            raise _add_tries(error, tries, spent)
        return min(remaining, max(error.after, self._chance() * backoff(tries, FIRST, CAP)))

    def _log_failure(self, error: Transient) -> None:
        """Count a failing call; log a warning unless failures were logged and are not over."""
        with self._lock:
            self._failing += 1
            is_first = self._failing_since is None
            if is_first:
                self._failing_since = self._clock()
        if is_first:
            log.warning("%s: trying again for up to %.0f s", error, self._patience)

    def _log_recovery(self) -> None:
        """Log a warning that the store works again, if it failed and no call is failing now."""
        if self._failing_since is None or self._failing:
            return
        with self._lock:
            since, self._failing_since = self._failing_since, None
        if since is not None:
            log.warning("the store works again after %.1f s", self._clock() - since)


def _sleep(seconds: float) -> None:
    """Sleep for some seconds; return within 0.25 s after a shutdown is announced."""
    end = time.monotonic() + seconds
    while not progress_signs.is_shutting_down() and (remaining := end - time.monotonic()) > 0:
        time.sleep(min(remaining, 0.25))


def _add_tries(error: Transient, tries: int, seconds: float) -> Transient:
    """Add to the error's hint how often, and for how long, the call was tried; return the error."""
    if tries > 1:
        error.hint = "; ".join(
            filter(None, [error.hint, f"given up after {tries} tries in {seconds:.0f} s"])
        )
    return error


class Retrying(StoreWrapper):
    """A store that tries the calls of another store again after transient failures.

    A write is tried again if none of its chunks was read yet, or if they can be iterated over again
    (no iterator); not if the chunks raised the error. A listing that breaks continues after its
    last name.
    """

    def __init__(self, store: Store, persistence: Persistence) -> None:
        super().__init__(store)
        self._persistence = persistence

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield the files below ``prefix``; after a failure list again, behind the last name."""
        last = ""

        def begin() -> tuple[Entry | None, Iterator[Entry]]:
            """Return the first entry after ``last``, and the listing that follows it."""
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
        """Call ``put`` with ``chunks``; after Transient again, if they can be read again."""
        source = _RepeatableChunks(chunks)
        self._persistence.call(lambda: put(source), lambda: not source.is_spent)


class _RepeatableChunks:
    """Chunks, and whether they can be read again from the beginning (`is_spent` is false).

    They cannot if they are an iterator that has begun, or if they raised an error.
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
