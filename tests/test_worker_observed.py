"""Since when nothing has changed."""

from __future__ import annotations

from ckptsync.worker.observed import observe
from tests.test_worker_settle import DONE, files


def test_any_change_restarts_the_clock_and_so_does_a_clock_set_back() -> None:
    first = observe(None, files(DONE), 100.0)
    assert observe(first, reversed(files(DONE)), 105.0) == first
    assert observe(first, files(DONE, size=2), 105.0).since == 105.0
    assert observe(first, files(DONE), 50.0).since == 50.0
