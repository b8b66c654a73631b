"""From findings to verdicts, exit codes and written reports."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.records.io import decode
from ckptsync.records.report import DAMAGE, FindingKind, Report, VerifyFinding
from ckptsync.stores.contract import read_all
from ckptsync.verifier.write_reports import (
    exit_code,
    fit,
    is_news,
    verdict,
    worst_first,
    write_report,
)
from tests.support.filled_stores import flip, put
from tests.support.verified_stores import location, verified, whole_store

REPORT = Report("run", "c-1", "c-1", 0, "digest", "ok", (), "", 0, ())


def test_the_worst_comes_first_and_nothing_twice() -> None:
    kinds: list[FindingKind] = [
        "note",
        "load",
        "nonfinite",
        "missing",
        "digest",
        "parse",
        "size",
        "note",
    ]
    found = worst_first(VerifyFinding(kind, "f", "") for kind in kinds)
    assert [f.kind for f in found] == [
        "missing",
        "size",
        "digest",
        "parse",
        "load",
        "nonfinite",
        "note",
    ]


@pytest.mark.parametrize("kind", get_args(FindingKind))
def test_only_notes_and_values_that_are_not_finite_damage_nothing(kind: FindingKind) -> None:
    assert (verdict([VerifyFinding(kind, "f", "")], is_incomplete=False) == "ok") == (
        kind in ("note", "nonfinite")
    )


def test_damage_to_what_has_arrived_is_damage() -> None:
    assert verdict([VerifyFinding("digest", "f", "")], is_incomplete=True) == "damaged"
    assert verdict([VerifyFinding("note", "f", "")], is_incomplete=True) == "incomplete"


def test_a_report_stays_small_and_keeps_all_damage() -> None:
    found = worst_first(
        VerifyFinding(kind, f"f{i}", "") for i in range(2000) for kind in ("digest", "nonfinite")
    )
    assert sum(f.kind in DAMAGE for f in found) == 2000
    assert len(found) == 3001
    assert "1000 more" in found[-1].detail


def test_exit_codes() -> None:
    ok, damaged, incomplete = (replace(REPORT, verdict=v) for v in ("ok", "damaged", "incomplete"))
    assert exit_code([]) == exit_code([ok, incomplete]) == 0
    assert exit_code([ok, damaged, incomplete]) == 10
    assert exit_code([replace(incomplete, run="")]) == 3
    assert exit_code([replace(incomplete, run=""), damaged]) == 10


def test_reports_are_numbered_highest_seen_plus_one_and_damaged_ones_count() -> None:
    store = whole_store()
    report = verified(store)
    first = write_report(store, report)
    flip(store, first, 30)
    report = verified(store)
    second = write_report(store, report)
    third = write_report(store, replace(report, verdict="damaged"))
    assert "/report-0-" in first
    assert "/report-1-" in second
    assert "/report-2-" in third
    assert decode(second, read_all(store, second)) == report


WRONG = VerifyFinding("digest", "c-1/f", "differs")
HURT = replace(REPORT, verdict="damaged", findings=(WRONG,))
LOAD = replace(REPORT, level="load")


@pytest.mark.parametrize(
    ("stored", "report", "expected"),
    [
        (None, REPORT, True),
        (None, replace(REPORT, level="stat"), False),
        (None, replace(REPORT, verdict="incomplete"), False),
        (None, HURT, True),
        (REPORT, REPORT, False),
        (REPORT, LOAD, True),
        (LOAD, REPORT, False),
        (REPORT, replace(REPORT, manifests=("m",)), True),
        (replace(REPORT, manifests=("m", "late")), replace(REPORT, manifests=("m",)), False),
        (REPORT, replace(REPORT, model_record="m"), True),
        (replace(REPORT, verdict="incomplete"), REPORT, True),
        (HURT, HURT, False),
        (HURT, replace(HURT, findings=(WRONG, VerifyFinding("note", "c-1", "x"))), False),
        (HURT, replace(HURT, findings=(replace(WRONG, name="c-1/g"),)), True),
        (HURT, replace(HURT, manifests=("m",)), True),
        (HURT, REPORT, True),
        (HURT, replace(REPORT, level="stat"), False),
        (replace(HURT, level="stat"), replace(REPORT, level="stat"), True),
    ],
)
def test_a_report_by_hand_is_written_if_it_is_news(
    stored: Report | None, report: Report, *, expected: bool
) -> None:
    assert is_news(report, {"r": stored} if stored else {}, {}) == expected


def test_damage_to_a_file_that_was_uploaded_again_is_news() -> None:
    for uploaded, expected in ((9.0, False), (10.0, False), (11.0, True)):
        assert is_news(HURT, {"r": HURT}, {"r": 10.0, "run/c-1/f": uploaded}) == expected


def test_two_heads_that_report_at_once_tie_and_the_worse_counts() -> None:
    store = whole_store()
    good = verified(store)
    bad = replace(good, verdict="damaged")
    for report in (bad, good):
        put(store, replace(report, n=7))
    (seen,) = read_state(store).locations
    assert seen.status == "DAMAGED"
    write_report(store, good)
    assert read_state(store).locations[0].status == "DAMAGED", "it read before the damage was known"
    assert write_report(store, verified(store)).count("/report-8-") == 1
    assert read_state(store).locations[0].status == "VERIFIED"


def test_a_report_of_more_findings_than_it_can_hold_names_the_first_and_says_there_are_more() -> (
    None
):
    store = whole_store()
    large = tuple(
        VerifyFinding(
            "digest",
            f"checkpoint-4/shard-{n}",
            "differs",
            ((0, 1),) * 1500,
            ("\u00e9" * 50,) * 1500,
        )
        for n in range(5)
    )
    many = (
        *large,
        *(VerifyFinding("missing", f"checkpoint-4/expert-{n:06}.pt", "gone") for n in range(6_000)),
    )
    report = replace(verified(store), verdict="damaged", findings=many)
    name = write_report(store, report)
    (last,) = (r for k, r in location(store).records.reports.items() if k == name)
    assert 100 < len(last.findings) < 6_006
    assert [f.name for f in last.findings[:-1]] == [f.name for f in many[: len(last.findings) - 1]]
    assert last.findings[-1].kind == "note"
    assert last.findings[-1].detail.startswith(
        f"{6_006 - len(last.findings)} further findings are left out"
    )
    assert fit(report) == replace(last, n=report.n)
