"""When a service that is killed again and again was really at work: nobody can see what passes
while nobody looks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from tests.campaigns.cluster import Service

Life = tuple[float, float]
"""From its first word in the log to its end; seconds since the epoch."""


class Mortal(Service):
    """A service that remembers its lives."""

    def __init__(self, home: Path, name: str, configuration: Mapping[str, object]) -> None:
        super().__init__(home, name, configuration)
        self._lives: list[Life] = []

    def start(self, before: Sequence[str] = ()) -> None:
        """Another life."""
        self._lives.append((time.time(), float("inf")))
        super().start(before)

    def kill(self) -> None:
        """The end of it."""
        self._lives[-1:] = [(began, time.time()) for began, _ in self._lives[-1:]]
        super().kill()

    def at_work(self) -> list[Life]:
        """Of each life what came after its first word.

        A log tells whole seconds, so one is left out.
        """
        return at_work(self._lives, _first_words(self.log))


def at_work(lives: Sequence[Life], words: Sequence[float]) -> list[Life]:
    """Pure: the times of first words, put to the lives in which they were said."""
    found = []
    for began, ended in lives:
        said = [at for at in words if int(began) <= at <= ended]
        found += [(said[0] + 1, ended)] if said and said[0] + 1 < ended else []
    return found


def longest(lives: Sequence[Life], begin: float, end: float) -> float:
    """For how many seconds between these two somebody was at work without a break."""
    return max((min(end, ended) - max(begin, began) for began, ended in lives), default=0.0)


def _first_words(log: Path) -> list[float]:
    found = []
    for line in log.read_text("utf-8").splitlines() if log.exists() else ():
        # a traceback, or the last line of one that was killed
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if str(told.get("message", "")).startswith("phase=started"):
                found.append(
                    datetime.fromisoformat(told["time"].replace("Z", "+00:00")).timestamp()
                )
    return found
