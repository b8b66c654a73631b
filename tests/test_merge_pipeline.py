"""Threads: the order, the bounds, and every way in which it can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ckptsync.merge import pipeline
from ckptsync.merge.pipeline import Abandoned, Steps, pipelined, side_by_side

JOBS = [1, 2, 3, 8]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before


class Seen:
    """What the steps were called with."""

    def __init__(self, weight: int = 1, wrong: tuple[str, int] = ("", -1), error: BaseException | None = None) -> None:
        self.lanes: tuple[list[int], list[int]] = ([], [])
        self.released: list[int] = []
        self.made: list[int] = []
        self.weight, self._wrong, self._error = weight, wrong, error

    def steps(self) -> Steps[int, int]:
        return Steps(self._make, (self._lane(0), self._lane(1)), lambda made: self.released.append(-made), lambda _: self.weight)

    def _check(self, where: str, number: int) -> None:
        if self._error and self._wrong == (where, number):
            raise self._error

    def _make(self, item: int) -> int:
        self._check("make", item)
        self.made.append(item)
        return -item

    def _lane(self, lane: int) -> Callable[[int], None]:
        def look(made: int) -> None:
            self._check("lane", -made)
            self.lanes[lane].append(-made)

        return look


@pytest.mark.parametrize("jobs", JOBS)
def test_everything_comes_out_in_order_and_each_lane_has_seen_all(jobs: int) -> None:
    seen = Seen()
    assert list(pipelined(iter(range(1, 200)), seen.steps(), jobs)) == [-n for n in range(1, 200)]
    assert seen.lanes == ([*range(1, 200)], [*range(1, 200)])
    assert sorted(seen.released) == [*range(1, 200)]


def test_a_lane_is_one_threads_at_a_time() -> None:
    inside, most = [0], [0]

    def look(_: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0005)  # so that another thread would come in, if it could
        inside[0] -= 1

    steps: Steps[int, int] = Steps(lambda n: n, [look], lambda _: None, lambda _: 1)
    assert len(list(pipelined(iter(range(100)), steps, 4))) == 100
    assert most == [1]


@pytest.mark.parametrize("jobs", JOBS)
def test_nothing_comes_of_nothing(jobs: int) -> None:
    assert not list(pipelined(iter(()), Seen().steps(), jobs))


@pytest.mark.parametrize("jobs", JOBS)
def test_no_more_is_in_flight_than_the_budget_allows(jobs: int) -> None:
    seen = Seen(weight=pipeline.BUDGET)
    for count, _ in enumerate(pipelined(iter(range(1, 50)), seen.steps(), jobs)):
        assert len(seen.made) <= count + max(jobs, 1)


def test_a_smaller_budget_holds_as_well() -> None:
    seen = Seen(weight=pipeline.BUDGET)
    for count, _ in enumerate(pipelined(iter(range(1, 50)), seen.steps(), 4, pipeline.BUDGET // 2)):
        assert len(seen.made) <= count + 2


def test_what_is_heavier_than_the_budget_goes_alone() -> None:
    seen = Seen(weight=100 * pipeline.BUDGET)
    for count, _ in enumerate(pipelined(iter(range(1, 50)), seen.steps(), 3)):
        assert len(seen.made) <= count + 1


def test_one_job_has_no_thread_and_makes_nothing_before_it_is_asked_for() -> None:
    seen, threads = Seen(), threading.active_count()
    for count, _ in enumerate(pipelined(iter(range(1, 50)), seen.steps(), 1)):
        assert len(seen.made) == count + 1
        assert threading.active_count() <= threads


@pytest.mark.parametrize("error", [OSError(5, "x"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("where", ["make", "lane"])
@pytest.mark.parametrize("jobs", JOBS)
def test_an_error_anywhere_is_raised_as_it_is(jobs: int, where: str, error: BaseException) -> None:
    seen = Seen(wrong=(where, 20), error=error)
    with pytest.raises(type(error)) as raised:
        list(pipelined(iter(range(1, 50)), seen.steps(), jobs))
    assert raised.value is error


@pytest.mark.parametrize("jobs", JOBS)
def test_an_error_of_the_items_is_raised_as_it_is(jobs: int) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(pipelined(items(), Seen().steps(), jobs))


@pytest.mark.parametrize("jobs", JOBS)
def test_whoever_leaves_early_leaves_no_thread(jobs: int) -> None:
    made = pipelined(iter(range(1, 10_000)), (seen := Seen(weight=pipeline.BUDGET)).steps(), jobs)
    next(made)
    made.close()
    assert len(seen.made) <= jobs + 1


@pytest.mark.parametrize("most", [1, 2, 5])
def test_tasks_side_by_side_give_their_results_in_order(most: int) -> None:
    assert side_by_side([lambda _, n=n: n for n in range(7)], most) == [*range(7)]  # type: ignore[misc]


@pytest.mark.parametrize("error", [OSError(5, "x"), KeyboardInterrupt()])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_one_tasks_error_stops_the_others_and_is_the_one_that_is_raised(most: int, error: BaseException) -> None:
    begun = []

    def fails(_: Callable[[], bool]) -> None:
        begun.append(0)
        raise error

    def waits(is_stopping: Callable[[], bool]) -> None:
        begun.append(1)
        while not is_stopping():
            pass
        raise Abandoned

    with pytest.raises(type(error)) as raised:
        side_by_side([fails, *[waits] * 20], most)
    assert raised.value is error
    assert len(begun) <= most + 1
