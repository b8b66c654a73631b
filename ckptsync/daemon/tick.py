"""One role's tick inside the error boundary.

An operator's error (`CkptsyncError`) is logged once per change and counted, and the next tick tries again.  Anything else is our
bug: its traceback is logged and the process ends, so that its supervisor starts it afresh.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from ckptsync.errors import CkptsyncError

log = logging.getLogger(__name__)


class Soon(Protocol):
    """Runs the tick soon."""

    def __call__(self) -> None: ...


class Tick:
    """``name`` and what to do; ``soon`` is set by the schedule, ``fatal`` is told what nobody can act on."""

    def __init__(self, name: str, every: float, body: Callable[[], object], fatal: Callable[[BaseException], None]) -> None:
        self.name, self.every = name, every
        self.soon: Soon = lambda: None
        self.error = ""
        """What the last tick said; empty if it was well."""
        self.failures = self.finished = 0
        self.is_running = False
        self._body, self._fatal = body, fatal
        self._lock = threading.Lock()
        self._is_hinted = self._is_due_again = False

    def __call__(self) -> None:
        """Run once.  Never raises."""
        with self._lock:
            self.is_running, self._is_hinted = True, False
        try:
            self._guarded()
        finally:
            with self._lock:
                self.finished += 1
                again, self._is_due_again, self.is_running = self._is_due_again, False, False
            if again:
                self.hint()

    def hint(self) -> None:
        """Look soon; once more if a tick is running, since it may have looked already.  Any number of hints is one."""
        with self._lock:
            self._is_due_again = self._is_due_again or self.is_running
            is_first, self._is_hinted = not (self._is_hinted or self.is_running), self._is_hinted or not self.is_running
        if is_first:
            self.soon()

    def _guarded(self) -> None:
        try:
            self._body()
        except CkptsyncError as e:
            self.failures += 1
            if str(e) != self.error:
                log.error("tick=%s failures=%d exit_code=%d error=%s hint=%s", self.name, self.failures, e.exit_code, e, e.hint)  # noqa: TRY400 - the operator's error needs no traceback
            self.error = str(e)
        except BaseException as e:  # noqa: BLE001 - whatever it is, the process ends by it
            self.error = f"{type(e).__name__}: {e}"
            self._fatal(e)
        else:
            if self.error:
                log.info("tick=%s recovered failures=%d", self.name, self.failures)
            self.error = ""
