"""An endless loop of a parser fails its test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import NoReturn

import pytest

SECONDS = 120


def _fail(*_: object) -> NoReturn:
    """Raise TimeoutError where the test is."""
    raise TimeoutError(f"the test took more than {SECONDS} s")


@pytest.fixture(autouse=True)
def limit_of_time() -> Iterator[None]:
    """Raise TimeoutError in a test that does not end, and in what hypothesis repeats of it."""
    before = signal.signal(signal.SIGALRM, _fail)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
