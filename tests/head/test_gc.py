"""Retention on a real store: what is marked, waits, is taken back or removed.

By heads that die, and beside other heads.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import Proven, Summary
from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import Corrupt, Incomplete, StoreError
from ckptsync.head.gc import (
    RetentionRequest,
    RetentionResult,
    TrainerMetrics,
    apply_retention,
    parse_metrics,
    plan_retention,
    read_manifests,
)
from ckptsync.head.removal import LEASE, keep, write_tombstone
from ckptsync.head.retention_rules import Best, Rules
from ckptsync.records.event_record import EventRecord
from ckptsync.records.io import create_record
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, StoreWrapper
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.verifier.verification import VerifyOptions, verify_location
from tests.support.crashing_store import Crash, Dying
from tests.support.exhaustive import EVERY_OTHER
from tests.support.filled_stores import entry, put
from tests.support.retention_stores import FIRST, fill, mark
from tests.support.retention_stores import seen as a_summary

HOUR = 3600


def request(rules: Rules, grace: float = 0.0, run: str = "") -> RetentionRequest:
    return RetentionRequest(lambda _: rules, grace, run)


def filled(count: int = 3) -> MemoryStore:
    store = MemoryStore()
    for n in range(1, count + 1):
        fill(store, f"checkpoint-{n}", FIRST + n * HOUR, loss=float(n))
    return store


def wait(store: Store, seconds: float) -> None:
    """On this store's clock, which counts writes."""
    for _ in range(int(seconds) + 1):
        store.write("clock", [b""])


def words(store: Store) -> dict[str, str]:
    return {s.location: s.status for s in read_state(store).locations}


def outcomes(found: RetentionResult) -> list[tuple[str, str]]:
    assert found.failed == ()
    return [(d.location, d.result) for d in found.done]


def names(store: Store, location: str) -> list[str]:
    return [e.name for e in store.names("") if location in e.name.split("/")]


def test_what_no_rule_keeps_is_marked_and_removed_after_its_grace() -> None:
    store = filled()
    two = request(Rules(keep_last=2), grace=40.0)  # this store's clock counts writes
    assert outcomes(apply_retention(store, two)) == [("checkpoint-1", "marked")]
    assert words(store) == {
        "checkpoint-1": "RETIRED",
        "checkpoint-2": "VERIFIED",
        "checkpoint-3": "VERIFIED",
    }
    assert outcomes(apply_retention(store, two)) == []
    wait(store, 40)
    sizes: list[int] = []
    (outcome,) = apply_retention(store, two, progress=sizes.append).done
    assert outcome.size == sum(sizes) > 0
    assert (outcome.result, outcome.files, outcome.reason) == (
        "removed",
        4,
        "not one of the newest 2",
    )
    assert [n.rpartition("/")[2].partition("-")[0] for n in names(store, "checkpoint-1")] == [
        "tombstone"
    ]
    assert words(store) == {"checkpoint-2": "VERIFIED", "checkpoint-3": "VERIFIED"}
    assert outcomes(apply_retention(store, two)) == []


def test_a_head_that_is_asked_for_nothing_undoes_nothing_and_finishes_what_is_half_removed() -> (
    None
):
    store = filled()
    mark(store, "checkpoint-1")
    assert outcomes(apply_retention(store, request(Rules()))) == []
    mark(store, "checkpoint-1", "begun")
    store.delete("run/checkpoint-1/a.bin")
    assert outcomes(apply_retention(store, request(Rules()))) == [("checkpoint-1", "removed")]


def test_a_plan_writes_nothing() -> None:
    store = filled()
    before = [*store.names("")]
    found = plan_retention(store, request(Rules(keep_last=1)), now=FIRST)
    assert [
        (p.decision.location, p.decision.action, p.files)
        for p in found.planned
        if p.decision.action != "nothing"
    ] == [
        ("checkpoint-2", "mark", 4),
        ("checkpoint-1", "mark", 4),
    ]
    assert [*store.names("")] == before


def test_damaged_metrics_keep_what_they_would_have_spoken_of() -> None:
    store = filled()
    store.write("run/checkpoint-2/trainer_state.json", [b'{"log_history": []}'])
    assert (
        outcomes(apply_retention(store, request(Rules(keep_best=Best("eval_loss", 1)), 99.0))) == []
    )


def test_a_run_that_cannot_be_judged_stops_no_other() -> None:
    class Broken(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if name.startswith("other/") and name.endswith("trainer_state.json"):
                raise StoreError(f"{name}: no answer")
            super().read_into(name, start, out)

    store = Broken()
    for run in ("other", "run"):
        for n in (1, 2, 3):
            fill(store, f"checkpoint-{n}", FIRST + n * HOUR, run=run, loss=float(n))
    result = apply_retention(store, request(Rules(keep_best=Best("eval_loss", 1)), 99.0))
    assert [failed.run for failed in result.failed] == ["other"]
    assert [(d.run, d.location) for d in result.done] == [("run", "checkpoint-2")]


def test_a_damaged_event_keeps_what_it_may_have_measured_to_be_the_best() -> None:
    store = filled()
    names = {}
    for location, accuracy in (("checkpoint-1", 0.9), ("checkpoint-2", 0.5)):
        key = ("run", location, location, 0, "eval", "0" * 16, "verified", "")
        record = EventRecord(*key, outcome="done", metrics={"acc": accuracy})
        names[location], _ = create_record(store, record)
    best = request(Rules(keep_best=Best("acc", 1, is_greatest=True)), 99.0)
    store.write(names["checkpoint-1"], [b"{}"])
    assert outcomes(apply_retention(store, best)) == []
    store.delete(names["checkpoint-1"])
    assert outcomes(apply_retention(store, best)) == [("checkpoint-1", "marked")]


@pytest.mark.parametrize("late", ["arrived", "merged", "verified", ""])
def test_an_event_may_still_measure_what_came_after_the_last_that_it_measured(late: str) -> None:
    times = {"arrived": 1.0, "merged": 1.0, "verified": 1.0, late: 9.0}
    proof = Proven(holds=True, first=times["verified"])
    arrived, merged = times["arrived"], times["merged"]
    last = a_summary(1, manifests=(), arrived=arrived, merged=merged, proof=proof)
    measured = a_summary(2, at=5.0, metrics=(("acc", 0.9),))
    values = TrainerMetrics(MemoryStore()).values([last, measured], "acc")
    assert values == {"checkpoint-2": 0.9, **({"checkpoint-1": None} if late else {})}


def test_shards_go_while_the_model_stays_verified_and_cannot_be_resumed_from() -> None:
    store = filled()
    rule = request(Rules(shards=1))
    assert outcomes(apply_retention(store, rule)) == [
        ("checkpoint-2", "marked"),
        ("checkpoint-1", "marked"),
    ]
    assert outcomes(apply_retention(store, rule)) == [
        ("checkpoint-2", "removed"),
        ("checkpoint-1", "removed"),
    ]
    seen = read_state(store).of("run", "checkpoint-1")
    assert seen is not None
    assert seen.status == "VERIFIED"
    assert not seen.conditions.resume.holds
    assert "deleted" in seen.conditions.resume.evidence[0]
    assert [n for n in names(store, "checkpoint-1") if ".ckptsync" not in n] == [
        "run/consolidated/checkpoint-1/model.safetensors"
    ]
    report = verify_location(store, seen, VerifyOptions("digest"))
    assert (report.verdict, [f.kind for f in report.findings]) == (
        "ok",
        ["note"],
    ), "nothing is missing that was deleted"
    assert outcomes(apply_retention(store, rule)) == []


def test_a_marked_location_of_which_only_the_shards_shall_go_comes_back_first() -> None:
    store = filled()
    assert outcomes(apply_retention(store, request(Rules(keep_last=2), 1e6))) == [
        ("checkpoint-1", "marked")
    ]
    (back,) = apply_retention(store, request(Rules(keep_last=3, shards=2), 1e6)).done
    assert (back.location, back.result, back.scope) == ("checkpoint-1", "withdrawn", "location")
    assert words(store)["checkpoint-1"] == "VERIFIED"


@pytest.mark.parametrize(("newest", "left"), [(0, 0), (1, 1)])
def test_drop_after_0_lets_the_shards_of_all_go_and_no_other_number_does(
    newest: int, left: int
) -> None:
    store = filled(2)
    for _ in range(3):
        apply_retention(store, request(Rules(shards=newest)))
    assert (
        len(
            {
                e.name.split("/")[1]
                for e in store.names("run/")
                if e.name.startswith("run/checkpoint-")
            }
        )
        == left
    )


def test_what_is_left_is_proven_by_its_model_record_alone() -> None:
    store = MemoryStore()
    name = fill(store, "checkpoint-1")
    first = read_manifests(store, [name])[name]
    late = put(
        store,
        replace(first, node="n1", files=(entry("rng_state_1.pth", b"r", first.ended),), ranks=(1,)),
    )
    store.write("run/checkpoint-1/rng_state_1.pth", [b"r"])
    assert words(store) == {"checkpoint-1": "CONSOLIDATED"}, "nobody has verified what came later"
    write_tombstone(store, read_manifests(store, [name, late]), "shards", "marked", reason="old")
    assert words(store) == {"checkpoint-1": "VERIFIED"}


def test_the_best_are_known_after_their_shards_have_gone() -> None:
    store = filled()
    for _ in range(2):
        apply_retention(store, request(Rules(shards=0)))
    best = request(Rules(keep_best=Best("eval_loss", 1)), 99.0)
    assert outcomes(apply_retention(store, best)) == [("checkpoint-2", "marked")]


@pytest.mark.parametrize("rules", [Rules(keep_last=1), Rules(shards=1)])
def test_a_head_that_dies_anywhere_leaves_what_the_next_one_finishes(rules: Rules) -> None:
    """Everything that could be open is whole, or given up.

    And where the next ends, there is no trace of the death.
    """
    clean = filled(2)
    for _ in range(3):
        apply_retention(clean, request(rules))
    for lives in itertools.count(0, EVERY_OTHER):
        store = filled(2)
        dying = Dying(store, lives)
        try:
            for _ in range(3):
                apply_retention(dying, request(rules))
        except Crash:
            _check_whole_or_given_up(store)
        else:
            assert lives > 20
            break
        for _ in range(4):
            _patient(store, rules)
        assert _without_tombstones(store) == _without_tombstones(clean), lives


@pytest.mark.parametrize("rules", [Rules(keep_last=1), Rules(shards=1)])
def test_directories_that_a_dead_head_left_empty_go_with_what_it_had_begun(
    tmp_path: Path, rules: Rules
) -> None:
    store = create_store(str(tmp_path / "store"))
    for n in (1, 2):
        fill(store, f"checkpoint-{n}", FIRST + n * HOUR)
    apply_retention(store, request(rules))
    gone = tmp_path / "store/run/checkpoint-1"
    mark(store, "checkpoint-1", "begun", "location" if rules.keep_last else "shards")
    for path in gone.iterdir():  # and then it died, before it removed the directory
        path.unlink()
    assert outcomes(apply_retention(store, request(rules))) == [("checkpoint-1", "removed")]
    assert sorted(path.name for path in gone.parent.iterdir()) == [
        ".ckptsync",
        "checkpoint-2",
        "consolidated",
    ]


def _patient(store: MemoryStore, rules: Rules) -> None:
    """After the dead head's lease."""
    wait(store, LEASE)
    apply_retention(store, request(rules))


def _check_whole_or_given_up(store: Store) -> None:
    for seen in read_state(store).locations:
        if seen.status != "RETIRED":
            assert seen.status == "VERIFIED", (seen.location, seen.evidence)
            assert seen.conditions.resume.holds or seen.conditions.shards
    assert words(store)["checkpoint-2"] == "VERIFIED"


def _without_tombstones(store: Store) -> list[str]:
    return [e.name for e in store.names("run/") if "tombstone" not in e.name]


def test_two_heads_that_marked_each_others_last_one_remove_neither_and_the_newest_comes_back() -> (
    None
):
    store = filled(2)
    for location in ("checkpoint-1", "checkpoint-2"):
        mark(store, location)
    assert outcomes(apply_retention(store, request(Rules(keep_last=1)))) == [
        ("checkpoint-2", "withdrawn"),
        ("checkpoint-1", "removed"),
    ]
    assert words(store) == {"checkpoint-2": "VERIFIED"}


class Meeting(StoreWrapper):
    """A store in front of which, before the ``n``-th call, somebody else does something."""

    def __init__(self, store: Store, n: int, other: Callable[[], object]) -> None:
        super().__init__(store)
        self._n, self._other, self._lock = n, other, threading.Lock()
        self.was_met = False

    def names(self, prefix: str) -> Iterator[Entry]:
        self._call()
        yield from list(self.inner.names(prefix))

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        self._call()
        return self.inner.dirs(prefix, start)

    def size(self, name: str) -> int:
        self._call()
        return self.inner.size(name)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._call()
        self.inner.write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._call()
        self.inner.create(name, chunks, about)

    def delete(self, name: str) -> None:
        self._call()
        self.inner.delete(name)

    def _call(self) -> None:
        with self._lock:  # a catalogue asks from several threads
            self._n -= 1
            is_now = self._n == 0
        if is_now:
            self.was_met = True
            self._other()


OLDEST = Rules(keep_best=Best("eval_loss", 1))
VIEWS = [(Rules(keep_last=1), OLDEST), (OLDEST, Rules(keep_last=1))]


@pytest.mark.parametrize(("mine", "others"), VIEWS)
def test_two_heads_with_other_rules_and_no_grace_never_remove_the_last_or_half_of_one(
    mine: Rules, others: Rules
) -> None:
    """At every call of the one the other does all it would."""
    for n in itertools.count(1, 2):
        store = filled(2)
        for location in ("checkpoint-1", "checkpoint-2"):
            mark(store, location)
        meeting = Meeting(
            store,
            n,
            lambda store=store: [apply_retention(store, request(others)) for _ in range(3)],  # type: ignore[misc]
        )
        apply_retention(meeting, request(mine))
        if not meeting.was_met:
            break
        found = words(store)
        assert "VERIFIED" in found.values(), n
        assert set(found.values()) <= {"VERIFIED", "RETIRED"}, n
        wait(store, LEASE)
        apply_retention(store, request(mine))
        assert "VERIFIED" in words(store).values(), n


def test_a_person_who_keeps_it_at_any_moment_keeps_it_or_is_told_that_it_is_too_late() -> None:
    told = []
    for n in itertools.count(1):
        store = filled(2)
        mark(store, "checkpoint-1")
        answers: list[bool] = []
        meeting = Meeting(
            store,
            n,
            lambda store=store, answers=answers: answers.append(keep_by_hand(store)),  # type: ignore[misc]
        )
        apply_retention(meeting, request(Rules(keep_last=1)))
        if not meeting.was_met:
            break
        told += answers
        if answers == [True]:
            for _ in range(2):
                apply_retention(store, request(Rules(keep_last=1)))
            assert words(store)["checkpoint-1"] == "VERIFIED", n
        assert set(words(store).values()) <= {"VERIFIED", "RETIRED"}
    assert set(told) == {True, False}


def keep_by_hand(store: Store) -> bool:
    try:
        keep(store, "run", "checkpoint-1", "for the paper")
    except Incomplete:
        return False
    return True


def test_a_cache_of_an_earlier_time_changes_nothing() -> None:
    store, cache = filled(4), Cache()
    for n in range(2):  # one location a call
        done = apply_retention(store, request(Rules(keep_last=2)), cache, is_over=lambda: True).done
        assert len(done) == 1, n
    for _ in range(3):
        apply_retention(store, request(Rules(keep_last=2)), cache)
    assert words(store) == {"checkpoint-3": "VERIFIED", "checkpoint-4": "VERIFIED"}


# What a trainer measured, read from its own file, and from nothing that is not what its node sent.

HISTORY = [
    {"step": 10, "loss": 3.0},
    {"step": 10, "eval_loss": 2.5},
    {"step": 20, "loss": 1.0},
    {"step": 20, "eval_loss": float("nan")},
]


def test_the_last_value_up_to_its_step_counts() -> None:
    data = json.dumps({"log_history": HISTORY}).encode()
    assert parse_metrics(data, 10) == {"eval_loss": 2.5, "loss": 3.0, "step": 10.0}
    assert parse_metrics(data, 20)["loss"] == 1.0
    assert parse_metrics(data, 20)["eval_loss"] == 2.5, "what is no number says nothing"
    assert parse_metrics(data, None)["loss"] == 1.0


HUGE = b'{"log_history": [{"step": 1, "loss": %s}]}' % (b"9" * 400)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"log_history": [3]}',
        b'{"log_history": 3}',
        b"[" * 100_000,
        b"\xff",
        HUGE,
    ],
)
def test_what_is_no_trainers_state_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_metrics(data, 1)


def summary(store: MemoryStore) -> Summary:
    (found,) = read_catalogue(store).summaries
    return found


def test_bytes_that_are_not_what_the_node_sent_say_nothing() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1", loss=2.0)
    assert TrainerMetrics(store).values([summary(store)], "eval_loss") == {"checkpoint-1": 2.0}
    assert TrainerMetrics(store).values([summary(store)], "eval_accuracy") == {}
    store.write(
        "run/checkpoint-1/trainer_state.json", [b'{"log_history": [{"step": 1, "eval_loss": 0.1}]}']
    )
    assert TrainerMetrics(store).values([summary(store)], "eval_loss") == {"checkpoint-1": None}
