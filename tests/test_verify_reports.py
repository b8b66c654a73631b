"""Locations are verified one at a time, the report is written last, damage is reported and its repair noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.errors import StoreError
from ckptsync.records.names import file_name
from ckptsync.records.report import Report
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.due import SEALING, Schedule
from ckptsync.verify.location import VerifyResult, verify_and_report
from tests.heads import verify_next
from tests.verified import LOCATION, RUN, WHOLE, arrive, flip, location, manifest, put, whole_store

MODEL = file_name(RUN, LOCATION, "model.safetensors")
DAILY = Schedule("digest", 86400.0)


def reports(store: MemoryStore) -> list[Report]:
    return sorted(location(store).records.reports.values(), key=lambda r: r.n)


def test_a_location_is_verified_once_and_then_rests() -> None:
    store = whole_store()
    first = verify_next(store, DAILY, 1000.0)
    assert first.report is not None
    assert (first.report.verdict, first.report.when, first.written.count("/report-1-")) == ("ok", 1000.0, 1)
    assert location(store).status == "VERIFIED"
    assert verify_next(store, DAILY, 1001.0) == VerifyResult()


def test_it_is_verified_again_when_its_time_has_come() -> None:
    store = whole_store()
    verify_next(store, DAILY, 0.0)
    assert verify_next(store, DAILY, 90_000.0).written.count("/report-2-") == 1


def test_damage_is_reported_and_its_repair_noticed_the_next_time() -> None:
    store = whole_store()
    flip(store, MODEL, 20_000)
    assert verify_next(store, DAILY, 0.0).written
    assert location(store).status == "DAMAGED"
    assert verify_next(store, DAILY, 0.0) == VerifyResult()
    store.write(MODEL, [WHOLE["model.safetensors"]])
    again = verify_next(store, DAILY, 0.0)
    assert again.report is not None
    assert [r.verdict for r in reports(store)] == ["damaged", "ok"]
    assert location(store).status == "VERIFIED"


def test_one_location_is_verified_at_a_time() -> None:
    store = whole_store()
    put(store, replace(manifest(WHOLE), checkpoint="checkpoint-9", location="checkpoint-9"))
    for name in WHOLE:
        store.write(f"{RUN}/checkpoint-9/{name}", [WHOLE[name]])
    first, second = verify_next(store, DAILY, 2 * SEALING), verify_next(store, DAILY, 2 * SEALING)
    assert {r.report.location for r in (first, second) if r.report} == {LOCATION, "checkpoint-9"}


def test_what_is_arriving_leaves_no_reports_but_for_damage() -> None:
    store = MemoryStore()
    files = {"model-00001-of-00002.safetensors": WHOLE["model.safetensors"]}
    arrive(store, files)
    for _ in range(3):
        assert verify_next(store, DAILY, 1e6) == VerifyResult()
    (name,) = (file_name(RUN, LOCATION, path) for path in files)
    store.delete(name)
    assert verify_next(store, DAILY, 1e6).written
    store.write(name, [WHOLE["model.safetensors"]])
    assert verify_next(store, DAILY, 1e6).written
    assert [r.verdict for r in reports(store)] == ["damaged", "arriving"]
    assert location(store).status == "ARRIVING"
    assert verify_next(store, DAILY, 1e6) == VerifyResult()


def test_a_record_that_cannot_be_read_is_told_and_stops_nothing() -> None:
    store = whole_store()
    flip(store, arrive(store, {"rng_state_1.pth": b"x"}, "n1"), 30)
    result = verify_next(store, DAILY, 0.0)
    assert len(result.faults) == 1
    assert result.report is not None
    assert result.report.verdict == "damaged"


class Failing(MemoryStore):
    fails = False

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if self.fails and name == MODEL:
            raise StoreError(f"{name}: input/output error")
        super().read_into(name, start, out)


def test_a_store_that_does_not_answer_is_an_error_and_no_report() -> None:
    store = Failing()
    arrive(store, WHOLE)
    store.fails = True
    with pytest.raises(StoreError):
        verify_next(store, DAILY, 1e6)
    store.fails = False
    assert reports(store) == []


def test_one_location_is_verified_when_it_is_asked_for_and_one_that_has_gone_is_not() -> None:
    store = whole_store()
    for n in (1, 2):
        assert verify_and_report(store, RUN, LOCATION, "digest", 7.0).written.count(f"/report-{n}-") == 1
    assert [(r.verdict, r.when) for r in reports(store)] == [("ok", 7.0)] * 2
    assert verify_and_report(store, RUN, "checkpoint-999", "digest", 7.0) == VerifyResult()
