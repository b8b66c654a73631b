"""One role's tick inside the error boundary.

An operator's error (`CkptsyncError`) is logged once per change and counted, and the next tick tries again.  Anything else is our
bug: its traceback is logged and the process ends, so that its supervisor starts it afresh.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ckptsync.daemon.phases import pairs
from ckptsync.errors import CkptsyncError

DEBOUNCE = 0.3  # seconds that a hint waits for others: a trainer writes many files at once

log = logging.getLogger(__name__)


class Soon(Protocol):
    """Runs the tick within so many seconds."""

    def __call__(self, seconds: float, /) -> None: ...


class Tick:
    """``name`` and what to do; ``soon`` is set by what runs it, ``fatal`` is told what nobody can act on."""

    def __init__(self, name: str, every: float, body: Callable[[], object], fatal: Callable[[BaseException], None]) -> None:
        self.name, self.every = name, every
        self.soon: Soon = lambda _: None
        self.error = ""
        """What the last tick said; empty if it was well."""
        self.failures = self.finished = 0
        self.is_running = False
        self.began = 0.0
        """When it was last begun, on the monotonic clock."""
        self.thread = 0
        """The kernel's number of the thread that runs it, or did last."""
        self._body, self._fatal = body, fatal
        self._lock = threading.Lock()
        self._wanted: float | None = None

    def __call__(self) -> None:
        """Run once.  Never raises."""
        with self._lock:
            self.is_running, self.thread, self.began = True, threading.get_native_id(), time.monotonic()
            if self._wanted is not None and self._wanted <= time.monotonic():
                self._wanted = None
        try:
            self._guarded()
        finally:
            with self._lock:
                self.finished += 1
                self.is_running = False
                wanted = self._wanted
            if wanted is not None:
                self.soon(max(0.0, wanted - time.monotonic()))

    def hint(self) -> None:
        """Look soon; once more if a tick is running, since it may have looked already.  Any number of hints is one."""
        self.at(DEBOUNCE)

    def at(self, seconds: float) -> None:
        """Run in so many seconds, or earlier: of several wishes the first counts; those that came while it ran, once it has ended."""
        wanted = time.monotonic() + seconds
        with self._lock:
            if self._wanted is not None and self._wanted <= wanted:
                return
            self._wanted = wanted
            if self.is_running:
                return
        self.soon(seconds)

    def _guarded(self) -> None:
        try:
            self._body()
        except CkptsyncError as e:
            self.failures += 1
            if str(e) != self.error:
                told = pairs(tick=self.name, failures=self.failures, exit_code=e.exit_code, error=e, hint=e.hint)
                log.error("%s", told)  # noqa: TRY400 - the operator's error needs no traceback
            self.error = str(e)
        except BaseException as e:  # noqa: BLE001 - whatever it is, the process ends by it
            self.error = f"{type(e).__name__}: {e}"
            self._fatal(e)
        else:
            if self.error:
                log.info("%s", pairs(tick=self.name, phase="recovered", failures=self.failures))
            self.error = ""
