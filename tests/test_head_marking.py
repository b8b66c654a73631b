"""From decisions to steps: grace, taking back, and what must be left before anything goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.catalogue.summary import Summary
from ckptsync.head.marking import may_go, steps
from ckptsync.head.retaining import Decision, Verdict
from tests.retained import seen

NOW, GRACE = 1000.0, 100.0
FRESH = seen(1)
MARKED = replace(seen(1, "RETIRED"), said=NOW - 99.0)
OLD = replace(MARKED, said=NOW - 100.0)
SHARDS = replace(seen(1), let_go="old", resume=False, said=NOW - 100.0)


@pytest.mark.parametrize(
    ("verdict", "location", "deed", "scope"),
    [
        ("keep", FRESH, "nothing", "location"),
        ("drop", FRESH, "mark", "location"),
        ("drop", MARKED, "wait", "location"),
        ("drop", OLD, "remove", "location"),
        ("keep", OLD, "take-back", "location"),
        ("drop-shards", OLD, "take-back", "location"),
        ("drop-shards", replace(OLD, let_go="old", begun=True), "remove", "location"),
        ("keep", replace(OLD, begun=True), "remove", "location"),
        ("drop", replace(FRESH, back=NOW - 99.0), "wait", "location"),
        ("drop", replace(FRESH, back=NOW - 100.0), "mark", "location"),
        ("drop-shards", FRESH, "mark", "shards"),
        ("drop-shards", replace(SHARDS, said=NOW - 1), "wait", "shards"),
        ("drop-shards", SHARDS, "remove", "shards"),
        ("keep", SHARDS, "take-back", "shards"),
        ("keep", replace(SHARDS, begun=True), "remove", "shards"),
        ("keep", replace(SHARDS, begun=True, done=True), "nothing", "shards"),
        ("drop", replace(SHARDS, begun=True, done=True), "mark", "location"),
    ],
)
def test_what_is_due(verdict: Verdict, location: Summary, deed: str, scope: str) -> None:
    (step,) = steps([Decision("run", location.location, verdict, "why")], {location.location: location}, GRACE, NOW)
    assert step.deed == deed
    assert deed == "nothing" or step.scope == scope


def test_what_waits_says_for_how_long() -> None:
    (step,) = steps([Decision("run", "checkpoint-1", "drop", "why")], {"checkpoint-1": MARKED}, GRACE, NOW)
    assert step.left == 1.0


def test_all_that_is_marked_counts_as_gone() -> None:
    assert "no other" in may_go(MARKED, [MARKED, replace(seen(2, "RETIRED"), said=1.0)], "location")
    assert "no other" in may_go(MARKED, [MARKED, seen(2, "CONSOLIDATED")], "location")
    assert may_go(MARKED, [MARKED, seen(2)], "location") == ""


def test_a_model_is_no_location_to_resume_from() -> None:
    assert "resumed" in may_go(MARKED, [MARKED, replace(seen(2), resume=False)], "location")
    assert may_go(replace(MARKED, resume=False), [replace(seen(2), resume=False)], "location") == ""


def test_shards_go_only_while_the_model_is_verified() -> None:
    assert may_go(SHARDS, [SHARDS], "shards") == ""
    assert may_go(replace(SHARDS, status="DAMAGED"), [SHARDS], "shards") != ""
