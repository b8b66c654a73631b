"""When a service ends unasked."""

import os
import subprocess
import time

import pytest

from ckptsync.daemon import leaving
from ckptsync.daemon.leaving import Never, UntilGone
from ckptsync.daemon.working import Outcome, Role, Working


def working(outcomes: list[Outcome]) -> Working:
    return Working([Role("worker", 1, lambda: outcomes[0], print)])


def gone() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_service_that_was_installed_never_ends_unasked() -> None:
    assert not Never().is_due(working([Outcome()]))


def test_it_stays_while_the_process_lives() -> None:
    roles = working([Outcome()])
    until = UntilGone(os.getpid())
    roles.ticks[0]()
    assert not until.is_due(roles)


def test_it_ends_after_a_tick_that_began_when_the_process_was_gone_and_found_nothing_left() -> None:
    outcomes = [Outcome()]
    roles = working(outcomes)
    roles.ticks[0]()
    until = UntilGone(gone())
    assert not until.is_due(roles), "what it left was not looked for yet"
    outcomes[0] = Outcome(queue=("run/checkpoint-1",))
    roles.ticks[0]()
    assert not until.is_due(roles), "it is on its way"
    outcomes[0] = Outcome()
    roles.ticks[0]()
    assert until.is_due(roles)


def test_a_store_that_never_comes_is_not_waited_for_for_ever_and_a_send_under_way_is(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = working([Outcome()])
    until = UntilGone(gone())
    assert not until.is_due(roles)
    monkeypatch.setattr(leaving, "SETTLES_WITHIN", -1.0)
    assert until.is_due(roles)
    monkeypatch.setattr(leaving, "SETTLES_WITHIN", 0.5)
    roles.ticks[0].is_running = True
    time.sleep(0.6)
    assert not until.is_due(roles)


def test_what_never_settles_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = working([Outcome(queue=("run/checkpoint-1",))])
    until = UntilGone(gone())
    until.is_due(roles)
    roles.ticks[0]()
    assert not until.is_due(roles)
    monkeypatch.setattr(leaving, "SETTLES_WITHIN", -1.0)
    assert until.is_due(roles)


def test_a_lane_that_sends_for_long_is_waited_for_unless_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Outcome(queue=("run/checkpoint-1",))]
    plan, lane = Role("worker", 1, lambda: outcomes[0], print), Role("lane-1", 1, Outcome, print)
    roles = Working([plan, lane])
    until = UntilGone(gone())
    until.is_due(roles)
    for tick in roles.ticks:
        tick()
    lane.tick.is_running = True
    assert not until.is_due(roles)
    monkeypatch.setattr(leaving, "SETTLES_WITHIN", 0.2)
    time.sleep(0.3)
    assert not until.is_due(roles), "it is being sent"
    outcomes[0] = Outcome(queue=("run/checkpoint-1",), errors=("run/checkpoint-1: away",))
    plan.tick()
    time.sleep(0.3)
    assert until.is_due(roles), "the store never comes"
