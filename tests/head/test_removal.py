"""What keeps a head from removing what was marked, at the moment when it would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete
from ckptsync.head.gc import read_manifests
from ckptsync.head.removal import (
    Removal,
    RemovalOutcome,
    check_alone,
    delete_records,
    files_to_delete,
    plan_removal,
    remove_by_hand,
    write_tombstone,
)
from ckptsync.head.retention import RetentionDecision
from ckptsync.records.io import append_record, decode
from ckptsync.records.manifest import Manifest
from ckptsync.records.save_decisions import Keep, Scope, Stage, Tombstone
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, read_all
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import entry, put
from tests.support.retention_stores import FIRST, fill, manifest_name, mark

DROP = RetentionDecision("run", "checkpoint-1", "drop", "old", "remove")
SHARDS = replace(DROP, scope="shards")


class Crossed(MemoryStore):
    """In which somebody else does something right before the next record gets its name.

    ``now``: of a clock that jumps while the names below ``slow`` are listed.
    """

    other: Callable[[], object] | None = None
    slow = ""
    now = 0.0

    def names(self, prefix: str) -> Iterator[Entry]:
        if prefix == self.slow:
            self.now += 61.0
        return super().names(prefix)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        other, self.other = self.other, None
        if other:
            other()
        super().create(name, chunks, about)


def marked(*stages: Stage, scope: Scope = "location") -> Crossed:
    """Two that are verified, the first of them marked."""
    store = Crossed()
    fill(store, "checkpoint-1")
    fill(store, "checkpoint-2", FIRST + 3600)
    for stage in stages or ("marked",):
        mark(store, "checkpoint-1", stage, scope)
    return store


def removed(store: MemoryStore) -> RemovalOutcome:
    return Removal(store).remove(DROP)


def test_files_of_the_other_that_have_gone_since_it_was_verified_keep_it() -> None:
    store = marked()
    store.delete("run/checkpoint-2/a.bin")
    assert removed(store) == RemovalOutcome(
        "run",
        "checkpoint-1",
        "waits",
        "location",
        "no other checkpoint of the run is verified and not marked",
    )


@pytest.mark.parametrize(("any_shards", "outcome"), [(False, "waits"), (True, "removed")])
def test_the_shards_of_the_last_that_can_be_resumed_from_stay_unless_all_shall_go(
    *, any_shards: bool, outcome: str
) -> None:
    store = marked("marked", scope="shards")
    store.delete("run/checkpoint-2/trainer_state.json")
    decision = replace(SHARDS, any_shards=any_shards)
    assert Removal(store).remove(decision).result == outcome
    assert bool([*store.names("run/checkpoint-1/")]) == (not any_shards)


def test_a_node_that_sends_keeps_it() -> None:
    store = marked()
    store.write("run/.ckptsync/checkpoint-1/sending/n9", [b"sending\n"])
    assert removed(store).reason == "n9 is sending files of it"


def test_what_came_since_it_was_marked_is_marked_anew() -> None:
    store = marked()
    name = manifest_name(store, "checkpoint-1")
    another = Tombstone(*3 * ("run",), 0, (name.replace("-n0-", "-n9-"),), "another save")
    earlier = put(store, replace(another, checkpoint="checkpoint-1", location="checkpoint-1"))
    put(store, replace(read_manifests(store, [name])[name], n=1))
    assert removed(store).result == "marked again"
    assert removed(store).result == "removed"
    (name,) = {e.name for e in store.names("run/.ckptsync/checkpoint-1/")} - {earlier}
    stone = decode(name, read_all(store, name))
    assert isinstance(stone, Tombstone)
    assert (stone.stage, len(stone.manifests)) == ("marked", 2), "by it a node knows its save"


def test_what_was_taken_back_meanwhile_stays() -> None:
    assert removed(marked("marked", "withdrawn")).reason == "it is no longer marked for deletion"


def test_what_another_head_has_begun_is_left_to_it_for_a_while_and_then_done() -> None:
    store = marked("marked", "begun")
    assert removed(store).reason == "another head has begun to remove it"
    for _ in range(901):
        store.write("clock", [b""])
    assert removed(store).result == "removed"


def test_of_two_heads_that_begin_at_once_neither_takes_back_what_the_other_removes() -> None:
    store = marked()

    def others() -> None:
        mark(store, "checkpoint-1", "begun")
        append_record(store, Keep("run", "checkpoint-1", "checkpoint-1", 0, keeps=True))

    store.other = others
    assert removed(store).result == "waits", "the other has looked before anybody kept it"
    store = marked()
    store.other = others
    with pytest.raises(Incomplete, match="not deleted"):
        remove_by_hand(store, plan_removal(store, "run", "checkpoint-1"), "old")


def test_a_conflict_of_its_name_in_another_location_keeps_it() -> None:
    store = marked()
    name = manifest_name(store, "checkpoint-1")
    said = replace(read_manifests(store, [name])[name], location="checkpoint-1~x")
    for node in ("n1", "n2"):
        put(store, replace(said, node=node, files=(entry(node, b""),)))
    assert removed(store).reason == "conflict: two saves have this name"


def test_what_loses_a_file_and_is_kept_while_a_removal_begins_is_not_taken_back() -> None:
    store = marked()

    def others() -> None:
        store.delete("run/checkpoint-1/a.bin")
        append_record(store, Keep("run", "checkpoint-1", "checkpoint-1", 0, keeps=True))

    store.other = others
    assert removed(store).result == "waits"


def test_what_is_half_removed_is_finished_at_once_whatever_else_holds() -> None:
    store = marked("marked", "begun")
    store.delete("run/checkpoint-1/trainer_state.json")
    store.delete("run/checkpoint-2/a.bin")
    assert removed(store).result == "removed"


def test_a_model_without_its_model_record_is_half_removed_where_the_shards_had_gone_before() -> (
    None
):
    store = marked("marked", scope="shards")
    Removal(store).remove(SHARDS)
    for stage in ("marked", "begun"):
        mark(store, "checkpoint-1", stage)
    (model_record,) = [
        e.name for e in store.names("run/.ckptsync/checkpoint-1/") if "/model-" in e.name
    ]
    store.delete("run/consolidated/checkpoint-1/model.safetensors")
    store.delete(model_record)
    store.write("run/.ckptsync/checkpoint-1/sending/n9", [b"sending\n"])
    assert removed(store).result == "removed", (
        "nothing of it can be had back, whoever sends another save of its name"
    )


def test_a_head_that_was_held_up_after_its_last_look_looks_again_another_time() -> None:
    clock = itertools.count(0, 61)
    found = Removal(marked(), clock=lambda: float(next(clock))).remove(DROP)
    assert found.reason == "the last check before deletion took too long"


@pytest.mark.parametrize("slow", ["run/.ckptsync/", "run/consolidated/.ckptsync/"])
def test_a_head_that_was_held_up_by_what_it_lists_before_it_removes_does_not_begin(
    slow: str,
) -> None:
    store = marked()
    store.slow = slow
    found = Removal(store, clock=lambda: store.now).remove(DROP)
    assert found.reason == "the last check before deletion took too long"
    assert len([*store.names("run/checkpoint-1/")]) == 3


def test_where_others_words_are_seen_late_they_are_waited_for() -> None:
    store, waited = marked(), []
    store.late = 3.0

    def others(seconds: float) -> None:
        waited.append(seconds)
        mark(store, "checkpoint-2")

    found = Removal(store, wait=others).remove(DROP)
    assert (found.result, waited) == ("withdrawn", [3.0])


def test_a_damaged_report_keeps_nothing_and_a_damaged_word_to_keep_does() -> None:
    store = marked()
    store.write("run/.ckptsync/checkpoint-1/keep-0-0123456789abcdef.json", [b"{}"])
    assert removed(store).reason == "a record of its name cannot be read"
    store.delete("run/.ckptsync/checkpoint-1/keep-0-0123456789abcdef.json")
    store.write("run/.ckptsync/checkpoint-1/report-9-0123456789abcdef.json", [b"{}"])
    assert removed(store).result == "removed"


@pytest.mark.parametrize(
    "lost", ["run/checkpoint-1/a.bin", "run/consolidated/checkpoint-1/model.safetensors"]
)
def test_what_has_lost_a_file_before_any_removal_began_is_taken_back(lost: str) -> None:
    store = marked()
    store.delete(lost)
    assert Removal(store).withdraw("run", "checkpoint-1", "location", "old").result == "withdrawn"
    (seen, _) = read_state(store).locations
    assert seen.status in ("INCOMPLETE", "COMPLETE"), "it can be repaired again"


def test_a_removal_that_begins_while_somebody_looks_whether_it_has_is_seen() -> None:
    store = marked()
    store.delete("run/checkpoint-1/a.bin")
    found = Removal(store, wait=lambda _: mark(store, "checkpoint-1", "begun")).withdraw(
        "run", "checkpoint-1", "location", "old"
    )
    assert found.reason == "its removal has begun"


def test_what_has_lost_a_file_after_a_removal_began_is_not_taken_back() -> None:
    store = marked("marked", "begun", "withdrawn", "marked")
    store.delete("run/checkpoint-1/a.bin")
    assert (
        Removal(store).withdraw("run", "checkpoint-1", "location", "old").reason
        == "some of its files are already missing"
    )
    (seen, _) = read_state(store).locations
    assert seen.status == "RETIRED"


class Watched(MemoryStore):
    """In which, after everything that goes, somebody looks whether any record is missed."""

    faults = 0

    def delete(self, name: str) -> None:
        super().delete(name)
        self.faults += len(read_state(self).faults)


def test_no_record_is_missed_while_its_location_is_removed_and_after() -> None:
    store = Watched()
    fill(store, "checkpoint-1")
    fill(store, "checkpoint-2", FIRST + 3600)
    mark(store, "checkpoint-1")
    assert removed(store).result == "removed"
    assert store.faults == 0


# What is deleted, in which order, and what a hostile or unlucky name must not take with it.


def manifests(store: MemoryStore) -> dict[str, Manifest]:
    names = [e.name for e in store.names("") if "/manifest-" in e.name]
    return read_manifests(store, names)


def delete_files(store: MemoryStore) -> None:
    for file in files_to_delete(store, "run", "checkpoint-1", "location"):
        store.delete(file.name)


def test_what_opens_it_goes_first_and_the_neighbours_stay() -> None:
    store = MemoryStore()
    for location in ("checkpoint-1", "checkpoint-10", "checkpoint-1~other"):
        fill(store, location)
    store.write("run/consolidated/checkpoint-1/model.safetensors.index.json", [b"{}"])
    order = [
        e.name.removeprefix("run/")
        for e in files_to_delete(store, "run", "checkpoint-1", "location")
    ]
    assert order == [
        "checkpoint-1/trainer_state.json",
        "consolidated/checkpoint-1/model.safetensors.index.json",
        "checkpoint-1/a.bin",
        "checkpoint-1/b.bin",
        "consolidated/checkpoint-1/model.safetensors",
    ]
    delete_files(store)
    assert delete_records(store, "run", "checkpoint-1")
    assert {e.name.split("/")[-2] for e in store.names("run/")} == {
        "checkpoint-10",
        "checkpoint-1~other",
    }


def test_records_stay_while_there_are_files() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1")
    before = [*store.names("")]
    assert not delete_records(store, "run", "checkpoint-1")
    assert [*store.names("")] == before


def test_a_node_that_sends_another_save_of_that_name_is_still_heard() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1")
    store.write("run/.ckptsync/checkpoint-1/sending/n9", [b"sending\n"])
    store.write("run/.ckptsync/checkpoint-1/agreement-0.json", [b"{}"])
    delete_files(store)
    delete_records(store, "run", "checkpoint-1")
    assert [e.name for e in store.names("")] == ["run/.ckptsync/checkpoint-1/sending/n9"]


def test_what_a_manifest_had_taken_back_does_not_come_alive_again() -> None:
    store = MemoryStore()
    old = fill(store, "checkpoint-1~old", is_verified=False)
    (said,) = manifests(store).values()
    foreign = put(store, replace(said, node="n9"))
    middle = put(store, replace(said, location="checkpoint-1~mid", supersedes=(old, foreign)))
    put(store, replace(said, location="checkpoint-1", supersedes=(middle,)))
    assert delete_records(store, "run", "checkpoint-1")
    assert [*manifests(store)] == [foreign], "no node takes back what another said"


@pytest.mark.parametrize(
    ("run", "location", "another"),
    [
        ("run", "checkpoint-1", ("run/checkpoint-1", "checkpoint-7")),
        ("run/checkpoint-1", "checkpoint-7", ("run", "checkpoint-1")),
        ("run", "checkpoint-1", ("run/consolidated", "checkpoint-1")),
        ("run/consolidated", "checkpoint-1", ("run", "checkpoint-1")),
        ("run", "checkpoint-1", ("run/consolidated/checkpoint-1", "x-1")),
    ],
)
def test_runs_that_lie_in_each_other_are_left_alone(
    run: str, location: str, another: tuple[str, str]
) -> None:
    store = MemoryStore()
    fill(store, location, run=run)
    fill(store, another[1], run=another[0])
    before = [*store.names("")]
    with pytest.raises(
        CkptsyncError, match=r"another run|the store itself|not one directory's name"
    ):
        Removal(store).remove(replace(DROP, run=run, location=location))
    assert [*store.names("")] == before


def test_a_run_deep_in_a_location_is_never_deleted_with_it() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1")
    fill(store, "checkpoint-7", run="run/checkpoint-1/sub")
    with pytest.raises(CkptsyncError, match="a run lies in"):
        files_to_delete(store, "run", "checkpoint-1", "location")


@pytest.mark.parametrize("location", ["consolidated", ".ckptsync"])
def test_a_location_with_a_name_of_the_stores_own_is_never_removed(location: str) -> None:
    with pytest.raises(Corrupt, match="the store itself uses"):
        check_alone(MemoryStore(), "run", location)


def test_tombstones_are_numbered_and_know_when_each_nodes_save_ended() -> None:
    store = MemoryStore()
    manifests = read_manifests(store, [fill(store, "checkpoint-1")])
    stages: tuple[Stage, ...] = ("marked", "begun")
    names = [
        write_tombstone(store, manifests, "location", stage, reason="old", metrics={"loss": 1.0})
        for stage in stages
    ]
    records = [decode(name, read_all(store, name)) for name in names]
    stones = [record for record in records if isinstance(record, Tombstone)]
    ended = {"n0": FIRST * 10**9}
    assert [(s.n, s.stage, s.ended, s.metrics) for s in stones] == [
        (0, "marked", ended, {}),
        (1, "begun", ended, {}),
    ]


def test_a_file_that_was_added_after_the_save_is_given_up_with_it() -> None:
    store = MemoryStore()
    [(name, manifest)] = read_manifests(store, [fill(store, "checkpoint-1")]).items()
    added = replace(manifest.files[0], path="added.json", mtime=manifest.ended + 5)
    manifests = {name: replace(manifest, files=(*manifest.files, added))}
    written = write_tombstone(store, manifests, "location", "marked", reason="old")
    tombstone = decode(written, read_all(store, written))
    assert isinstance(tombstone, Tombstone)
    assert tombstone.ended == {"n0": manifest.ended + 5}


def test_two_heads_that_begin_with_the_same_number_write_two_records() -> None:
    store, other = MemoryStore(), MemoryStore()
    manifests = read_manifests(store, [fill(store, "checkpoint-1")])
    for stage, is_same in (("marked", True), ("begun", False)):
        names = [
            write_tombstone(s, manifests, "location", stage, reason="old")  # type: ignore[arg-type]
            for s in (store, other)
        ]
        assert (names[0] == names[1]) == is_same
