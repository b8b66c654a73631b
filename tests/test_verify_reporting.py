"""Reports, written last."""

from __future__ import annotations

from dataclasses import replace

from ckptsync.catalogue.fresh import fresh
from ckptsync.records.coding import decode
from ckptsync.records.report import Report
from ckptsync.stores.contract import read_all
from ckptsync.verify.reporting import write_report
from tests.verified import flip, put, verified, whole_store


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
    (seen,) = fresh(store).places
    assert seen.word == "DAMAGED"
    assert write_report(store, good).count("/report-8-") == 1
    assert fresh(store).places[0].word == "VERIFIED"
