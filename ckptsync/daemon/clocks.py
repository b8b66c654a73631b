"""A wall clock that jumps: what counts its time has to be told, and the operator too."""

from __future__ import annotations

import time

LEAST = 2.0  # seconds; NTP slews by half a millisecond a second


class Clocks:
    """The wall clock beside the monotonic one, which nobody sets."""

    def __init__(self) -> None:
        self._apart = time.time() - time.monotonic()
        self.notes: tuple[str, ...] = ()
        """What has jumped since the start; the last few."""

    def jumped(self) -> float:
        """Seconds by which the wall clock was set since the last call, forwards or (below zero) back; 0 if it was not."""
        apart = time.time() - time.monotonic()
        by, self._apart = apart - self._apart, apart
        if abs(by) < LEAST:
            return 0.0
        self.notes = (*self.notes, f"the clock jumped by {by:+.0f} s at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}")[-3:]
        return by
