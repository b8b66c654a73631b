"""Ticks on monotonic time."""

import threading
import time

from ckptsync.daemon.loops import looping
from ckptsync.daemon.tick import Tick
from tests.ticks import most_at_once, until


def test_every_tick_runs_at_once_and_then_again_and_again() -> None:
    runs: list[float] = []
    with looping([Tick("a", 0.2, lambda: runs.append(time.monotonic()), print)]):
        assert until(lambda: len(runs) >= 4)
    assert runs[3] - runs[0] > 0.5, "a period lies between"


def test_a_wish_hastens_a_tick_that_is_far_away() -> None:
    runs: list[int] = []
    tick = Tick("a", 3600, lambda: runs.append(1), print)
    with looping([tick]):
        for n in (1, 2, 3):
            assert until(lambda n=n: len(runs) == n)  # type: ignore[misc]
            tick.at(0.05)


def test_a_wish_that_comes_while_it_runs_is_granted_when_it_has_ended() -> None:
    runs: list[int] = []
    begun, release = threading.Event(), threading.Event()

    def slow() -> None:
        runs.append(1)
        begun.set()
        release.wait(5)

    tick = Tick("a", 3600, slow, print)
    with looping([tick]):
        begun.wait(5)
        tick.at(0)
        release.set()
        assert until(lambda: len(runs) == 2)


def test_a_tick_never_runs_twice_at_a_time_and_does_not_hold_up_others() -> None:
    assert most_at_once(looping) == 1


def test_after_the_end_nothing_runs_and_a_hint_is_no_fault() -> None:
    runs: list[int] = []
    tick = Tick("a", 0.05, lambda: runs.append(1), print)
    before = threading.active_count()
    with looping([tick]):
        assert until(lambda: runs)
    assert until(lambda: threading.active_count() <= before)
    seen = len(runs)
    tick.hint()
    assert not until(lambda: len(runs) != seen, 0.2)


def test_any_number_of_wishes_fit_into_the_pipe() -> None:
    tick = Tick("a", 3600, lambda: None, print)
    with looping([tick]):
        assert until(lambda: tick.finished)
        for n in range(100_000):
            tick.soon(3000 - n / 100)
