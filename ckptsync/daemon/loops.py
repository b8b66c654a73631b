"""Ticks on monotonic time, a thread each: a wall clock that is set an hour back holds up none of them.

They wait in poll(2).  ``Event.wait`` would be shorter, but counts wall time where Python was built without sem_clockwait(3), as the common
standalone builds are.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckptsync.daemon.tick import Tick


@contextmanager
def looping(ticks: Iterable[Tick]) -> Iterator[None]:
    """Every tick runs at once and then every ``tick.every`` seconds, until the block ends; running ones are not waited for."""
    loops = [_Loop(tick) for tick in ticks]
    try:
        for loop in loops:
            loop.begin()
        yield
    finally:
        for loop in loops:
            loop.end()


class _Loop:
    def __init__(self, tick: Tick) -> None:
        self._tick, self._due, self._is_ending = tick, 0.0, False
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)
        self._thread = threading.Thread(target=self._run, name=tick.name, daemon=True)

    def begin(self) -> None:
        self._tick.soon = self._soon
        self._thread.start()

    def end(self) -> None:
        self._tick.soon = lambda _: None
        with self._lock:
            self._is_ending = True
            self._wake()

    def _soon(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        with self._lock:
            if due < self._due:
                self._due = due
                self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # the pipe is full of other wakes
        except OSError:
            if not self._is_ending:  # the thread has ended, and closed it
                raise

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        while not self._is_ending:
            left = self._due - time.monotonic()
            if left > 0:
                if ready.poll(left * 1000):
                    os.read(self._reader, 4096)
                continue
            self._once()
        with self._lock:
            os.close(self._reader)
            os.close(self._writer)

    def _once(self) -> None:
        """A tick that took longer than its period rests as long as that."""
        began = time.monotonic()
        with self._lock:
            self._due = float("inf")
        self._tick()
        took = time.monotonic() - began
        self._soon(max(self._tick.every - took, min(took, self._tick.every)))
