"""Reading again only what has changed says at every moment what reading all of it says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptsync.catalogue.fresh import fresh
from ckptsync.catalogue.reading import Cache, read
from ckptsync.catalogue.shortened import summary
from ckptsync.catalogue.summary import Summary
from ckptsync.catalogue.units import SETTLED, grouped, key, named, waits
from ckptsync.digest import digest
from ckptsync.model import Demands
from ckptsync.records.coding import encode, record_name
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.names import consolidated_prefix, node_file_name
from ckptsync.records.report import LEVELS, Finding, Report
from ckptsync.records.state import Snapshot
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from tests.filled import FIRST, SECOND, put
from tests.filled import read as content

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
    paths=strategies.lists(strategies.sampled_from(PATHS), min_size=1, unique=True).map(lambda paths: tuple(sorted(paths))),
    body=strategies.sampled_from(BODIES),
    at=strategies.sampled_from((0, 0, 500)),
    missing=strategies.booleans(),
    taken_back=picks,
)


def manifest(sent: Sending, n: int, old: tuple[str, ...]) -> Manifest:
    whole, began = digest(sent.body), FIRST + sent.at * SECOND
    files = tuple(FileEntry(path, len(sent.body), whole, 8, (whole[:32],), began) for path in sent.paths)
    ranks = tuple(rank for rank in (0, 1) if PATHS[rank] in sent.paths)
    demands = Demands(dict.fromkeys(PATHS[:2]), {PATHS[2]: None}, 2)
    base = sent.location.partition("~")[0]
    return Manifest(RUN, base, sent.location, sent.node, n, files, ranks, began, began, demands, (), sent.save, supersedes=old)


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
            self.store.write(node_file_name(RUN, sent.location, sent.node, path) if is_taken else name, [sent.body])

    @precondition(lambda self: bool(fresh(self.store).readable))
    @rule(pick=picks, count=strategies.sampled_from((0, 1, 2, 2)))
    def a_head_model_records(self, pick: int, count: int) -> None:
        seen = self.pick(pick)
        files = tuple(ModelFile(path, 3, digest(b"abc")) for path in ("model.safetensors", "config.json"))
        names = tuple(k.name for k in seen.manifests)
        self.n += 1
        model_record = ModelRecord(RUN, seen.checkpoint, seen.location, self.n, names, {}, files, ())
        data = encode(model_record)
        self.store.write(record_name(model_record, data), [data])
        for file in files[:count]:
            self.store.write(consolidated_prefix(RUN, seen.location) + file.path, [b"abc"])

    @precondition(lambda self: bool(fresh(self.store).readable))
    @rule(pick=picks, level=strategies.sampled_from(LEVELS), verdict=strategies.sampled_from(("ok", "ok", "damaged")))
    def a_verifier_reports(self, pick: int, level: str, verdict: str) -> None:
        seen = self.pick(pick)
        names = tuple(k.name for k in seen.manifests)
        self.n += 1
        findings = (Finding("digest", f"{seen.location}/{PATHS[0]}", "x"),) if verdict == "damaged" else ()
        put(
            self.store,
            Report(RUN, seen.checkpoint, seen.location, self.n, level, verdict, names, seen.model_record_name, 1, findings),  # type: ignore[arg-type]
        )

    @precondition(lambda self: bool(fresh(self.store).readable))
    @rule(pick=picks)
    def it_is_given_up(self, pick: int) -> None:
        seen = self.pick(pick)
        self.n += 1
        put(self.store, Tombstone(RUN, seen.checkpoint, seen.location, self.n, tuple(k.name for k in seen.manifests), "old"))

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

    @precondition(lambda self: any(map(waits, fresh(self.store).readable)))
    @rule(pick=picks)
    def a_file_that_is_waited_for_comes(self, pick: int) -> None:
        lacking = [(n, size) for s in fresh(self.store).readable for n, size in named(s) if s.sizes.get(n) != size]
        if lacking:
            name, size = lacking[pick % len(lacking)]
            self.store.write(name, [b"x" * size])

    def disturb(self, name: str) -> None:
        """Files that were there, and go, or have another size, are the verifier's to find: what was read of them before is forgotten here."""
        if "/.ckptsync/" not in name or "/files/" in name:
            self.cache = Cache()

    @precondition(lambda self: bool(self.names("")))
    @rule(pick=picks)
    def a_record_is_damaged(self, pick: int) -> None:
        there = self.names(".ckptsync")
        if there:
            name = there[pick % len(there)]
            self.store.write(name, [content(self.store, name)[:-1] + b" "])

    def pick(self, pick: int) -> Snapshot:
        there = fresh(self.store).readable
        return there[pick % len(there)]

    @invariant()
    def what_is_remembered_says_what_is_there(self) -> None:
        found, again, everything = read(self.store, self.cache), read(self.store), fresh(self.store)
        assert (found.summaries, found.clock) == (again.summaries, again.clock), "a cache makes no difference"
        faults = [[(f.name, str(f.error)) for f in those] for those in (found.faults, again.faults, everything.faults)]
        assert faults[0] == faults[1] == faults[2]
        assert [s.location for s in found.summaries] == [s.location for s in everything.readable]
        for short, seen in zip(found.summaries, everything.readable, strict=True):
            told = summary(seen, everything.mtimes)
            if short.status == "VERIFIED":
                assert told.status == "VERIFIED" or any(seen.sizes.get(name) != size for name, size in named(seen))
            else:
                assert _said(short) == _said(told)


def _said(short: Summary) -> Summary:
    """Files of what is finished are taken at their records' word; what is lost depends on other locations."""
    short = replace(short, lost=(), awaited=())
    if short.status not in SETTLED:
        return short
    proof = replace(short.proof, changed=0.0)
    return replace(short, size=0, files=0, lacks=(), model=False, resume=False, consolidated=False, proof=proof)


TestCatalogues = Catalogues.TestCase
TestCatalogues.settings = settings(max_examples=30, stateful_step_count=20, deadline=None, phases=(Phase.explicit, Phase.generate))


def test_locations_whose_manifests_decide_together_are_one_unit_and_what_is_being_sent_is_none() -> None:
    names = ["a-1/m", "a-1~x/m", "a-10/m", "a-1/sending/n0", "a-1/files/n0/x"]
    entries = [Entry(f"r/.ckptsync/{name}", 1, 1.0) for name in names]
    found = grouped("r", entries)
    assert {unit: len(its) for unit, its in found.items()} == {("r", "a-1"): 3, ("r", "a-10"): 1}


def test_a_key_is_of_names_sizes_and_times() -> None:
    entry = Entry("a", 1, 1.0)
    others = [replace(entry, name="b"), replace(entry, size=2), replace(entry, mtime=2.0)]
    assert len({key([e]) for e in (entry, *others)} | {key([]), key([entry, entry])}) == 6
