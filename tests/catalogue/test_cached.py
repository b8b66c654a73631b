from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptsync.catalogue.cached import (
    UNLISTED,
    Cache,
    awaits_files,
    group_by_checkpoint,
    listing_key,
    read_catalogue,
)
from ckptsync.catalogue.location_summary import Summary, summarize
from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import NotFound, StoreError, Transient
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.report import LEVELS, Level, Report, Verdict, VerifyFinding
from ckptsync.records.save_decisions import Tombstone
from ckptsync.records.store_paths import checkpoint_of, consolidated_prefix, node_file_name
from ckptsync.stores.contract import Entry
from ckptsync.stores.contract import read_all as content
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from tests.support.filled_stores import FIRST, SECOND, contents, flip, put, report_on, two_nodes


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


# Reading again only what has changed says at every moment what reading all of it says.

RUN = "run"
LOCATIONS = ("checkpoint-1", "checkpoint-1~a", "checkpoint-10")
NODES = ("n0", "n1")
PATHS = ("__0_0.distcp", "__1_0.distcp", "config.json")
BODIES = (b"one", b"other")
picks = strategies.integers(0, 1 << 16)


@dataclass(frozen=True)
class Sending:
    location: str
    node: str
    save: str
    paths: tuple[str, ...]
    body: bytes
    at: int
    missing: bool
    taken_back: int


sendings = strategies.builds(
    Sending,
    location=strategies.sampled_from(LOCATIONS),
    node=strategies.sampled_from(NODES),
    save=strategies.sampled_from(("", "s1", "s2")),
    paths=strategies.lists(strategies.sampled_from(PATHS), min_size=1, unique=True).map(
        lambda paths: tuple(sorted(paths))
    ),
    body=strategies.sampled_from(BODIES),
    at=strategies.sampled_from((0, 0, 500)),
    missing=strategies.booleans(),
    taken_back=picks,
)


def manifest(sent: Sending, n: int, old: tuple[str, ...]) -> Manifest:
    whole, began = digest(sent.body), FIRST + sent.at * SECOND
    files = tuple(
        FileEntry(path, len(sent.body), whole, 8, (whole[:32],), began) for path in sent.paths
    )
    ranks = tuple(rank for rank in (0, 1) if PATHS[rank] in sent.paths)
    demands = Demands(dict.fromkeys(PATHS[:2]), {PATHS[2]: None}, 2)
    where = (RUN, checkpoint_of(sent.location), sent.location)
    times_and_rest = (began, began, demands, (), sent.save)
    return Manifest(*where, sent.node, n, files, ranks, *times_and_rest, supersedes=old)


class Catalogues(RuleBasedStateMachine):
    """A store in which records and files come and go, in any order, whole or damaged."""

    @initialize()
    def begin(self) -> None:
        self.store, self.cache, self.n = MemoryStore(), Cache(), 0

    def names(self, part: str) -> list[str]:
        return [e.name for e in self.store.names("") if part in e.name]

    @rule(sent=sendings)
    def a_node_sends(self, sent: Sending) -> None:
        self.n += 1
        mine = self.names(f"manifest-{sent.node}-")
        old = (mine[sent.taken_back % len(mine)],) if mine and sent.taken_back % 3 == 0 else ()
        put(self.store, manifest(sent, self.n, old))
        for path in () if sent.missing else sent.paths:
            name = f"{RUN}/{sent.location}/{path}"
            is_taken = name in self.names(name) and content(self.store, name) != sent.body
            self.store.write(
                node_file_name(RUN, sent.location, sent.node, path) if is_taken else name,
                [sent.body],
            )

    @precondition(lambda self: bool(read_state(self.store).readable))
    @rule(pick=picks, count=strategies.sampled_from((0, 1, 2, 2)))
    def a_head_model_records(self, pick: int, count: int) -> None:
        seen = self.pick(pick)
        files = tuple(
            ModelFile(path, 3, digest(b"abc")) for path in ("model.safetensors", "config.json")
        )
        names = tuple(k.name for k in seen.manifests)
        self.n += 1
        where = (RUN, seen.checkpoint, seen.location)
        put(self.store, ModelRecord(*where, self.n, names, {}, files, ()))
        for file in files[:count]:
            self.store.write(consolidated_prefix(RUN, seen.location) + file.path, [b"abc"])

    @precondition(lambda self: bool(read_state(self.store).readable))
    @rule(
        pick=picks,
        level=strategies.sampled_from(LEVELS),
        verdict=strategies.sampled_from(("ok", "ok", "damaged")),
    )
    def a_verifier_reports(self, pick: int, level: Level, verdict: Verdict) -> None:
        seen = self.pick(pick)
        self.n += 1
        findings = (
            (VerifyFinding("digest", f"{seen.location}/{PATHS[0]}", "x"),)
            if verdict == "damaged"
            else ()
        )
        put(self.store, report_on(seen, self.n, verdict, findings, level))

    @precondition(lambda self: bool(read_state(self.store).readable))
    @rule(pick=picks)
    def it_is_given_up(self, pick: int) -> None:
        seen = self.pick(pick)
        self.n += 1
        names = tuple(k.name for k in seen.manifests)
        put(self.store, Tombstone(RUN, seen.checkpoint, seen.location, self.n, names, "old"))

    @precondition(lambda self: bool(self.names("")))
    @rule(pick=picks)
    def something_goes(self, pick: int) -> None:
        there = self.names("")
        self.disturb(there[pick % len(there)])
        self.store.delete(there[pick % len(there)])

    @precondition(lambda self: bool(self.names("")))
    @rule(pick=picks, body=strategies.sampled_from((*BODIES, b"longer still")))
    def a_file_is_written_over(self, pick: int, body: bytes) -> None:
        there = [name for name in self.names("") if "/.ckptsync/" not in name]
        if there:
            self.disturb(there[pick % len(there)])
            self.store.write(there[pick % len(there)], [body])

    @precondition(lambda self: any(map(awaits_files, read_state(self.store).readable)))
    @rule(pick=picks)
    def a_file_that_is_waited_for_comes(self, pick: int) -> None:
        lacking = [
            (n, size)
            for s in read_state(self.store).readable
            for n, size in s.named_files().items()
            if s.sizes.get(n) != size
        ]
        if lacking:
            name, size = lacking[pick % len(lacking)]
            self.store.write(name, [b"x" * size])

    def disturb(self, name: str) -> None:
        """Files that were there, and go, or have another size, are the verifier's to find: what was
        read of them before is forgotten here.
        """
        if "/.ckptsync/" not in name or "/files/" in name:
            self.cache = Cache()

    @precondition(lambda self: bool(self.names("")))
    @rule(pick=picks)
    def a_record_is_damaged(self, pick: int) -> None:
        there = self.names(".ckptsync")
        if there:
            name = there[pick % len(there)]
            self.store.write(name, [content(self.store, name)[:-1] + b" "])

    def pick(self, pick: int) -> LocationState:
        there = read_state(self.store).readable
        return there[pick % len(there)]

    @invariant()
    def what_is_remembered_says_what_is_there(self) -> None:
        found, again, everything = (
            read_catalogue(self.store, self.cache),
            read_catalogue(self.store),
            read_state(self.store),
        )
        assert (found.summaries, found.clock) == (
            again.summaries,
            again.clock,
        ), "a cache makes no difference"
        faults = [
            [(f.name, str(f.error)) for f in those]
            for those in (found.faults, again.faults, everything.faults)
        ]
        assert faults[0] == faults[1] == faults[2]
        assert [s.location for s in found.summaries] == [s.location for s in everything.readable]
        for short, seen in zip(found.summaries, everything.readable, strict=True):
            told = summarize(seen, everything.mtimes)
            if short.status == "VERIFIED":
                assert told.status == "VERIFIED" or any(
                    seen.sizes.get(name) != size for name, size in seen.named_files().items()
                )
            else:
                assert _said(short) == _said(told)


def _said(short: Summary) -> Summary:
    """Files of what is finished are taken at their records' word.

    What is lost depends on other locations.
    """
    short = replace(short, missing_lines=(), awaited_nodes=())
    if short.status not in UNLISTED:
        return short
    proof = replace(short.proof, rewritten_at=0.0)
    return replace(
        short,
        size=0,
        files=0,
        lacks=(),
        model=False,
        resume=False,
        consolidated=False,
        proof=proof,
        suspects=(),
    )


TestCatalogues = Catalogues.TestCase
TestCatalogues.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, phases=(Phase.explicit, Phase.generate)
)


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
