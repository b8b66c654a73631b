"""Searches through every call, fault or input: `make test` takes some of them, `make exhaustive`,
which CI runs too, all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

ALL = bool(os.environ.get("CKPTSYNC_TEST_ALL"))
T = TypeVar("T")


def sampled(items: Iterable[T], every: int, first: int = 0) -> list[T]:
    """Return every n-th of the items, from the one at ``first``.

    All of them where the search is exhaustive.
    """
    found = list(items)
    return found if ALL else found[first % every :: every]
