"""Signals: the first asks for a clean stop, the second ends the process at once."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptsync.stores import ending


class Stopping:
    """Set once, by a signal or by a tick that failed for good.  A pipe, since a signal handler may take no lock."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self.asked = False
        self.code = 0

    def ask(self, code: int = 0) -> None:
        """Ask for a stop; the first one that is not 0 decides the exit code."""
        self.asked, self.code = True, self.code or code
        ending.announce()
        os.write(self._writer, b"!")

    def wait(self, seconds: float) -> bool:
        """Wait until it is asked for, at most ``seconds``; whether it was."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            select.select([self._reader], [], [], left)
        return self.asked

    def on_signal(self, number: int, _frame: object) -> None:
        """SIGTERM, SIGINT, and SIGHUP: a terminal that is closed."""
        if self.asked:
            os._exit(128 + number)
        self.ask()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Signals are taken over within the block, in the main thread."""
    stop = Stopping()
    ending.begin()
    before = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
