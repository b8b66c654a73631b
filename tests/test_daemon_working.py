"""The roles together."""

import logging

import pytest

from ckptsync.daemon.phases import Line
from ckptsync.daemon.working import Outcome, Role, Working
from ckptsync.errors import CkptsyncError, StoreError


def role(name: str, *outcomes: Outcome | CkptsyncError) -> Role:
    script = list(outcomes)

    def look() -> Outcome:
        outcome = script.pop(0)
        if isinstance(outcome, CkptsyncError):
            raise outcome
        return outcome

    return Role(name, 1, look, print)


def test_a_change_is_logged_once_and_an_error_as_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    same = Outcome((Line("a", "phase=waiting run=a"), Line("b", "phase=failed", is_error=True)))
    worker = role("worker", same, same, Outcome((Line("a", "phase=sent run=a"),)))
    for _ in range(3):
        worker.tick()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "phase=waiting run=a"),
        ("ERROR", "phase=failed"),
        ("INFO", "phase=sent run=a"),
    ]


def test_queue_and_errors_are_those_of_the_last_ticks() -> None:
    worker = role("worker", Outcome(queue=("run/checkpoint-1",), errors=("run: torn",), oldest=5.0), StoreError("away"))
    head = role("head", Outcome(queue=("run/checkpoint-1", "run/checkpoint-2")))
    look = role("look", Outcome(notes=("spool full",), watch={"/a": "polling"}))
    working = Working([worker], [head], [look])
    for tick in (*working.ticks, worker.tick):
        tick()
    assert working.queue() == ("run/checkpoint-1", "run/checkpoint-2")
    assert working.errors() == ("worker: away", "run: torn")
    assert [tick.name for tick in working.ticks] == ["look", "worker", "head"]
    assert (working.notes(), working.watch(), working.oldest()) == (("spool full",), {"/a": "polling"}, 5.0)
    assert working.status() == "worker waits; head waits; 2 on the way; 2 errors"
