"""How long to rest: after work that found nothing to do, and after a store could not be reached.  Pure but for what it remembers."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST, LONGEST = 2.0, 15.0  # seconds; the store's own tries come before, and take `limits.patience`
SHARE = 0.0003  # of a core that looking in vain may take
LONGEST_REST = 600.0


def rest_after(cost: float, least: float) -> float:
    """Seconds until what took ``cost`` seconds of CPU, and found nothing to do, is done again: looking at many checkpoints costs more than at few."""
    return max(least, min(LONGEST_REST, cost / SHARE))


class Pauses:
    """Between attempts to reach a store: they double while it stays away; each is drawn from its upper half, since nodes that failed together are not to come back together."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._tries = 0
        self._of: object = None

    def after(self, attempt: object) -> float:
        """Seconds until the next attempt, once this one has failed; infinity if that was said already."""
        if attempt == self._of:
            return float("inf")
        self._of, self._tries = attempt, self._tries + 1
        return min(LONGEST, FIRST * 2.0 ** min(self._tries - 1, 32)) * (1 + self._chance()) / 2

    def forget(self) -> None:
        """All is well."""
        self._tries = 0
