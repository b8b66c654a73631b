"""The roles together."""

import logging
import os
import subprocess
import time

import pytest

from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.service import roles as module
from ckptsync.service.log import Line
from ckptsync.service.periodic import Outcome, Periodic
from ckptsync.service.roles import Roles, UntilGone


def role(name: str, *outcomes: Outcome | CkptsyncError) -> Periodic:
    script = list(outcomes)

    def look() -> Outcome:
        outcome = script.pop(0)
        if isinstance(outcome, CkptsyncError):
            raise outcome
        return outcome

    return Periodic(name, 1, look, print)


def test_a_change_is_logged_once_and_an_error_as_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    same = Outcome((Line("a", "phase=waiting run=a"), Line("b", "phase=failed", is_error=True)))
    worker = role("worker", same, same, Outcome((Line("a", "phase=sent run=a"),)))
    for _ in range(3):
        worker()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "phase=waiting run=a"),
        ("ERROR", "phase=failed"),
        ("INFO", "phase=sent run=a"),
    ]


def test_queue_and_errors_are_those_of_the_last_ticks() -> None:
    worker = role("worker", Outcome(queue=("run/checkpoint-1",), errors=("run: torn",), oldest=5.0), StoreError("away"))
    head = role("head", Outcome(queue=("run/checkpoint-1", "run/checkpoint-2")))
    look = role("look", Outcome(notes=("spool full",), watch={"/a": "polling"}))
    working = Roles([worker], [head], [look])
    for tick in (*working.works, worker):
        tick()
    assert working.queue() == ("run/checkpoint-1", "run/checkpoint-2")
    assert working.errors() == ("worker: away", "run: torn")
    assert [tick.name for tick in working.works] == ["look", "worker", "head"]
    assert (working.notes(), working.watch(), working.oldest()) == (("spool full",), {"/a": "polling"}, 5.0)
    assert working.status() == "worker waits; head waits; 2 on the way; 2 errors"


def working(outcomes: list[Outcome]) -> Roles:
    return Roles([Periodic("worker", 1, lambda: outcomes[0], print)])


def gone() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_service_that_was_installed_never_ends_unasked() -> None:
    assert not UntilGone(None).is_due(working([Outcome()]))


def test_it_stays_while_the_process_lives() -> None:
    roles = working([Outcome()])
    until = UntilGone(os.getpid())
    roles.works[0]()
    assert not until.is_due(roles)


def test_it_ends_after_a_tick_that_began_when_the_process_was_gone_and_found_nothing_left() -> None:
    outcomes = [Outcome()]
    roles = working(outcomes)
    roles.works[0]()
    until = UntilGone(gone())
    assert not until.is_due(roles), "what it left was not looked for yet"
    outcomes[0] = Outcome(queue=("run/checkpoint-1",))
    roles.works[0]()
    assert not until.is_due(roles), "it is on its way"
    outcomes[0] = Outcome()
    roles.works[0]()
    assert until.is_due(roles)


def test_a_store_that_never_comes_is_not_waited_for_for_ever_and_a_send_under_way_is(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = working([Outcome()])
    until = UntilGone(gone())
    assert not until.is_due(roles)
    monkeypatch.setattr(module, "SETTLES_WITHIN", -1.0)
    assert until.is_due(roles)
    monkeypatch.setattr(module, "SETTLES_WITHIN", 0.5)
    roles.works[0].is_running = True
    time.sleep(0.6)
    assert not until.is_due(roles)


def test_what_never_settles_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = working([Outcome(queue=("run/checkpoint-1",))])
    until = UntilGone(gone())
    until.is_due(roles)
    roles.works[0]()
    assert not until.is_due(roles)
    monkeypatch.setattr(module, "SETTLES_WITHIN", -1.0)
    assert until.is_due(roles)


def test_a_lane_that_sends_for_long_is_waited_for_unless_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Outcome(queue=("run/checkpoint-1",))]
    plan, lane = Periodic("worker", 1, lambda: outcomes[0], print), Periodic("lane-1", 1, Outcome, print)
    roles = Roles([plan, lane])
    until = UntilGone(gone())
    until.is_due(roles)
    for tick in roles.works:
        tick()
    lane.is_running = True
    assert not until.is_due(roles)
    monkeypatch.setattr(module, "SETTLES_WITHIN", 0.2)
    time.sleep(0.3)
    assert not until.is_due(roles), "it is being sent"
    outcomes[0] = Outcome(queue=("run/checkpoint-1",), errors=("run/checkpoint-1: away",))
    plan()
    time.sleep(0.3)
    assert until.is_due(roles), "the store never comes"
