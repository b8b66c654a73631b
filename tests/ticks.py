"""What every way of running ticks has to keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ckptsync.service.periodic import Periodic


def until(condition: Callable[[], object], seconds: float = 5) -> bool:
    """Whether it holds in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def most_at_once(running: Callable[[Sequence[Periodic]], AbstractContextManager[object]]) -> int:
    """How many times at once a slow tick ran, beside a quick one that was not held up."""
    at_once, most, others = [0], [0], list[int]()
    release = threading.Event()

    def slow() -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        release.wait(5)
        at_once[0] -= 1

    with running([Periodic("slow", 0.05, slow, print), Periodic("quick", 0.05, lambda: others.append(1), print)]):
        assert until(lambda: len(others) > 5)
        release.set()
    return most[0]
