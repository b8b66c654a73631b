"""How fast bytes go to the store: what was handed to it, over the last minute."""

from __future__ import annotations

from collections import deque

OVER = 60.0  # seconds


class Rate:
    """Pure but for what it remembers: readings of a counter that only grows."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now: float, count: int) -> float:
        """A second, since the reading that is nearest to a minute ago; 0 at the first one.  ``now`` only grows."""
        self._readings.append((now, count))
        while len(self._readings) > 2 and now - self._readings[1][0] >= OVER:
            self._readings.popleft()
        then, before = self._readings[0]
        return (count - before) / (now - then) if now > then else 0.0
