"""Tasks: their error boundary, when they run, and when one is called hung."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.service.log import Line
from ckptsync.service.tasks import (
    DEBOUNCE,
    HUNG,
    LEAST_BYTES,
    NEVER,
    RETRY,
    Outcome,
    Task,
    Watchdog,
    progress_of,
    progress_of_process,
)
from ckptsync.stores import progress_signs
from tests.support.waiting import until


def scripted(*outcomes: Outcome | BaseException) -> Callable[[], Outcome]:
    """Return work that gives, or raises, one of these after the other."""
    script = list(outcomes)

    def work() -> Outcome:
        outcome = script.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return work


def test_an_operators_error_is_logged_once_per_change_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fatal: list[BaseException] = []
    a, b, well = StoreError("a"), StoreError("b"), Outcome()
    task = Task("worker", 1, scripted(a, a, b, b, well, b), fatal.append)
    for _ in range(6):
        task()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [e.split(" error=")[1][0] for e in errors] == ["a", "b", "b"]
    assert (task.failures, task.finished, task.error, fatal) == (5, 6, "b", [])
    assert sum("recovered" in r.getMessage() for r in caplog.records) == 1


def test_anything_else_is_fatal_and_has_its_traceback() -> None:
    fatal: list[BaseException] = []
    task = Task("worker", 1, scripted(ZeroDivisionError("x")), fatal.append)
    task()
    assert isinstance(fatal[0], ZeroDivisionError)
    assert fatal[0].__traceback__ is not None
    assert (task.error, task.is_running) == ("ZeroDivisionError: x", False)


def test_a_task_that_gets_no_thread_fails_and_is_begun_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done, fatal = threading.Event(), list[BaseException]()

    def work() -> Outcome:
        done.set()
        return Outcome()

    task, now = Task("worker", 1, work, fatal.append), time.monotonic()
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        task.start_if_due(now)
    assert (task.is_running, task.failures, task.due, fatal) == (False, 1, now + RETRY, [])
    task.start_if_due(now + RETRY)
    assert done.wait(60)


def test_of_an_outcome_only_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waits, sent = Line("a", "phase=waiting"), Line("a", "phase=sent")
    both = Outcome((waits, Line("b", "phase=failed", level="error")))
    task = Task("worker", 1, scripted(both, both, Outcome((sent,))), print)
    for _ in range(3):
        task()
    logged = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert logged == [("INFO", "phase=waiting"), ("ERROR", "phase=failed"), ("INFO", "phase=sent")]


@contextmanager
def loop(*tasks: Task) -> Iterator[None]:
    """Start each of these when it is due, as the service's loop does."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.01):
            for task in tasks:
                task.start_if_due(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_task_runs_at_once_and_again_and_a_slow_one_never_twice_nor_delays_others() -> None:
    runs: list[float] = []
    at_once, most = [0], [0]
    release = threading.Event()

    def slow() -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        release.wait(60)
        at_once[0] -= 1

    quick = Task("quick", 0.2, lambda: runs.append(time.monotonic()), print)
    with loop(Task("slow", 0.05, slow, print), quick):
        assert until(lambda: len(runs) >= 4)
        release.set()
    assert runs[3] - runs[0] > 0.3, "a period lies between"
    assert most[0] == 1


def test_a_hint_hastens_a_task_and_one_that_comes_while_it_runs_makes_it_run_once_more() -> None:
    runs: list[int] = []
    begun, release = threading.Event(), threading.Event()

    def slow() -> None:
        runs.append(1)
        begun.set()
        release.wait(60)

    task = Task("a", 3600, slow, print)
    with loop(task):
        assert begun.wait(60)
        for _ in range(5):
            task.hint()
        assert not until(lambda: len(runs) > 1, 2 * DEBOUNCE)
        release.set()
        assert until(lambda: len(runs) == 2)
        task.at(0)
        assert until(lambda: len(runs) == 3)
        assert not until(lambda: len(runs) > 3, 2 * DEBOUNCE)


def test_of_several_times_the_first_counts_and_long_work_rests_as_long_again() -> None:
    woken: list[int] = []
    task = Task("a", 1, lambda: None, print)
    task.due, task.wake = NEVER, lambda: woken.append(1)
    for seconds in (500, 1000, 100):
        task.at(seconds)
    assert 40 < task.due - time.monotonic() <= 100
    assert len(woken) == 3
    task = Task("a", 0.3, lambda: time.sleep(0.2), print)
    task()
    assert task.due >= task.began + 0.4
    task = Task("a", 0.1, lambda: time.sleep(0.3), print)
    task()
    assert task.due - time.monotonic() <= 0.1


def read_zeros() -> None:
    with Path("/dev/zero").open("rb") as f:
        f.read(2 * LEAST_BYTES)


def test_a_task_that_rests_ends_reads_computes_or_gives_signs_does_not_hang_a_silent_one_does() -> (
    None
):
    now = [0.0]
    go, done = threading.Semaphore(0), threading.Semaphore(0)
    work: list[Callable[[], object]] = []

    def body() -> None:
        while go.acquire():
            work.pop()()
            done.release()

    busy = Task("upload-queue-1", 1, body, print)
    silent = Task("upload-queue-2", 1, threading.Event().wait, print)  # type: ignore[arg-type]
    rests = Task("scan", 1, lambda: None, print)
    watchdog = Watchdog(HUNG, lambda: now[0])
    for task in (busy, silent):
        task.start_if_due(time.monotonic())
    assert until(lambda: busy.thread and silent.thread)
    for what in (read_zeros, progress_signs.sign, lambda: sum(range(20_000_000))):
        assert watchdog.check([busy, silent, rests]) == ()
        now[0] += 0.3 * HUNG
        work.append(what)
        go.release()
        assert done.acquire(timeout=60)
    now[0] += 0.3 * HUNG
    assert watchdog.check([busy, silent, rests]) == ("upload-queue-2",)


def test_a_loop_that_checks_no_more_hangs_itself() -> None:
    now = [0.0]
    watchdog = Watchdog(HUNG, lambda: now[0])
    now[0] += 30
    assert watchdog.unchecked() == 0
    now[0] += 60
    assert watchdog.unchecked() == 90
    watchdog.check(())
    assert watchdog.unchecked() == 0


def test_the_progress_of_a_process_is_that_of_all_its_threads_and_a_tasks_is_its_own() -> None:
    task = Task("scan", 1, lambda: None, print)
    task()
    own, before = progress_of(task), progress_of_process()
    thread = threading.Thread(target=read_zeros)
    thread.start()
    thread.join()
    assert progress_of_process().is_beyond(before)
    assert not progress_of(task).is_beyond(own)
