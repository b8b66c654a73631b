"""Signals: the first asks for a clean stop, the second ends the process at once; SIGHUP asks to read the configuration again."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ckptsync.stores import ending

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """Set once, by a signal or by a tick that failed for good.  A pipe, since a signal handler may take no lock."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.asked = self.is_reload_asked = self._is_signalled = False
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
            self.rest(left)
        return self.asked

    def rest(self, seconds: float) -> bool:
        """As `wait`, but a wish to reload ends it too."""
        ready = select.poll()  # select(2) knows no descriptor above 1,023
        ready.register(self._reader, select.POLLIN)
        if not (self.asked or self.is_reload_asked) and ready.poll(seconds * 1000):
            os.read(self._reader, 4096)
        return self.asked

    def taken(self) -> bool:
        """Whether to reload was asked for; it is not asked for any more."""
        was, self.is_reload_asked = self.is_reload_asked, False
        return was

    def on_signal(self, number: int, _frame: object) -> None:
        """SIGTERM and SIGINT; SIGHUP too on a terminal, which is being closed."""
        if number == signal.SIGHUP and not sys.stderr.isatty():
            self.is_reload_asked = True
            os.write(self._writer, b"!")
            return
        if self._is_signalled:
            os._exit(128 + number)
        self._is_signalled = True
        self.ask()

    def leave(self) -> NoReturn:
        """End this process at once, threads and all."""
        logging.shutdown()
        sys.stderr.flush()
        os._exit(self.code)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Signals are taken over within the block, in the main thread; SIGHUP is not where it is ignored, as under nohup."""
    stop = Stopping()
    ending.begin()
    heard = [number for number in HEARD if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.on_signal) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
