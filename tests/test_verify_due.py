"""Which place is verified next: a pure function, with the store's time as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptsync.catalogue.fresh import fresh
from ckptsync.records.names import file_name
from ckptsync.records.report import Finding, Level, Verdict
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.due import RETRY, SEALING, Due, Schedule, due
from tests.plain_files import MemoryFiles
from tests.verified import PLACE, RUN, WHOLE, arrive, manifest, place, put, seal, verified, whole_store

WEEK = 7 * 86400.0
CONFIG = file_name(RUN, PLACE, "config.json")


NONE: Mapping[str, float] = {}
WEEKLY = Schedule("digest", WEEK)


def asked(
    store: MemoryStore, now: float, mtimes: Mapping[str, float] = NONE, schedule: Schedule = WEEKLY
) -> list[tuple[str, Level]]:
    return [(d.why, d.level) for d in _due(store, now, mtimes, schedule)]


def _due(store: MemoryStore, now: float, mtimes: Mapping[str, float], schedule: Schedule = WEEKLY) -> tuple[Due, ...]:
    found = fresh(store)
    return due(found.places, schedule, {**found.mtimes, **mtimes}, now)


def reported(store: MemoryStore, n: int, verdict: Verdict = "ok", level: Level = "digest", at: str = CONFIG) -> str:
    finding = Finding("digest", at.removeprefix("run/"), "")
    seen = place(store)
    report = replace(verified(store, "stat"), n=n, verdict=verdict, level=level, seal=seen.seal_name)
    return put(store, replace(report, findings=(finding,) if verdict == "damaged" else ()))


def test_what_was_never_verified_is_due() -> None:
    assert asked(whole_store(), 1e6) == [("never", "digest")]


def test_a_proof_lasts_for_the_period_and_no_longer() -> None:
    store = whole_store()
    name = reported(store, 1)
    assert asked(store, 99 + WEEK, {name: 100.0}) == []
    assert asked(store, 100 + WEEK, {name: 100.0}) == [("old", "digest")]


def test_a_proof_at_a_lower_level_or_of_something_else_does_not_count() -> None:
    store = whole_store()
    reported(store, 1, level="stat")
    assert asked(store, 1e3) == [("never", "digest")]
    reported(store, 2)
    assert asked(store, 1e3) == []
    assert asked(store, 1e3, schedule=Schedule("load")) == [("never", "load")]
    arrive(store, {"rng_state_1.pth": b"x"}, "n1")
    assert asked(store, 1e6) == [("never", "digest")]


def test_a_proof_of_the_shards_is_none_of_the_model_made_from_them() -> None:
    store = MemoryStore()
    name = arrive(store, WHOLE)
    reported(store, 1)
    assert asked(store, 1e3) == []
    seal(store, MemoryFiles(WHOLE), [name])
    assert asked(store, 1e3) == [("never", "digest")]


def test_a_complete_checkpoint_waits_for_its_model_but_not_for_ever() -> None:
    store = MemoryStore()
    name = arrive(store, WHOLE)
    assert asked(store, 100 + SEALING - 1, {name: 100.0}) == []
    assert asked(store, 100 + SEALING, {name: 100.0}) == [("never", "digest")]
    seal(store, MemoryFiles(WHOLE), [name])
    assert asked(store, 101, {name: 100.0}) == [("never", "digest")]


def test_damage_is_looked_at_again_when_the_file_was_written_since() -> None:
    store = whole_store()
    name = reported(store, 1, "damaged", "load")
    assert asked(store, 101, {name: 100.0, CONFIG: 99.0}) == []
    assert asked(store, 101, {name: 100.0, CONFIG: 100.5}) == [("changed", "load")]
    store.delete(CONFIG)
    assert asked(store, 101, {name: 100.0}) == []


def test_damage_is_looked_at_again_after_a_while_that_doubles() -> None:
    store = whole_store()
    first = reported(store, 1, "damaged")
    at = {first: 100.0}
    assert asked(store, 99 + RETRY, at) == []
    assert asked(store, 100 + RETRY, at) == [("again", "digest")]
    second = reported(store, 2, "damaged")
    assert asked(store, 100 + RETRY, {**at, second: 100.0}) == []
    assert asked(store, 100 + 2 * RETRY, {**at, second: 100.0}) == [("again", "digest")]


def test_a_repair_that_was_proven_is_proof() -> None:
    store = whole_store()
    reported(store, 1, "damaged")
    name = reported(store, 2)
    assert asked(store, 101, {name: 100.0}) == []


def test_what_is_arriving_is_due_only_for_what_a_listing_shows() -> None:
    store = MemoryStore()
    arrive(store, {"model-00001-of-00002.safetensors": WHOLE["model.safetensors"], "config.json": b"{}"})
    assert asked(store, 1e6) == []
    store.delete(CONFIG)
    assert asked(store, 1e6) == [("never", "stat")]


def test_repairs_come_first_then_the_newest() -> None:
    store = whole_store()
    damaged = reported(store, 1, "damaged")
    other = put(store, replace(manifest(WHOLE), checkpoint="checkpoint-8", place="checkpoint-8", files=()))
    newest = put(store, replace(manifest(WHOLE), checkpoint="checkpoint-9", place="checkpoint-9"))
    for name in WHOLE:
        store.write(f"{RUN}/checkpoint-9/{name}", [WHOLE[name]])
        store.write(f"{RUN}/checkpoint-8/{name}", [WHOLE[name]])
    put(store, replace(manifest(WHOLE), checkpoint="checkpoint-8", place="checkpoint-8", n=1))
    mtimes = {damaged: 100.0, CONFIG: 101.0, other: 5.0, newest: 50.0}
    found = _due(store, 1e6, mtimes)
    assert [(d.place.place, d.why) for d in found] == [
        ("checkpoint-4", "changed"),
        ("checkpoint-9", "never"),
        ("checkpoint-8", "never"),
    ]


def test_what_is_ambiguous_is_not_due() -> None:
    store = whole_store()
    arrive(store, {"notes": b"x"}, "n1", started=10**12, ended=10**12)
    assert asked(store, 1e6) == []
