"""One thing at a time that takes long, done by a thread, so that who asks for it never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """`begin` something, and `take` what it gave, at any later moment.  It has at most the ``share`` of the time.

    The thread is a daemon: what is under way when the process ends must be safe to cut short.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._thread: threading.Thread | None = None
        self._given: T | None = None
        self._error: BaseException | None = None
        self._not_before = float("-inf")

    def begin(self, do: Callable[[], T]) -> bool:
        """Whether it was begun: not while another is under way, nor too soon after it."""
        if self._thread is not None or self._clock() < self._not_before:
            return False
        self._thread = threading.Thread(target=self._run, args=(do,), name="aside", daemon=True)
        self._thread.start()
        return True

    def take(self) -> T | None:
        """What it gave, once; ``None`` while there is nothing.  Raises what it raised."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        given, error = self._given, self._error
        self._given = self._error = None
        if error is not None:
            raise error
        return given

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, do: Callable[[], T]) -> None:
        begun = self._clock()
        try:
            self._given = do()
        except BaseException as e:  # noqa: BLE001 - raised again where it is asked for
            self._error = e
        ended = self._clock()
        self._not_before = ended + (ended - begun) * (1 / self._share - 1)
