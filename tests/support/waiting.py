"""Waiting for what happens in other threads and processes.

The deadline only ends a test that fails: a busy machine may take its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 300, pause: float = 0.01) -> bool:
    """Return whether a condition holds within ``seconds``; check it every ``pause`` seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause)
    return False
