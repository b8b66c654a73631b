"""What is kept: never the last that is verified, all that any rule names, and reasons that people
can follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.catalogue.location_summary import Summary
from ckptsync.head.retention import (
    PATIENCE,
    RetentionDecision,
    RetentionVerdict,
    RunEvidence,
    decide,
    is_being_deleted,
    is_resumable,
    is_verified,
    last_protection,
    with_action,
)
from ckptsync.head.retention_rules import Best, Rules
from ckptsync.records.location_status import STATUSES
from tests.support.retention_stores import DAY, seen

NOW = 1000 * DAY


def kept(
    locations: list[Summary], rules: Rules, evidence: RunEvidence | None = None, now: float = NOW
) -> list[int | None]:
    """Steps of those that stay, shards or not."""
    steps = {s.location: s.step for s in locations}
    return sorted(
        (
            steps[d.location]
            for d in decide(locations, rules, evidence or RunEvidence(), now)
            if d.verdict != "drop"
        ),
        key=str,
    )


def reason(
    locations: list[Summary], rules: Rules, location: str, evidence: RunEvidence | None = None
) -> str:
    return next(
        d.reason
        for d in decide(locations, rules, evidence or RunEvidence(), NOW)
        if d.location == location
    )


FIVE = [seen(n) for n in (1, 2, 3, 4, 5)]


def test_without_a_rule_nothing_goes() -> None:
    assert kept(FIVE, Rules()) == [1, 2, 3, 4, 5]
    assert kept(FIVE, Rules(shards=1)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(keep_last=2), [4, 5]),
        (Rules(keep_every=2), [2, 4, 5]),
        (Rules(keep_last=1, keep_every=3), [3, 5]),
        (Rules(keep_best=Best("eval_loss", 1)), [2, 5]),
        (Rules(keep_best=Best("eval_loss", 2, is_greatest=True)), [1, 3, 5]),
        (Rules(max_age=998 * DAY), [3, 4, 5]),
        (Rules(max_size=45), [3, 4, 5]),
        (Rules(max_size=1), [5]),
        (Rules(max_age=998 * DAY, max_size=30), [4, 5]),
        (Rules(keep_every=2, max_size=15), [2, 4, 5]),
    ],
)
def test_each_rule_and_rules_together(rules: Rules, expected: list[int]) -> None:
    losses = RunEvidence(
        {f"checkpoint-{n}": value for n, value in ((1, 9.0), (2, 1.0), (3, 8.0), (5, 3.0))}
    )
    assert kept(FIVE, rules, losses) == expected


def test_newest_is_what_was_written_last_and_not_the_largest_step() -> None:
    restarted = [
        seen(500, at=1),
        seen(1000, at=2),
        replace(seen(500, at=9), location="checkpoint-500~again"),
    ]
    assert [
        d.location
        for d in decide(restarted, Rules(keep_last=1), RunEvidence(), NOW)
        if d.verdict == "keep"
    ] == ["checkpoint-500~again"]


def test_a_wrong_clock_makes_no_save_the_newest_nor_the_oldest() -> None:
    ahead = replace(seen(2), ended=2 * DAY, ahead=30 * DAY)
    past = replace(seen(5), ended=-30 * DAY)
    for locations in ([seen(1), ahead, seen(3), seen(4), seen(5)], [*FIVE[:4], past]):
        assert kept(locations, Rules(keep_last=1)) == [5]
        assert kept(locations, Rules(keep_last=2)) == [4, 5]
        assert kept(locations, Rules(max_age=998 * DAY)) == [3, 4, 5]


def test_the_last_that_arrived_stays_where_no_name_tells_its_step() -> None:
    named = [
        replace(seen(n), checkpoint=name, location=name, step=None)
        for n, name in enumerate(("first", "second", "third", "fourth"), 1)
    ]
    named[2:] = [replace(s, ended=-n * DAY) for n, s in enumerate(named[2:], 30)]
    places = [d.location for d in decide(named, Rules(keep_last=1), RunEvidence(), NOW)]
    assert places == ["second", "first", "third", "fourth"]
    assert reason(named, Rules(keep_last=1), "fourth") == "the last that arrived in the store"
    for name in ("first", "third"):
        assert reason(named, Rules(keep_last=1), name) == "not one of the newest 1"
    assert reason(named, Rules(keep_every=2), "first") == "its step is not a multiple of 2"
    copied = [
        replace(seen(n, at=n), first_arrival=DAY + at / 100) for at, n in enumerate((5, 3, 4, 1, 2))
    ]
    assert kept(copied, Rules(keep_last=1)) == [5], "a copied store tells no arrivals"


def test_what_a_person_keeps_what_is_in_doubt_and_the_end_of_training_stay() -> None:
    locations = [
        *FIVE,
        seen(None, at=0),
        replace(seen(0), kept="for the paper"),
        seen(6, "CONFLICT", at=0.5),
    ]
    twin = replace(seen(6, at=0.6), location="checkpoint-6~other")
    assert kept([*locations, twin], Rules(keep_last=1)) == [0, 5, 6, 6, None]
    assert reason(locations, Rules(keep_last=1), "checkpoint-0") == "kept by hand: for the paper"
    assert kept(FIVE, Rules(keep_last=1), RunEvidence({}, ["checkpoint-2"])) == [2, 5]


def test_what_a_trainer_leaves_at_the_end_stays_and_is_none_of_the_newest() -> None:
    tag = replace(seen(5, at=9 * DAY), checkpoint="global_step5", location="global_step5")
    locations = [*FIVE, seen(None, at=10 * DAY), tag]
    assert kept(locations, Rules(keep_last=2)) == [4, 5, 5, None]
    alone = [
        replace(seen(n), checkpoint=f"global_step{n}", location=f"global_step{n}")
        for n in (1, 2, 3)
    ]
    assert kept(alone, Rules(keep_last=1)) == [3], (
        "where there is nothing else, tags are the checkpoints"
    )


def test_what_was_never_verified_stays_until_it_is_overtaken_and_quiet() -> None:
    incomplete = [seen(6, "INCOMPLETE"), seen(4, "DAMAGED"), seen(3, "COMPLETE")]
    assert kept([*incomplete, seen(5), seen(2)], Rules(keep_last=1)) == [5, 6]
    for rules in (Rules(keep_last=1), Rules(max_size=1)):
        assert kept([*incomplete, seen(1)], rules) == [1, 3, 4, 6], "nothing newer is verified"
    assert kept([*incomplete, seen(5), seen(2)], Rules(keep_last=2)) == [2, 3, 4, 5, 6], (
        "one of them may be the second yet"
    )
    just = replace(seen(4, "INCOMPLETE"), arrived=NOW - PATIENCE + 1)
    assert kept([just, seen(5)], Rules(keep_last=1)) == [4, 5]


def test_a_metric_that_cannot_be_read_keeps_and_one_that_was_never_measured_does_not() -> None:
    rules = Rules(keep_best=Best("eval_loss", 1))
    assert kept(FIVE, rules, RunEvidence({"checkpoint-1": None, "checkpoint-3": 2.0})) == [1, 3, 5]
    worse = RunEvidence({"checkpoint-3": 2.0, "checkpoint-4": float("nan")})
    assert kept(FIVE, rules, worse) == [3, 5]


def test_a_metric_that_no_checkpoint_has_yet_lets_none_go() -> None:
    rules = Rules(keep_best=Best("eval/acc", 1))
    assert kept(FIVE, rules) == [1, 2, 3, 4, 5]
    assert kept(FIVE, rules, RunEvidence({"checkpoint-2": None})) == [1, 2, 3, 4, 5]
    assert reason(FIVE, rules, "checkpoint-2") == "its metrics are not known"


def test_shards_go_of_all_but_the_newest_while_models_stay() -> None:
    damaged = replace(seen(1, "DAMAGED"), consolidated=True)
    others = [seen(6, "CONSOLIDATED"), replace(seen(0), kept="by me"), seen(None, at=0)]
    locations = [damaged, *FIVE[1:], *others]
    found = {
        d.location: d.reason
        for d in decide(locations, Rules(shards=2), RunEvidence(), NOW)
        if d.verdict == "drop-shards"
    }
    why = "its model is verified, and not one of the newest 2"
    assert found == {"checkpoint-3": why, "checkpoint-2": why}


def test_the_newest_that_is_verified_stays_though_no_training_resumes_from_it() -> None:
    locations = [seen(1), seen(2, resume=False), seen(3, resume=False)]
    assert kept(locations, Rules(max_age=DAY)) == [1, 3]


def test_the_newest_that_can_be_resumed_from_stays_beside_newer_models() -> None:
    locations = [
        seen(1),
        seen(2),
        replace(seen(3), shards_retired="old", resume=False, shards_deleted=True, begun=True),
    ]
    assert kept(locations, Rules(keep_last=1)) == [2, 3]
    assert (
        reason(locations, Rules(keep_last=1), "checkpoint-2")
        == "the newest that can be resumed from"
    )


def test_shards_of_the_newest_that_can_be_resumed_from_stay_unless_none_are_wanted() -> None:
    locations = [seen(1), replace(seen(2), resume=False), replace(seen(3), resume=False)]
    verdicts = {
        n: [d.verdict for d in decide(locations, Rules(shards=n), RunEvidence(), NOW)]
        for n in (1, 0)
    }
    assert verdicts == {1: ["keep", "drop-shards", "keep"], 0: ["drop-shards"] * 3}
    for shards in (0, 1):
        decisions = decide(locations, Rules(shards=shards), RunEvidence(), NOW)
        assert {d.any_shards for d in decisions} == {shards == 0}


def test_what_is_being_deleted_counts_for_no_rule() -> None:
    gone = replace(seen(3, "RETIRED"), begun=True)
    assert kept([seen(1), seen(2), gone], Rules(keep_last=2)) == [1, 2]
    marked = seen(3, "RETIRED")
    assert kept([seen(1), seen(2), marked], Rules(max_age=DAY)) == [2, 3], "nothing else is sure"
    model = replace(seen(5), size=1000, resume=False, shards_retired="old", shards_deleted=True)
    assert kept([*FIVE[:4], model], Rules(max_size=45)) == [3, 4, 5], "only its model takes room"


def test_reasons_say_what_kept_it_and_what_did_not() -> None:
    rules = Rules(keep_last=1, keep_every=4, max_age=10 * DAY)
    assert reason(FIVE, rules, "checkpoint-4") == "its step is a multiple of 4"
    limits = Rules(max_age=998 * DAY, max_size=1)
    assert reason(FIVE, limits, "checkpoint-4") == "newer checkpoints already take 1 B"
    assert (
        reason(FIVE, rules, "checkpoint-1")
        == "not one of the newest 1, its step is not a multiple of 4, older than 10d"
    )
    assert reason([seen(3, "INCOMPLETE"), *FIVE[3:]], rules, "checkpoint-3").startswith(
        "incomplete, and a newer checkpoint is verified; "
    )


@st.composite
def runs(draw: st.DrawFn) -> list[Summary]:
    words = draw(st.lists(st.sampled_from(STATUSES), max_size=8))
    found = []
    for n, word in enumerate(words):
        told: dict[str, Any] = {
            "at": draw(st.integers(0, 990)) * DAY,
            "size": draw(st.integers(0, 20)),
            "begun": word == "RETIRED" and draw(st.booleans()),
            "resume": word in ("VERIFIED", "RETIRED") and draw(st.booleans()),
            "kept": draw(st.sampled_from(["", "", "mine"])),
        }
        found.append(seen(n, word, **told))
    return found


RULES = st.builds(
    Rules,
    keep_last=st.integers(0, 3),
    keep_every=st.integers(0, 3),
    keep_best=st.sampled_from([None, Best("m", 1), Best("m", 2, is_greatest=True)]),
    max_age=st.sampled_from([0.0, DAY, 500 * DAY]),
    max_size=st.sampled_from([0, 20, 60]),
    shards=st.sampled_from([None, 0, 1, 2]),
)
EVIDENCE = st.builds(
    RunEvidence,
    st.dictionaries(
        st.sampled_from([f"checkpoint-{n}" for n in range(8)]), st.none() | st.floats(0, 9)
    ),
)


def stays(decisions: tuple[RetentionDecision, ...]) -> set[str]:
    return {d.location for d in decisions if d.verdict != "drop"}


@given(runs(), RULES, EVIDENCE)
def test_the_last_verified_checkpoint_of_a_run_never_goes(
    locations: list[Summary], rules: Rules, evidence: RunEvidence
) -> None:
    left = stays(decide(locations, rules, evidence, NOW))
    for of_a_kind in (is_verified, is_resumable):
        for there in (
            [s for s in locations if not is_being_deleted(s)],
            [s for s in locations if not s.retired],
        ):
            if any(map(of_a_kind, there)):
                assert any(of_a_kind(s) for s in there if s.location in left)
    assert {
        s.location
        for s in locations
        if (s.kept or s.status == "CONFLICT") and not is_being_deleted(s)
    } <= left


# What is due: grace, withdrawing, and what must be left before anything is deleted.

GRACE = 100.0
FRESH = seen(1)
MARKED = replace(seen(1, "RETIRED"), marked_at=NOW - 99.0)
OLD = replace(MARKED, marked_at=NOW - 100.0)
SHARDS = replace(seen(1), shards_retired="old", resume=False, marked_at=NOW - 100.0)


@pytest.mark.parametrize(
    ("verdict", "location", "action", "scope"),
    [
        ("keep", FRESH, "nothing", "location"),
        ("drop", FRESH, "mark", "location"),
        ("drop", MARKED, "wait", "location"),
        ("drop", OLD, "remove", "location"),
        ("keep", OLD, "withdraw", "location"),
        ("drop-shards", OLD, "withdraw", "location"),
        ("drop-shards", replace(OLD, shards_retired="old", begun=True), "remove", "location"),
        ("keep", replace(OLD, begun=True), "remove", "location"),
        ("drop", replace(FRESH, withdrawn_at=NOW - 99.0), "wait", "location"),
        ("drop", replace(FRESH, withdrawn_at=NOW - 100.0), "mark", "location"),
        ("drop-shards", FRESH, "mark", "shards"),
        ("drop-shards", replace(SHARDS, marked_at=NOW - 1), "wait", "shards"),
        ("drop-shards", SHARDS, "remove", "shards"),
        ("keep", SHARDS, "withdraw", "shards"),
        ("keep", replace(SHARDS, begun=True), "remove", "shards"),
        ("keep", replace(SHARDS, begun=True, shards_deleted=True), "nothing", "shards"),
        ("drop", replace(SHARDS, begun=True, shards_deleted=True), "mark", "location"),
    ],
)
def test_what_is_due(verdict: RetentionVerdict, location: Summary, action: str, scope: str) -> None:
    found = with_action(
        RetentionDecision("run", location.location, verdict, "why"), location, NOW, GRACE
    )
    assert found.action == action
    assert action == "nothing" or found.scope == scope


def test_what_waits_says_for_how_long() -> None:
    assert (
        with_action(
            RetentionDecision("run", "checkpoint-1", "drop", "why"), MARKED, NOW, GRACE
        ).left
        == 1.0
    )


def test_all_that_is_marked_counts_as_gone() -> None:
    for other in (replace(seen(2, "RETIRED"), marked_at=1.0), seen(2, "CONSOLIDATED")):
        assert "no other" in last_protection(MARKED, "location", [other], resumes=True)
    assert last_protection(MARKED, "location", [seen(2)], resumes=True) == ""


def test_a_model_is_no_location_to_resume_from() -> None:
    model = replace(seen(2), resume=False)
    assert "resumed" in last_protection(MARKED, "location", [model], resumes=True)
    assert last_protection(MARKED, "location", [model, seen(3)], resumes=True) == ""
    assert last_protection(MARKED, "location", [model], resumes=False) == ""


def test_shards_go_only_while_the_model_is_verified() -> None:
    assert last_protection(SHARDS, "shards", [], resumes=False) == ""
    damaged = replace(SHARDS, status="DAMAGED")
    assert "not verified now" in last_protection(damaged, "shards", [], resumes=False)
