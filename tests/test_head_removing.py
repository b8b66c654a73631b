"""What keeps a head from removing what was marked, at the moment when it would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.catalogue.reading import Cache
from ckptsync.head.marking import Step
from ckptsync.head.metrics import read_manifests
from ckptsync.head.removing import Removal, Road, remove, take_back
from ckptsync.head.tombs import Grave, write
from ckptsync.head.tombs import keep as say_keep
from ckptsync.records.keep import Keep
from ckptsync.records.tombstone import Scope, Stage
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry
from ckptsync.stores.memory import MemoryStore
from tests.retained import FIRST, fill, put

STEP = Step("run", "checkpoint-1", "remove", "location", "old")


class Crossed(MemoryStore):
    """In which somebody else does something right before the next record gets its name.  ``now``: of a clock that jumps while it is listed who else is there."""

    other: Callable[[], object] | None = None
    now = 0.0

    def names(self, prefix: str) -> Iterator[Entry]:
        if prefix == "run/consolidated/.ckptsync/":
            self.now += 61.0
        return super().names(prefix)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        other, self.other = self.other, None
        if other:
            other()
        super().create(name, chunks, about)


def mark(store: MemoryStore, stage: Stage, scope: Scope = "location") -> None:
    (name,) = [e.name for e in store.names("run/.ckptsync/checkpoint-1/") if "/manifest-" in e.name]
    write(store, Grave({name: read_manifests(store, [name])[0]}, scope, "old"), stage)


def marked(*stages: Stage, scope: Scope = "location") -> Crossed:
    """Two that are verified, the first of them marked."""
    store = Crossed()
    fill(store, "checkpoint-1")
    fill(store, "checkpoint-2", FIRST + 3600)
    for stage in stages or ("said",):
        mark(store, stage, scope)
    return store


def removed(store: MemoryStore) -> Removal:
    return remove(store, STEP, Road(Cache()))


def test_it_is_removed() -> None:
    found = removed(marked())
    assert (found.outcome, found.cleared.files) == ("removed", 4)


def test_files_of_the_other_that_have_gone_since_it_was_verified_keep_it() -> None:
    store = marked()
    store.delete("run/checkpoint-2/a.bin")
    assert removed(store) == Removal("waits", "no other checkpoint of the run is verified and not marked")


@pytest.mark.parametrize(("is_last_too", "outcome"), [(False, "waits"), (True, "removed")])
def test_the_shards_of_the_last_that_can_be_resumed_from_stay_unless_all_shall_go(*, is_last_too: bool, outcome: str) -> None:
    store = marked("said", scope="shards")
    store.delete("run/checkpoint-2/trainer_state.json")
    step = replace(STEP, scope="shards", is_last_too=is_last_too)
    assert remove(store, step, Road(Cache())).outcome == outcome
    assert bool([*store.names("run/checkpoint-1/")]) == (not is_last_too)


def test_shards_go_while_a_training_can_be_resumed_from_another() -> None:
    store = marked("said", scope="shards")
    assert remove(store, replace(STEP, scope="shards"), Road(Cache())).outcome == "removed"


def test_a_node_that_sends_keeps_it() -> None:
    store = marked()
    store.write("run/.ckptsync/checkpoint-1/sending/n9", [b"sending\n"])
    assert removed(store).reason == "n9 is sending files of it"


def test_what_came_since_it_was_marked_is_marked_anew() -> None:
    store = marked()
    (name,) = [e.name for e in store.names("run/.ckptsync/checkpoint-1/") if "/manifest-" in e.name]
    put(store, replace(read_manifests(store, [name])[0], n=1))
    assert removed(store).outcome == "marked again"
    assert removed(store).outcome == "removed"


def test_what_was_taken_back_meanwhile_stays() -> None:
    assert removed(marked("said", "back")).reason == "it is not marked any more"


def test_what_another_head_has_begun_is_left_to_it_for_a_while_and_then_done() -> None:
    store = marked("said", "begun")
    assert removed(store).reason == "another head has begun to remove it"
    for _ in range(901):
        store.write("clock", [b""])
    assert removed(store).outcome == "removed"


def test_of_two_heads_that_begin_at_once_neither_takes_back_what_the_other_removes() -> None:
    store = marked()

    def others() -> None:
        mark(store, "begun")
        say_keep(store, Keep("run", "checkpoint-1", "checkpoint-1", 0, keeps=True))

    store.other = others
    assert removed(store).outcome == "waits", "the other has looked before anybody kept it"


def test_what_is_half_removed_is_finished_at_once_whatever_else_holds() -> None:
    store = marked("said", "begun")
    store.delete("run/checkpoint-1/trainer_state.json")
    store.delete("run/checkpoint-2/a.bin")
    assert removed(store).outcome == "removed"


def test_a_model_without_its_model_record_is_half_removed_where_the_shards_had_gone_before() -> None:
    store = marked("said", scope="shards")
    remove(store, replace(STEP, scope="shards"), Road(Cache()))
    for stage in ("said", "begun"):
        mark(store, stage)
    (model_record,) = [e.name for e in store.names("run/.ckptsync/checkpoint-1/") if "/model-" in e.name]
    store.delete("run/consolidated/checkpoint-1/model.safetensors")
    store.delete(model_record)
    store.write("run/.ckptsync/checkpoint-1/sending/n9", [b"sending\n"])
    assert removed(store).outcome == "removed", "nothing of it can be had back, whoever sends another save of its name"


def test_a_head_that_was_held_up_after_its_last_look_looks_again_another_time() -> None:
    clock = itertools.count(0, 61)
    found = remove(marked(), STEP, Road(Cache(), clock=lambda: float(next(clock))))
    assert found.reason == "it took too long to be sure"


def test_a_head_that_was_held_up_by_what_it_lists_before_it_removes_does_not_begin() -> None:
    store = marked()
    found = remove(store, STEP, Road(Cache(), clock=lambda: store.now))
    assert found.reason == "it took too long to be sure"
    assert len([*store.names("run/checkpoint-1/")]) == 3


def test_where_others_words_are_seen_late_they_are_waited_for() -> None:
    store, waited = marked(), []
    store.late = 3.0

    def others(seconds: float) -> None:
        waited.append(seconds)
        write(store, Grave({name: read_manifests(store, [name])[0]}, "location", "by another"), "said")

    (name,) = [e.name for e in store.names("run/.ckptsync/checkpoint-2/") if "/manifest-" in e.name]
    found = remove(store, STEP, Road(Cache(), wait=others))
    assert (found.outcome, waited) == ("taken back", [3.0])


def test_a_damaged_report_keeps_nothing_and_a_damaged_word_to_keep_does() -> None:
    store = marked()
    store.write("run/.ckptsync/checkpoint-1/keep-0-0123456789abcdef.json", [b"{}"])
    assert removed(store).reason == "a record of its name cannot be read"
    store.delete("run/.ckptsync/checkpoint-1/keep-0-0123456789abcdef.json")
    store.write("run/.ckptsync/checkpoint-1/report-9-0123456789abcdef.json", [b"{}"])
    assert removed(store).outcome == "removed"


@pytest.mark.parametrize("lost", ["run/checkpoint-1/a.bin", "run/consolidated/checkpoint-1/model.safetensors"])
def test_what_has_lost_a_file_before_any_removal_began_is_taken_back(lost: str) -> None:
    store = marked()
    store.delete(lost)
    assert take_back(store, STEP, Road(Cache())).outcome == "taken back"
    (seen, _) = fresh(store).locations
    assert seen.status in ("ARRIVING", "COMPLETE"), "it can be repaired again"


def test_a_removal_that_begins_while_somebody_looks_whether_it_has_is_seen() -> None:
    store = marked()
    store.delete("run/checkpoint-1/a.bin")
    found = take_back(store, STEP, Road(Cache(), wait=lambda _: mark(store, "begun")))
    assert found.reason == "its removal has begun"


def test_what_has_lost_a_file_after_a_removal_began_is_not_taken_back() -> None:
    store = marked("said", "begun", "back", "said")
    store.delete("run/checkpoint-1/a.bin")
    assert take_back(store, STEP, Road(Cache())).reason == "it is not whole any more"
    (seen, _) = fresh(store).locations
    assert seen.status == "RETIRED"


class Watched(MemoryStore):
    """In which, after everything that goes, somebody looks whether any record is missed."""

    faults = 0

    def delete(self, name: str) -> None:
        super().delete(name)
        self.faults += len(fresh(self).faults)


def test_no_record_is_missed_while_its_location_is_removed_and_after() -> None:
    store = Watched()
    fill(store, "checkpoint-1")
    fill(store, "checkpoint-2", FIRST + 3600)
    mark(store, "said")
    assert removed(store).outcome == "removed"
    assert store.faults == 0
