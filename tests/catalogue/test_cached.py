from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from ckptsync.catalogue.cached import (
    Cache,
    group_by_checkpoint,
    listing_key,
    read_catalogue,
)
from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import NotFound, StoreError, Transient
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.contract import Entry
from ckptsync.stores.contract import read_all as content
from ckptsync.stores.memory import MemoryStore
from tests.support import store_listing
from tests.support.filled_stores import contents, flip, put, report_on, two_nodes


class Counting(MemoryStore):
    """Counts what is listed and read."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: Counter[str] = Counter()
        self.read: Counter[str] = Counter()

    def names(self, prefix: str) -> Iterator[Entry]:
        self.listed[prefix] += 1
        return super().names(prefix)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.read[name] += 1
        super().read_into(name, start, out)

    def forget(self) -> None:
        self.listed.clear()
        self.read.clear()


def prove(store: MemoryStore, location: str = "checkpoint-4") -> None:
    """Model record it, with no files, and report that all is well."""
    seen = read_state(store).of("run", location)
    assert seen
    put(
        store,
        ModelRecord(
            "run", location, location, 0, tuple(k.name for k in seen.manifests), {}, (), ()
        ),
    )
    consolidated = read_state(store).of("run", location)
    assert consolidated
    put(store, report_on(consolidated, 1, "ok"))


def words(store: MemoryStore, cache: Cache) -> list[str]:
    return [s.status for s in read_catalogue(store, cache).summaries]


def test_locations_are_in_the_order_that_people_read() -> None:
    store = MemoryStore()
    for location in ("checkpoint-10", "checkpoint-9"):
        two_nodes(store, location=location)
    found = read_catalogue(store, Cache())
    assert [s.location for s in found.summaries] == ["checkpoint-9", "checkpoint-10"]
    assert found.clock == max(e.mtime for e in store.names(""))


def test_what_has_not_changed_is_neither_read_nor_listed_again_but_for_the_names_of_records() -> (
    None
):
    store, cache = Counting(), Cache()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    prove(store)
    store.forget()
    assert words(store, cache) == ["VERIFIED", "COMPLETE"]
    assert all(count == 1 and "/.ckptsync/" in name for name, count in store.read.items()), (
        "each record once, and no file"
    )
    store.forget()
    assert words(store, cache) == ["VERIFIED", "COMPLETE"]
    assert (store.read, set(store.listed)) == (Counter(), {"run/.ckptsync/"})


def test_a_record_more_reads_its_own_checkpoint_again_and_no_other() -> None:
    store, cache = Counting(), Cache()
    for location in ("checkpoint-4", "checkpoint-5"):
        two_nodes(store, location=location)
    read_catalogue(store, cache)
    store.forget()
    prove(store, "checkpoint-5")
    assert words(store, cache) == ["COMPLETE", "VERIFIED"]
    store.forget()
    assert words(store, cache) == ["COMPLETE", "VERIFIED"]
    assert store.read == Counter()


def test_a_file_that_is_waited_for_is_seen_when_it_comes() -> None:
    store, cache = Counting(), Cache()
    two_nodes(store)
    name = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
    data = content(store, name)
    store.delete(name)
    assert words(store, cache) == ["INCOMPLETE"]
    store.forget()
    assert words(store, cache) == ["INCOMPLETE"]
    assert store.read == Counter()
    store.write(name, [data])
    two_nodes(store, "zero3", "checkpoint-5")  # beside it
    assert words(store, cache) == ["COMPLETE", "COMPLETE"]


def test_a_file_that_is_mended_in_a_damaged_location_is_seen() -> None:
    store, cache = MemoryStore(), Cache()
    two_nodes(store)
    name = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
    found = VerifyFinding("digest", name.removeprefix("run/"), "x")
    put(
        store,
        Report("run", "checkpoint-4", "checkpoint-4", 1, "digest", "damaged", (), "", 0, (found,)),
    )
    (before,) = read_catalogue(store, cache).summaries
    store.write(name, [content(store, name)])
    (after,) = read_catalogue(store, cache).summaries
    assert (before.status, after.status) == ("DAMAGED", "DAMAGED")
    assert after.proof.rewritten_at > max(before.proof.rewritten_at, after.proof.damaged_at)


def test_a_record_that_could_not_be_read_is_looked_at_again() -> None:
    store, cache = MemoryStore(), Cache()
    two_nodes(store)
    name = next(name for name in contents(store) if "manifest-node1" in name)
    data = content(store, name)
    flip(store, name)
    found = read_catalogue(store, cache)
    assert (found.summaries, [f.name for f in found.faults]) == ((), [name])
    store.write(name, [data])
    assert (words(store, cache), read_catalogue(store, cache).faults) == (["COMPLETE"], ())


def test_a_record_that_is_listed_and_cannot_be_seen_yet_is_looked_for_again() -> None:
    class Late(MemoryStore):
        """As NFS may be: the listing is ahead of the file."""

        unseen = "manifest-node1"

        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if self.unseen and self.unseen in name:
                raise NotFound(name)
            super().read_into(name, start, out)

    store, cache = Late(), Cache()
    two_nodes(store)
    seen = [words(store, cache)]
    store.unseen = ""
    seen.append(words(store, cache))
    assert seen == [["INCOMPLETE"], ["COMPLETE"]]


def test_one_run_is_read_alone_and_the_others_are_not_forgotten() -> None:
    store, cache = Counting(), Cache()
    two_nodes(store)
    put(store, Tombstone("other", "checkpoint-1", "checkpoint-1", 0, (), "old"))
    everything = read_catalogue(store, cache)
    assert read_catalogue(store, cache, "run").summaries == everything.summaries
    assert read_catalogue(store, cache, "nowhere").summaries == ()
    store.forget()
    assert read_catalogue(store, cache) == everything
    assert store.read == Counter()


def test_what_was_deleted_is_forgotten() -> None:
    store, cache = MemoryStore(), Cache()
    two_nodes(store)
    read_catalogue(store, cache)
    for name in contents(store):
        store.delete(name)
    assert (words(store, cache), cache.runs, cache.is_new) == ([], {}, True)


def test_what_was_deleted_after_a_reading_that_failed_is_forgotten() -> None:
    class Silent(MemoryStore):
        is_silent = False

        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if self.is_silent and "checkpoint-5" in name:
                raise StoreError("no answer")
            super().read_into(name, start, out)

    store, cache = Silent(), Cache()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    store.is_silent = True
    with pytest.raises(StoreError):
        read_catalogue(store, cache)
    assert cache.runs["run"].checkpoints.keys() == {"checkpoint-4"}
    store.is_silent = False
    for name in contents(store):
        store.delete(name)
    two_nodes(store, location="checkpoint-6")
    assert [s.location for s in read_catalogue(store, cache, "run").summaries] == ["checkpoint-6"]
    for name in contents(store):
        store.delete(name)
    assert read_catalogue(store, cache, "run").summaries == ()


def test_a_store_that_does_not_answer_is_an_error_and_what_was_known_stays_known() -> None:
    class Silent(Counting):
        is_silent = False

        def names(self, prefix: str) -> Iterator[Entry]:
            if self.is_silent:
                raise StoreError("no route to host")
            return super().names(prefix)

    store, cache = Silent(), Cache()
    two_nodes(store)
    read_catalogue(store, cache)
    store.is_silent = True
    with pytest.raises(StoreError):
        read_catalogue(store, cache)
    store.is_silent = False
    store.forget()
    assert words(store, cache) == ["COMPLETE"]
    assert store.read == Counter()


def test_what_was_read_before_an_error_is_not_read_again() -> None:
    class Breaks(Counting):
        left = 5

        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if self.left == 0:
                raise StoreError("the line is dead")
            self.left -= 1
            super().read_into(name, start, out)

    store, cache, tries = Breaks(), Cache(), 0
    for n in range(12):
        two_nodes(store, location=f"checkpoint-{n}")
    while tries < 20:
        tries, store.left = tries + 1, 5
        try:
            assert len(read_catalogue(store, cache).summaries) == 12
        except StoreError:
            continue
        break
    assert 5 <= tries < 20


def test_no_garbage_is_looked_for_while_names_are_listed_and_after_an_error_it_is_again() -> None:
    class Fails(MemoryStore):
        def dirs(self, prefix: str, start: str = "") -> list[str]:
            return ["run"]

        def names(self, prefix: str) -> Iterator[Entry]:
            seen.append(gc.isenabled())
            raise Transient(prefix)

    seen: list[bool] = []
    with pytest.raises(Transient):
        read_catalogue(Fails())
    assert (seen, gc.isenabled()) == ([False], True)


def test_while_files_and_records_come_and_records_go_a_cache_says_what_reading_anew_says() -> None:
    whole, store, cache = contents(store_listing.store()), MemoryStore(), Cache()

    def compare() -> None:
        cached, anew = read_catalogue(store, cache), read_catalogue(store)
        assert (cached.summaries, cached.clock) == (anew.summaries, anew.clock)
        assert [fault.text for fault in cached.faults] == [fault.text for fault in anew.faults]

    for name, data in whole.items():
        store.write(name, [data])
        compare()
    records = [name for name in whole if "/.ckptsync/" in name]
    for name in records:
        store.write(name, [b"damaged"])
        compare()
    for name in records:
        store.delete(name)
        compare()


def test_a_manifest_that_is_gone_is_a_fault_each_time() -> None:
    store, cache = MemoryStore(), Cache()
    two_nodes(store)
    put(store, report_on(read_state(store).locations[0], 1, "ok"))
    gone = next(name for name in contents(store) if "manifest-node1" in name)
    store.delete(gone)
    for _ in range(2):
        assert [fault.name for fault in read_catalogue(store, cache).faults] == [gone]


def test_locations_whose_manifests_decide_together_are_one_unit_and_uploads_are_none() -> None:
    names = ["a-1/m", "a-1~x/m", "a-10/m", "a-1/sending/n0", "a-1/files/n0/x"]
    entries = [Entry(f"r/.ckptsync/{name}", 1, 1.0) for name in names]
    found = group_by_checkpoint("r", entries)
    assert {unit: len(its) for unit, its in found.items()} == {("r", "a-1"): 3, ("r", "a-10"): 1}


def test_a_key_is_of_names_sizes_and_times() -> None:
    entry = Entry("a", 1, 1.0)
    others = [Entry("b", 1, 1.0), Entry("a", 2, 1.0), Entry("a", 1, 2.0)]
    assert (
        len(
            {listing_key([e]) for e in (entry, *others)}
            | {listing_key([]), listing_key([entry, entry])}
        )
        == 6
    )
