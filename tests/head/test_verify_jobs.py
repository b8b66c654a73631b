"""Which location is verified next, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import Proven, Summary, summarize
from ckptsync.catalogue.uncached import read_state
from ckptsync.head.due_jobs import (
    MERGED_WITHIN,
    RETRY,
    SPARE,
    Job,
    VerifyPolicy,
    verify_jobs,
    verify_jobs_in_store,
)
from ckptsync.records.io import encode, record_name
from ckptsync.records.report import Level, Verdict, VerifyFinding
from ckptsync.records.save_decisions import Keep
from ckptsync.records.store_paths import file_name
from ckptsync.stores.memory import MemoryStore
from tests.support.files_in_memory import MemoryFiles
from tests.support.filled_stores import put
from tests.support.head_in_process import verify_next
from tests.support.verified_stores import (
    LOCATION,
    RUN,
    WHOLE,
    arrive,
    location,
    manifest,
    model_record,
    verified,
    whole_store,
)

WEEK = 7 * 86400.0
CONFIG = file_name(RUN, LOCATION, "config.json")


NONE: Mapping[str, float] = {}
WEEKLY = VerifyPolicy("digest", WEEK)


def levels(
    store: MemoryStore,
    now: float,
    mtimes: Mapping[str, float] = NONE,
    policy: VerifyPolicy = WEEKLY,
) -> list[Level | None]:
    return [job.level for job in jobs(store, now, mtimes, policy)]


def jobs(
    store: MemoryStore, now: float, mtimes: Mapping[str, float], policy: VerifyPolicy = WEEKLY
) -> tuple[Job, ...]:
    found = read_state(store)
    times = {**found.mtimes, **mtimes}
    return verify_jobs((summarize(seen, times) for seen in found.locations), policy, now)


def reported(
    store: MemoryStore, n: int, verdict: Verdict = "ok", level: Level = "digest", at: str = CONFIG
) -> str:
    finding = VerifyFinding("digest", at.removeprefix("run/"), "")
    seen = location(store)
    report = replace(
        verified(store, "stat"),
        n=n,
        verdict=verdict,
        level=level,
        model_record=seen.model_record_name,
    )
    return put(store, replace(report, findings=(finding,) if verdict == "damaged" else ()))


def test_a_proof_lasts_for_most_of_the_period_and_no_longer() -> None:
    store = whole_store()
    name = reported(store, 1)
    deeper = reported(store, 2, level="load")
    assert levels(store, 99 + WEEK * (1 - SPARE), {name: 100.0, deeper: 1.0}) == []
    assert levels(store, 101 + WEEK * (1 - SPARE), {name: 100.0, deeper: 1.0}) == ["digest"]


def test_a_proof_at_a_lower_level_or_of_something_else_does_not_count() -> None:
    store = whole_store()
    reported(store, 1, level="stat")
    assert levels(store, 1e3) == ["digest"]
    reported(store, 2)
    assert levels(store, 1e3) == []
    # what every byte was read for is read again when its turn comes
    assert levels(store, 1e3, policy=VerifyPolicy("load")) == []
    assert levels(store, 2 * WEEK, policy=VerifyPolicy("load")) == ["load"]
    keys = [jobs(store, 2 * WEEK, NONE, VerifyPolicy(level))[0].key for level in ("digest", "load")]
    assert keys[0] != keys[1], "what failed at one level may be tried at another at once"
    arrive(store, {"rng_state_1.pth": b"x"}, "n1")
    assert levels(store, 1e6) == ["digest"]


def test_a_proof_of_the_shards_is_none_of_the_model_made_from_them() -> None:
    store = MemoryStore()
    name = arrive(store, WHOLE)
    reported(store, 1)
    assert levels(store, 1e3) == []
    model_record(store, MemoryFiles(WHOLE), [name])
    assert levels(store, 1e3) == ["digest"]


def test_a_complete_checkpoint_waits_for_its_model_but_not_for_ever() -> None:
    store = MemoryStore()
    name = arrive(store, WHOLE)
    assert levels(store, 100 + MERGED_WITHIN - 1, {name: 100.0}) == []
    assert levels(store, 100 + MERGED_WITHIN, {name: 100.0}) == ["digest"]
    often = VerifyPolicy("digest", 60.0)
    assert levels(store, 100 + 59, {name: 100.0}, often) == []
    assert levels(store, 100 + 60, {name: 100.0}, often) == ["digest"]
    model_record(store, MemoryFiles(WHOLE), [name])
    assert levels(store, 101, {name: 100.0}) == ["digest"]


def test_damage_is_looked_at_again_when_the_file_was_written_since() -> None:
    store = whole_store()
    name = reported(store, 1, "damaged", "load")
    assert levels(store, 101, {name: 100.0, CONFIG: 100.0}) == []
    assert levels(store, 101, {name: 100.0, CONFIG: 100.5}) == ["load"]
    listed = whole_store()
    name = reported(listed, 1, "damaged", "stat")
    assert levels(listed, 101, {name: 100.0, CONFIG: 100.5}) == ["digest"]
    store.delete(CONFIG)
    assert levels(store, 101, {name: 100.0}) == []


def test_damage_is_looked_at_again_after_a_while_that_doubles() -> None:
    store = whole_store()
    first = reported(store, 1, "damaged")
    at = {first: 100.0}
    assert levels(store, 99 + RETRY, at) == []
    assert levels(store, 100 + RETRY, at) == ["digest"]
    assert levels(store, 160, at, VerifyPolicy("digest", 60.0)) == ["digest"]
    second = reported(store, 2, "damaged")
    assert levels(store, 100 + RETRY, {**at, second: 100.0}) == []
    assert levels(store, 100 + 2 * RETRY, {**at, second: 100.0}) == ["digest"]


def test_a_repair_that_was_proven_is_proof() -> None:
    store = whole_store()
    reported(store, 1, "damaged")
    name = reported(store, 2)
    assert levels(store, 101, {name: 100.0}) == []


def test_what_is_arriving_is_due_only_for_what_a_listing_shows() -> None:
    store = MemoryStore()
    arrive(
        store,
        {"model-00001-of-00002.safetensors": WHOLE["model.safetensors"], "config.json": b"{}"},
    )
    assert levels(store, 1e6) == []
    store.delete(CONFIG)
    assert levels(store, 1e6) == ["stat"]


def test_repairs_come_first_then_the_newest() -> None:
    store = whole_store()
    damaged = reported(store, 1, "damaged")
    other = put(
        store,
        replace(manifest(WHOLE), checkpoint="checkpoint-8", location="checkpoint-8", files=()),
    )
    newest = put(
        store, replace(manifest(WHOLE), checkpoint="checkpoint-9", location="checkpoint-9")
    )
    for name in WHOLE:
        store.write(f"{RUN}/checkpoint-9/{name}", [WHOLE[name]])
        store.write(f"{RUN}/checkpoint-8/{name}", [WHOLE[name]])
    put(store, replace(manifest(WHOLE), checkpoint="checkpoint-8", location="checkpoint-8", n=1))
    mtimes = {damaged: 100.0, CONFIG: 101.0, other: 5.0, newest: 50.0}
    found = jobs(store, 1e6, mtimes)
    assert [job.location for job in found] == ["checkpoint-4", "checkpoint-9", "checkpoint-8"]


def test_what_is_ambiguous_is_notjobs() -> None:
    store = whole_store()
    arrive(store, {"notes": b"x"}, "n1", started=10**12, ended=10**12)
    assert levels(store, 1e6) == []


DAY = 86400.0
BASE = summarize(read_state(whole_store()).locations[0], {})


def made(number: int, size: int, last: float) -> Summary:
    proof = Proven(holds=True, passed=(("digest", last),))
    return replace(
        BASE, location=f"checkpoint-{number}", size=size, model_size=0, arrived=last, proof=proof
    )


@pytest.mark.parametrize(
    ("share", "count"), [(0.05, 0), (0.15, 1), (0.35, 3), (0.95, 9), (1.05, 10)]
)
def test_what_was_read_at_one_moment_is_read_again_evenly_over_the_period(
    share: float, count: int
) -> None:
    locations = [made(number, 10, 0.0) for number in range(10)]
    found = verify_jobs(locations, WEEKLY, share * WEEK * (1 - SPARE))
    assert [job.location for job in found] == [f"checkpoint-{n}" for n in range(count)]


def test_a_single_large_location_is_not_read_more_often_than_it_must() -> None:
    assert verify_jobs([made(1, 10**12, 0.0)], WEEKLY, 0.89 * WEEK) == ()
    (job,) = verify_jobs([replace(made(1, 10**12, 0.0), model_size=5)], WEEKLY, 0.91 * WEEK)
    assert job.size == 10**12 + 5


def test_after_an_outage_what_is_late_is_read_at_once_and_the_oldest_first() -> None:
    locations = [made(i, 10, i * DAY) for i in range(7)]
    found = verify_jobs([replace(locations[0], status="RETIRED"), *locations], WEEKLY, 3 * WEEK)
    assert [job.location for job in found] == [f"checkpoint-{i}" for i in range(7)]


def test_old_locations_wait_for_those_that_are_new_or_damaged() -> None:
    new = replace(made(2, 10, 0.0), proof=Proven())
    found = verify_jobs([made(1, 10, 0.0), new], WEEKLY, WEEK)
    assert [job.location for job in found] == ["checkpoint-2", "checkpoint-1"]


def due_now(store: MemoryStore, now: float) -> list[str]:
    found = verify_jobs_in_store(store, read_catalogue(store), VerifyPolicy(), now)
    return [job.subject for job in found]


def damaged() -> MemoryStore:
    """A second node's manifest cannot be read."""
    store = whole_store()
    data = encode(manifest({"rng_state_1.pth": b"x"}, "n1"))
    store.write(record_name(manifest({"rng_state_1.pth": b"x"}, "n1"), data), [data[:-5]])
    return store


def test_a_location_with_a_damaged_manifest_waits_for_the_report_that_says_so() -> None:
    store = damaged()
    assert read_catalogue(store).summaries == ()
    assert due_now(store, 1e6) == [f"{RUN}/{LOCATION}"]
    report = verify_next(store, VerifyPolicy(), 1e6)
    assert report is not None
    assert report.verdict == "damaged"
    assert due_now(store, 30.0) == []


def test_a_location_with_a_damaged_report_is_verified_once() -> None:
    store = whole_store()
    store.write(reported(store, 1), [b"{}"])
    assert due_now(store, 1e6) == [f"{RUN}/{LOCATION}"]


def test_what_a_newer_program_has_written_does_not_wait() -> None:
    store = whole_store()
    data = encode(manifest({"a": b"x"}, "n1", format=2))
    store.write(record_name(manifest({"a": b"x"}, "n1", format=2), data), [data])
    assert due_now(store, 1e6) == []


def test_ages_count_on_the_clock_of_a_store_that_is_ahead() -> None:
    store = MemoryStore()
    arrive(store, {"model.safetensors": b"x", "config.json": b"{}"})
    for _ in range(int(MERGED_WITHIN)):  # seconds: this store's clock counts writes
        store.write("clock", [b""])
    assert due_now(store, 0.0) == []
    put(store, Keep(RUN, LOCATION, LOCATION, 0, keeps=True))
    assert due_now(store, 0.0) == [f"{RUN}/{LOCATION}"]
