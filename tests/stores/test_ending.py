from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckptsync.errors import Transient
from ckptsync.stores import ending
from ckptsync.stores.retry import Persistence


@pytest.fixture(autouse=True)
def life() -> Iterator[None]:
    ending.begin()
    yield
    ending.begin()


def test_when_the_end_is_near_nothing_is_tried_again() -> None:
    calls = []

    def busy() -> None:
        calls.append(1)
        raise Transient("busy")

    ending.announce()
    assert ending.is_near()
    with pytest.raises(Transient):
        Persistence(3600).call(busy)
    assert len(calls) == 1


def test_a_thread_that_waits_for_the_next_try_is_woken_by_the_end() -> None:
    failed, over = threading.Event(), threading.Event()

    def busy() -> None:
        failed.set()
        raise Transient("busy", after=1000)

    def wait() -> None:
        with pytest.raises(Transient):
            Persistence(3600).call(busy)
        over.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert failed.wait(10)
    assert not over.is_set()
    ending.announce()
    assert over.wait(10)
    thread.join(10)
