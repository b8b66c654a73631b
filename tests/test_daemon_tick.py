"""The error boundary around one tick."""

import logging
import threading

import pytest

from ckptsync.daemon.tick import DEBOUNCE, Tick
from ckptsync.errors import StoreError
from tests.ticks import until


class Scripted:
    """A body that raises, or not, as told beforehand."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)

    def __call__(self) -> None:
        outcome = self.outcomes.pop(0)
        if outcome:
            raise outcome


def ticked(body: Scripted, fatal: list[BaseException]) -> Tick:
    tick = Tick("worker", 1, body, fatal.append)
    while body.outcomes:
        tick()
    return tick


def test_an_operators_error_is_logged_once_per_change_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fatal: list[BaseException] = []
    tick = ticked(Scripted(StoreError("a"), StoreError("a"), StoreError("b"), StoreError("b"), None, StoreError("b")), fatal)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [e.split(" error=")[1][0] for e in errors] == ["a", "b", "b"]
    assert (tick.failures, tick.finished, tick.error, fatal) == (5, 6, "b", [])
    assert sum("recovered" in r.getMessage() for r in caplog.records) == 1


def test_anything_else_is_fatal_and_told_with_its_traceback() -> None:
    fatal: list[BaseException] = []
    tick = ticked(Scripted(ZeroDivisionError("x")), fatal)
    assert isinstance(fatal[0], ZeroDivisionError)
    assert fatal[0].__traceback__ is not None
    assert tick.error == "ZeroDivisionError: x"
    assert not tick.is_running


def test_any_number_of_hints_is_one_look() -> None:
    looks: list[int] = []
    tick = Tick("worker", 1, lambda: None, print)
    tick.soon = lambda _: looks.append(1)
    for _ in range(5):
        tick.hint()
    assert len(looks) == 1
    until(lambda: False, DEBOUNCE)
    tick()
    tick.hint()
    assert len(looks) == 2


def test_a_hint_during_a_tick_asks_for_another_one_after_it() -> None:
    looks: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(5)

    tick = Tick("worker", 1, slow, print)
    tick.soon = lambda _: looks.append(1)
    thread = threading.Thread(target=tick)
    thread.start()
    begun.wait(5)
    tick.hint()
    tick.hint()
    assert looks == []
    go_on.set()
    thread.join()
    assert looks == [1]


def test_of_several_wishes_the_first_counts_and_one_that_is_still_to_come_outlives_a_tick() -> None:
    wishes: list[float] = []
    tick = Tick("worker", 1, lambda: None, print)
    tick.soon = wishes.append
    for seconds in (500, 1000, 100):
        tick.at(seconds)
    assert wishes == [500, 100]
    tick()
    assert 99 < wishes[2] <= 100


def test_a_wish_whose_time_has_come_is_granted_by_the_tick() -> None:
    wishes: list[float] = []
    tick = Tick("worker", 1, lambda: None, print)
    tick.soon = wishes.append
    tick.at(0)
    tick()
    assert wishes == [0]
