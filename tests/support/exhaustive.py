"""Long searches and trainings: `make test` runs a part of them, `make exhaustive` and CI all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

ALL = bool(os.environ.get("CKPTSYNC_TEST_ALL"))
T = TypeVar("T")

in_exhaustive = pytest.mark.skipif(not ALL, reason="`make exhaustive` runs it")
"""For a test of many seconds of which `make test` has a smaller one: real trainings, campaigns."""


EVERY_OTHER = 1 if ALL else 2
"""The step of a search through all moments of death: what a store then holds stays as it is for
two of them at least.
"""


def sampled(items: Iterable[T], every: int, first: int = 0) -> list[T]:
    """Return every n-th of the items, from the one at ``first``.

    All of them where the search is exhaustive.
    """
    found = list(items)
    return found if ALL else found[first % every :: every]
