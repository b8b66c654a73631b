"""When a service ends unasked: `ckptsync run --until-gone PID`, the worker that a training job brings along."""

from __future__ import annotations

import time
from typing import Protocol

from ckptsync.daemon.identity import began
from ckptsync.daemon.working import Working

SETTLES_WITHIN = 900.0  # seconds that what waits may wait without any change, once nobody writes any more


class Parting(Protocol):
    """Says when to end."""

    def is_due(self, working: Working) -> bool:
        """Whether it is now; asked every few seconds."""
        ...


class Never:
    """A service that an operator installed."""

    def is_due(self, _: Working) -> bool:
        """It is not."""
        return False


class UntilGone:
    """Once a process has ended, and what it left is stored; what never settles is waited for no longer than `SETTLES_WITHIN`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began = pid, began(pid)
        self._gone: tuple[int, ...] | None = None
        self._left: tuple[str, ...] = ()
        self._since = 0.0

    def is_due(self, working: Working) -> bool:
        """Every tick is to begin, and end, after the process: the last checkpoint may be younger than the last look."""
        if began(self._pid) == self._began != "":
            return False
        if self._gone is None:
            self._since = time.monotonic()
            self._gone = tuple(tick.finished + tick.is_running for tick in working.ticks)
            for tick in working.ticks:
                tick.hint()
        late = [tick for tick, before in zip(working.ticks, self._gone, strict=True) if tick.finished <= before]
        if any(tick.is_running for tick in late):
            self._since = time.monotonic()
        if late:  # or its store has never been there
            return time.monotonic() - self._since > SETTLES_WITHIN
        if any(tick.is_running for tick in working.loops) and not working.errors():
            self._since = time.monotonic()  # what is large may take longer than that
        return self._is_all_done(working.queue(), time.monotonic())

    def _is_all_done(self, left: tuple[str, ...], now: float) -> bool:
        if left != self._left:
            self._left, self._since = left, now
        return not left or now - self._since > SETTLES_WITHIN
