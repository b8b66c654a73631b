"""What of an output directory's saves is stored, and whether waiting would bring more."""

from __future__ import annotations

import math

import pytest

from ckptsync.resume.drain import DrainedSave, DrainResult, SaveStatus, is_over
from ckptsync.worker.finished import Rule

RULE = Rule(10.0, 60.0, 600.0)


def save(
    status: SaveStatus, step: int = 1, wait_left: float = 0.0, unchanged_for: float = 0.0
) -> DrainedSave:
    return DrainedSave(
        f"checkpoint-{step}", step, status, wait_left=wait_left, unchanged_for=unchanged_for
    )


@pytest.mark.parametrize(
    ("saves", "newest"),
    [
        ((), -1),
        ((save("stored", 4), save("stored", 2)), 4),
        ((save("stored", 4), save("unsent", 6)), 6),  # whole, and the store is away
        ((save("stored", 4), save("waiting", 6)), 4),
        ((save("refused", 6),), -1),  # torn
        ((DrainedSave("final", None, "stored"),), -1),
    ],
)
def test_the_newest_step_is_that_of_a_whole_save(
    saves: tuple[DrainedSave, ...], newest: int
) -> None:
    assert DrainResult(saves).newest_step == newest
    assert DrainResult(saves, "no route").newest_step == newest


@pytest.mark.parametrize(
    ("saves", "error", "is_stored"),
    [
        ((), "", True),
        ((save("stored"),), "", True),
        ((save("stored"),), "no route", False),
        ((save("stored"), save("unsent")), "", False),
        ((save("stored"), save("waiting")), "", False),
        ((save("stored"), save("refused")), "", False),
    ],
)
def test_a_machine_may_be_shut_down_if_the_store_has_every_save(
    saves: tuple[DrainedSave, ...], error: str, *, is_stored: bool
) -> None:
    assert DrainResult(saves, error).is_stored is is_stored


@pytest.mark.parametrize(
    ("saves", "max_wait", "expected"),
    [
        ((), math.inf, True),
        ((save("stored"),), math.inf, True),
        ((save("unsent"),), 5.0, False),
        ((save("waiting", wait_left=6.0),), 5.0, True),
        ((save("waiting", wait_left=5.0),), 5.0, False),
        ((save("waiting", wait_left=6.0),), math.inf, False),
        ((save("refused", unchanged_for=9.0),), math.inf, False),
        ((save("refused", unchanged_for=10.0),), math.inf, True),
        ((save("refused", unchanged_for=10.0), save("unsent")), 5.0, False),
    ],
)
def test_the_wait_is_over_when_no_further_save_would_come(
    saves: tuple[DrainedSave, ...], max_wait: float, *, expected: bool
) -> None:
    assert is_over(DrainResult(saves), RULE, max_wait) is expected
    assert not is_over(DrainResult(saves, "no route"), RULE, max_wait)
