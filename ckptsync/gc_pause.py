"""Pause Python's garbage collector while millions of values are made that are all needed.

The collector would visit them all again and again, and find nothing to free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector of the whole process while the block runs.

    Afterwards it is enabled if it was before. If blocks of threads overlap, the end of the first
    one enables it for all.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
