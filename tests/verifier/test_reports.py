"""From findings to verdicts, exit codes and written reports."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.records.io import decode
from ckptsync.records.report import DAMAGE, FindingKind, Report, VerifyFinding
from ckptsync.stores.contract import read_all
from ckptsync.verifier.write_reports import exit_code, fit, verdict, worst_first, write_report
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
