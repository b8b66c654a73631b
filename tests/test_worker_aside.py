"""What is done aside is had later, with its errors, and leaves others their time."""

from __future__ import annotations

import threading

import pytest

from ckptsync.worker.aside import Aside


def test_who_asks_never_waits_and_has_it_once() -> None:
    aside: Aside[int] = Aside(0.5)
    go_on = threading.Event()
    assert aside.begin(lambda: 7 if go_on.wait() else 0)
    assert aside.take() is None
    assert not aside.begin(lambda: 8)
    go_on.set()
    aside.wait()
    assert [aside.take(), aside.take()] == [7, None]


def test_what_it_raises_is_raised_where_it_is_asked_for() -> None:
    aside: Aside[float] = Aside(0.5)
    aside.begin(lambda: 1 / 0)
    aside.wait()
    with pytest.raises(ZeroDivisionError):
        aside.take()
    assert aside.take() is None


def test_it_has_no_more_than_its_share_of_the_time() -> None:
    now = [0.0]

    def four_seconds() -> None:
        now[0] += 4

    aside: Aside[None] = Aside(0.25, lambda: now[0])
    for at, may in ((0.0, True), (15.9, False), (16.0, True), (31.0, False), (32.0, True)):
        now[0] = at
        assert aside.begin(four_seconds) == may
        aside.wait()
        aside.take()
