"""A question that may take long, in a thread of its own: whoever asked it hears signals meanwhile, and can tell systemd that it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Asking(Generic[T]):
    """Begins at once.  The thread is a daemon: what is under way when the process ends must be safe to cut short."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._given: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="asking", daemon=True)
        self._thread.start()

    def is_over(self, within: float) -> bool:
        """Whether there is an answer, or an error, in so many seconds."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def answer(self) -> T:
        """Once it is over: what was given, or raised."""
        if self._error is not None:
            raise self._error
        return self._given[0]

    def _run(self) -> None:
        try:
            self._given.append(self._ask())
        except BaseException as e:  # noqa: BLE001 - raised again where it is asked for
            self._error = e
