"""Reports, written last."""

from __future__ import annotations

from dataclasses import replace

from ckptsync.catalogue.fresh import fresh
from ckptsync.records.coding import decode
from ckptsync.records.report import Finding, Report
from ckptsync.stores.contract import read_all
from ckptsync.verify.reporting import fitting, write_report
from tests.verified import flip, location, put, verified, whole_store


def test_reports_are_numbered_highest_seen_plus_one_and_damaged_ones_count() -> None:
    store = whole_store()
    report = verified(store)
    first = write_report(store, report)
    flip(store, first, 30)
    second = write_report(store, report)
    assert "/report-1-" in first
    assert "/report-2-" in second
    assert decode(second, read_all(store, second), Report) == replace(report, n=2)


def test_two_heads_that_report_at_once_tie_and_the_worse_counts() -> None:
    store = whole_store()
    good = verified(store)
    bad = replace(good, verdict="damaged")
    for report in (bad, good):
        put(store, replace(report, n=7))
    (seen,) = fresh(store).locations
    assert seen.status == "DAMAGED"
    assert write_report(store, good).count("/report-8-") == 1
    assert fresh(store).locations[0].status == "VERIFIED"


def test_a_report_of_more_findings_than_it_can_hold_names_the_first_and_says_that_there_are_more() -> None:
    store = whole_store()
    large = tuple(
        Finding("digest", f"checkpoint-4/shard-{n}", "differs", ((0, 1),) * 5000, ("\u00e9" * 50,) * 5000) for n in range(5)
    )
    many = (*large, *(Finding("missing", f"checkpoint-4/expert-{n:06}.pt", "gone") for n in range(30_000)))
    report = replace(verified(store), verdict="damaged", findings=many)
    name = write_report(store, report)
    (last,) = (r for k, r in location(store).records.reports.items() if k == name)
    assert 100 < len(last.findings) < 30_006
    assert [f.name for f in last.findings[:-1]] == [f.name for f in many[: len(last.findings) - 1]]
    assert last.findings[-1].kind == "note"
    assert last.findings[-1].detail.startswith(f"{30_006 - len(last.findings)} further findings are left out")
    assert fitting(report) == replace(last, n=report.n)
