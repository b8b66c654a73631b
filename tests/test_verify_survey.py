"""Reading a store once, and writing a report last."""

from __future__ import annotations

import json
from dataclasses import replace

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.records.coding import decode, encode
from ckptsync.records.report import Report
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.survey import survey, write_report
from tests.verified import PLACE, RUN, WHOLE, arrive, flip, manifest, put, verified, whole_store


def test_a_manifest_whose_bytes_are_not_its_names_is_damage() -> None:
    store = MemoryStore()
    name = arrive(store, WHOLE)
    flip(store, name, 30)
    (fault,) = survey(store).faults
    assert (fault.name, type(fault.error)) == (name, Corrupt)
    assert (fault.finding.kind, fault.finding.name) == ("digest", name.removeprefix("run/"))


def test_a_damaged_report_is_only_a_note() -> None:
    store = whole_store()
    name = write_report(store, verified(store))
    flip(store, name, 30)
    assert [f.finding.kind for f in survey(store).faults] == ["note"]


def test_a_newer_record_is_not_guessed_at() -> None:
    store = MemoryStore()
    data = json.dumps({**json.loads(encode(manifest(WHOLE))), "format": 99}).encode()
    store.write(f"{RUN}/.ckptsync/{PLACE}/manifest-n0-0-{digest(data)[:16]}.json", [data])
    found = survey(store)
    assert isinstance(found.newer(RUN, PLACE), Unsupported)
    assert [f.finding.kind for f in found.faults_of(RUN, PLACE)] == ["note"]
    assert found.newer(RUN, "checkpoint-9") is None


def test_one_run_is_read_alone() -> None:
    store = whole_store()
    put(store, replace(manifest(WHOLE), run="other"))
    assert {p.run for p in survey(store).places} == {"other", RUN}
    assert [p.run for p in survey(store, RUN).places] == [RUN]


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
    (seen,) = survey(store).places
    assert seen.word == "DAMAGED"
    assert write_report(store, good).count("/report-8-") == 1
    assert survey(store).places[0].word == "VERIFIED"
