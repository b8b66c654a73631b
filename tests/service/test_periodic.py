"""The error boundary around one tick."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest

from ckptsync.errors import StoreError
from ckptsync.service.periodic import DEBOUNCE, Clocks, Periodic, backoff, in_background, looping, scheduled
from tests.ticks import most_at_once, until


class Scripted:
    """A body that raises, or not, as told beforehand."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)

    def __call__(self) -> None:
        outcome = self.outcomes.pop(0)
        if outcome:
            raise outcome


def ticked(body: Scripted, fatal: list[BaseException]) -> Periodic:
    tick = Periodic("worker", 1, body, fatal.append)
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
    tick = Periodic("worker", 1, lambda: None, print)
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

    tick = Periodic("worker", 1, slow, print)
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
    tick = Periodic("worker", 1, lambda: None, print)
    tick.soon = wishes.append
    for seconds in (500, 1000, 100):
        tick.at(seconds)
    assert wishes == [500, 100]
    tick()
    assert 99 < wishes[2] <= 100


def test_a_wish_whose_time_has_come_is_granted_by_the_tick() -> None:
    wishes: list[float] = []
    tick = Periodic("worker", 1, lambda: None, print)
    tick.soon = wishes.append
    tick.at(0)
    tick()
    assert wishes == [0]


def test_every_tick_runs_at_once_and_then_again_and_again() -> None:
    runs: list[float] = []
    with looping([Periodic("a", 0.2, lambda: runs.append(time.monotonic()), print)]):
        assert until(lambda: len(runs) >= 4)
    assert runs[3] - runs[0] > 0.5, "a period lies between"


def test_a_wish_hastens_a_tick_that_is_far_away() -> None:
    runs: list[int] = []
    tick = Periodic("a", 3600, lambda: runs.append(1), print)
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

    tick = Periodic("a", 3600, slow, print)
    with looping([tick]):
        begun.wait(5)
        tick.at(0)
        release.set()
        assert until(lambda: len(runs) == 2)


def test_a_tick_never_runs_twice_at_a_time_and_does_not_hold_up_others() -> None:
    assert most_at_once(looping) == 1


def test_after_the_end_nothing_runs_and_a_hint_is_no_fault() -> None:
    runs: list[int] = []
    tick = Periodic("a", 0.05, lambda: runs.append(1), print)
    before = threading.active_count()
    with looping([tick]):
        assert until(lambda: runs)
    assert until(lambda: threading.active_count() <= before)
    seen = len(runs)
    tick.hint()
    assert not until(lambda: len(runs) != seen, 0.2)


def test_any_number_of_wishes_fit_into_the_pipe() -> None:
    tick = Periodic("a", 3600, lambda: None, print)
    with looping([tick]):
        assert until(lambda: tick.finished)
        for n in range(100_000):
            tick.soon(3000 - n / 100)


def test_every_job_of_the_scheduler_runs_at_once_and_then_again_and_again() -> None:
    runs: list[float] = []
    with scheduled([Periodic("a", 0.2, lambda: runs.append(time.monotonic()), print)]):
        begun = time.monotonic()
        assert until(lambda: len(runs) >= 3)
    assert runs[0] - begun < 1


def test_a_hint_hastens_a_tick_that_is_far_away() -> None:
    runs: list[int] = []
    tick = Periodic("a", 3600, lambda: runs.append(1), print)
    with scheduled([tick]):
        assert until(lambda: len(runs) == 1)
        tick.hint()
        assert until(lambda: len(runs) == 2)
        time.sleep(0.1)
        tick.hint()
        assert until(lambda: len(runs) == 3)


def test_a_job_of_the_scheduler_never_runs_twice_at_a_time_and_does_not_hold_up_others() -> None:
    assert most_at_once(scheduled) == 1


def test_a_hint_after_the_end_is_no_fault() -> None:
    tick = Periodic("a", 1, lambda: None, print)
    with scheduled([tick]):
        pass
    until(lambda: not tick.is_running)
    tick.hint()


def test_a_clock_that_was_set_back_is_told_and_silences_nobody() -> None:
    runs: list[int] = []
    with scheduled(
        [Periodic("a", 3600, lambda: runs.append(1), print), Periodic("b", 3600, lambda: runs.append(2), print)]
    ) as again:
        assert until(lambda: len(runs) == 2)
        again()
        assert until(lambda: sorted(runs) == [1, 1, 2, 2])


def test_without_ticks_nothing_is_scheduled_and_no_scheduler_is_imported() -> None:
    script = "import sys; from ckptsync.service.periodic import scheduled\nwith scheduled(()) as again: again()\nprint('apscheduler' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"


def test_a_clock_that_runs_has_not_jumped() -> None:
    clocks = Clocks()
    assert (clocks.jumped(), clocks.jumped(), clocks.notes) == (0.0, 0.0, ())


def test_a_jump_is_seen_once_and_told() -> None:
    clocks = Clocks()
    clocks._apart += 3600  # as if the clock had been an hour ahead until now
    assert -3601 < clocks.jumped() < -3599
    assert clocks.jumped() == 0.0
    assert [note[:32] for note in clocks.notes] == ["the clock jumped by -3600 s at 2"]


def test_the_notes_of_a_clock_that_always_jumps_stay_few() -> None:
    clocks = Clocks()
    for _ in range(9):
        clocks._apart += 100
        clocks.jumped()
    assert len(clocks.notes) == 3


def test_what_failed_is_left_alone_for_longer_each_time_and_never_for_long() -> None:
    assert [backoff(n, 2, 15) for n in range(1, 7)] == [2, 4, 8, 15, 15, 15]
    assert backoff(10_000, 2, 15) == 15


def test_who_asks_is_not_held_up_by_a_question_without_an_answer() -> None:
    never = threading.Event()
    asked = in_background(never.wait)
    assert not wait([asked], 0.05).done
    never.set()
    assert asked.result(60)


def test_what_the_answer_raises_is_raised_to_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(60)
