"""Python's cycle collector, held off while very many values are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would visit every value, while the block runs.

    It is the whole process's.  Threads may overlap: each leaves it as it found it, so that it runs
    again once all have left.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
