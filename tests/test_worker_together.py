"""Several at once, and one error."""

from __future__ import annotations

import threading
import time

import pytest

from ckptsync.errors import Incomplete, StoreError, Transient
from ckptsync.worker.together import Together


def test_results_come_in_order_whoever_is_done_first() -> None:
    def work(item: int) -> int:
        time.sleep(0.02 * (item == 0))
        return item * item

    assert Together(4).each(work, range(20)) == [n * n for n in range(20)]
    assert Together(1).each(work, range(3)) == [0, 1, 4]
    assert Together(4).each(work, []) == []


def test_no_more_than_so_many_run_at_once_and_so_many_do() -> None:
    meeting = threading.Barrier(3, timeout=10)
    running, most = [0], [0]

    def work(_: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        meeting.wait()
        running[0] -= 1
        meeting.wait()

    Together(3).each(work, range(9))
    assert most == [3]


def test_the_first_error_is_raised_when_the_others_have_ended_at_their_next_chunk() -> None:
    together, begun, ended = Together(2), list[int](), list[int]()
    both = threading.Barrier(2, timeout=10)

    def work(item: int) -> None:
        begun.append(item)
        both.wait()
        if item == 0:
            raise Incomplete("the source changed")
        try:
            while True:
                together.passed(1)
        finally:
            ended.append(item)

    with pytest.raises(Incomplete, match="the source changed"):
        together.each(work, range(9))
    assert (sorted(begun), ended) == ([0, 1], [1])
    assert together.each(lambda item: item, range(3)) == [0, 1, 2]


def test_death_is_raised_too() -> None:
    class Dead(BaseException):
        pass

    def work(_: int) -> None:
        raise Dead

    with pytest.raises(Dead):
        Together(2).each(work, range(4))


def test_what_passes_is_told_by_one_thread_at_a_time() -> None:
    total, inside = [0], threading.Lock()

    def passed(count: int) -> None:
        assert inside.acquire(blocking=False)
        before = total[0]
        time.sleep(0)
        total[0] = before + count
        inside.release()

    together = Together(8, passed)

    def work(_: int) -> None:
        for _ in range(50):
            together.passed(1)

    together.each(work, range(40))
    assert total == [2000]


def test_what_is_told_may_fail_and_that_is_an_error_of_its_own() -> None:
    def passed(count: int) -> None:
        if count:
            raise StoreError("asked to stop")

    together = Together(2, passed)
    with pytest.raises(StoreError, match="asked to stop"):
        together.each(together.passed, [1, 2, 3])


@pytest.mark.parametrize("kind", [Transient, StoreError])
def test_what_ends_since_another_failed_may_succeed_again_if_that_may(kind: type[StoreError]) -> None:
    ended: list[StoreError] = []
    together, failed = Together(2), threading.Event()

    def work(item: int) -> None:
        if item:
            failed.set()
            raise kind("away")
        failed.wait(10)
        try:
            while True:
                together.passed(1)
        except StoreError as e:
            ended.append(e)
            raise

    with pytest.raises(kind, match="away"):
        together.each(work, [0, 1])
    assert [type(e) for e in ended] == [kind]
