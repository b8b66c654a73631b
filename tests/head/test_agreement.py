"""Heads of one configuration make one model together; a head of another configuration stops, or
replaces what a dead head left.  No model record ever binds bytes that differ.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import Incomplete
from ckptsync.head.agreement import IDLE, agree
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.io import read_records
from ckptsync.records.location_status import record_names
from ckptsync.records.model_record import ModelRecord
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, StoreWrapper, read_all
from ckptsync.stores.memory import MemoryStore
from tests.support.crashing_store import Crash, Dying
from tests.support.exhaustive import EVERY_OTHER, sampled
from tests.support.filled_stores import DEMO, contents, newer, send, two_nodes
from tests.support.head_in_process import verify_next
from tests.support.interleaving import raced

LOCATION = ("run", "checkpoint-4")
AGREEMENT = "run/.ckptsync/checkpoint-4/agreement-0.json"
MODEL = "run/consolidated/checkpoint-4/model.safetensors"
CONFIG = "run/consolidated/checkpoint-4/config.json"
SHARDED = HeadOptions(MergeOptions("fp32", 9_000), {"run": str(DEMO / "base")})


class Proven(MemoryStore):
    """Whatever happens to it, every model record in it binds the bytes that are there."""

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().write(name, chunks, about)
        check(self)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().create(name, chunks, about)
        check(self)

    def delete(self, name: str) -> None:
        super().delete(name)
        check(self)


def pass_time(store: MemoryStore) -> None:
    """Whoever wrote by now is taken to be dead."""
    store._clock = itertools.count(next(store._clock) + int(IDLE))


def consolidated(store: Store) -> list[ModelRecord]:
    """Return all model records, also those that do not count."""
    parsed = record_names(e.name for e in store.names("run/.ckptsync/")).values()
    records, _ = read_records(store, (p for p in parsed if p.kind == "model"))
    return [record for record in records.values() if isinstance(record, ModelRecord)]


def consolidated_name(store: Store) -> str:
    return read_state(store).readable[0].model_record_name


def check(store: Store) -> None:
    for model_record in consolidated(store):
        for file in model_record.files:
            assert (
                digest(read_all(store, f"run/consolidated/{model_record.location}/{file.path}"))
                == file.digest
            ), file.path


@pytest.fixture
def plain(tmp_path: Path) -> HeadOptions:
    """The other head's: one file, another dtype, and a configuration that differs."""
    config = json.loads((DEMO / "base/config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return HeadOptions(MergeOptions("bf16"), {"run": str(tmp_path)})


def heading(options: HeadOptions) -> Callable[[Store], object]:
    def work(store: Store) -> object:
        return consolidate_location(store, *LOCATION, options)

    return work


def model_of(store: Store) -> dict[str, bytes]:
    """Return the files of the model's directory."""
    return {n: data for n, data in contents(store).items() if n.startswith("run/consolidated/")}


def made_alone(options: HeadOptions) -> dict[str, bytes]:
    store = MemoryStore()
    two_nodes(store)
    consolidate_location(store, *LOCATION, options)
    return model_of(store)


@pytest.mark.parametrize("is_exclusive", [True, False])
@pytest.mark.parametrize("seed", sampled(range(16), every=2))
def test_two_heads_of_one_configuration_make_one_model_in_every_order_of_their_steps(
    seed: int, *, is_exclusive: bool
) -> None:
    store = Proven()
    two_nodes(store)
    heads = {"a": heading(SHARDED), "b": heading(SHARDED)}
    outcomes = raced(seed, store, heads, is_exclusive=is_exclusive)
    assert all(isinstance(outcome, tuple) for outcome in outcomes.values()), outcomes
    assert model_of(store) == made_alone(SHARDED)
    assert [record.n for record in consolidated(store)] == [0]
    assert read_state(store).readable[0].status == "CONSOLIDATED"


@pytest.mark.parametrize("seed", sampled(range(16), every=2))
def test_of_two_heads_with_different_options_one_wins_and_the_other_says_so(
    seed: int, plain: HeadOptions
) -> None:
    store = Proven()
    two_nodes(store)
    heads = {"a": heading(SHARDED), "b": heading(plain)}
    outcomes = raced(seed, store, heads, is_exclusive=True)
    errors = {head: e for head, e in outcomes.items() if not isinstance(e, tuple)}
    for error in errors.values():
        assert isinstance(error, Incomplete)
        assert f"{AGREEMENT}: another head, with other options" in str(error)
        assert "give all heads one configuration" in str(error.hint)
    assert len(errors) < 2
    [record] = consolidated(store)
    options = SHARDED if record.options["dtype"] == "fp32" else plain
    assert not errors.keys() & {"a" if options is SHARDED else "b"}, "the winner has no error"
    assert model_of(store) == made_alone(options)


@pytest.mark.parametrize("seed", sampled(range(32), every=2))
def test_where_no_name_can_be_created_exclusively_the_model_is_still_of_one_configuration(
    seed: int, plain: HeadOptions
) -> None:
    store = Proven()
    two_nodes(store)
    heads = {"a": heading(SHARDED), "b": heading(plain)}
    outcomes = raced(seed, store, heads, is_exclusive=False)
    assert all(isinstance(o, tuple | Incomplete) for o in outcomes.values()), outcomes
    pass_time(store)
    consolidate_location(store, *LOCATION, plain)
    [record] = consolidated(store)
    options = SHARDED if record.options["dtype"] == "fp32" else plain
    assert model_of(store).items() >= made_alone(options).items(), "the rest nothing binds"


def test_whichever_write_a_head_dies_at_it_goes_on_and_writes_no_file_again() -> None:
    for lives in itertools.count(0, EVERY_OTHER):
        store = Proven()
        two_nodes(store)
        try:
            consolidate_location(Dying(store, lives), *LOCATION, SHARDED)
        except Crash:
            before = {entry.name: entry.mtime for entry in store.names("run/")}
            consolidate_location(store, *LOCATION, SHARDED)
            after = {entry.name: entry.mtime for entry in store.names("run/")}
            assert after.items() >= before.items()
            assert model_of(store) == made_alone(SHARDED)
            assert [record.n for record in consolidated(store)] == [0]
        else:
            break
    assert lives > 3 * 8


def test_whichever_write_a_head_dies_at_one_with_other_options_waits_and_makes_its_own_model(
    plain: HeadOptions,
) -> None:
    for first, second in ((SHARDED, plain), (plain, SHARDED)):
        for lives in itertools.count(0, EVERY_OTHER):
            store = Proven()
            two_nodes(store)
            try:
                consolidate_location(Dying(store, lives), *LOCATION, first)
            except Crash:
                has_begun = AGREEMENT in contents(store)
                if has_begun and not consolidated(store):
                    before = contents(store)
                    with pytest.raises(Incomplete, match="another head, with other options"):
                        consolidate_location(store, *LOCATION, second)
                    assert model_of(store).items() <= before.items()
                    pass_time(store)
                is_made = bool(consolidated(store))
                consolidate_location(store, *LOCATION, second)
                if is_made:  # the second adds its configuration
                    assert model_of(store).items() >= made_alone(first).items()
                    continue
                assert model_of(store) == made_alone(second)
                assert [record.n for record in consolidated(store)] == [int(has_begun)]
            else:
                break
        assert lives >= 3 * 4


def test_a_head_that_was_overtaken_deletes_nothing_and_its_model_never_counts(
    plain: HeadOptions,
) -> None:
    """It slept for long at each of its writes in turn, while another head made the model."""
    same_names = replace(plain, merge=MergeOptions("fp16"))
    for own, is_after, at in itertools.product((SHARDED, same_names), (False, True), range(1, 12)):
        store = Overtaken(at, plain, is_after=is_after)
        two_nodes(store)
        store.is_awake = True
        error = None
        try:
            consolidate_location(store, *LOCATION, own)
        except Incomplete as e:
            error = e
        if store.is_awake:
            assert at > 3
            continue
        assert model_of(store).items() >= made_alone(plain).items()
        assert len(model_of(store)) <= len(made_alone(plain)) + 1, "what it was writing"
        [seen] = read_state(store).readable
        assert (seen.status, seen.model_record_name) == ("CONSOLIDATED", store.winner)
        assert error or store.is_recorded, "it slept before its record, which a higher number beats"


class Overtaken(MemoryStore):
    """Before or after its ``at``-th new file another head comes, and makes the model."""

    def __init__(self, at: int, other: HeadOptions, *, is_after: bool) -> None:
        super().__init__()
        self._at, self._other, self._is_after = at, other, is_after
        self.is_awake = self.is_recorded = False
        self.winner = ""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        is_record = "/model-0-" in name
        if not self.is_awake or (is_record and self._is_after):
            super().create(name, chunks, about)
            return
        self._at -= 1
        if self._is_after:
            super().create(name, chunks, about)
        if not self._at:
            self.is_awake, self.is_recorded = False, is_record
            pass_time(self)
            [made] = consolidate_location(self, *LOCATION, self._other)
            self.winner = made.model_record
        if not self._is_after:
            super().create(name, chunks, about)


def test_a_head_that_was_overtaken_while_it_lists_records_deletes_no_file_of_the_other(
    plain: HeadOptions,
) -> None:
    """The other one dies before its record, so no record protects its files."""
    for at in itertools.count(1):
        store = OvertakenAtListing(at, plain)
        two_nodes(store)
        store.write(MODEL, [b"of a head before agreements"])
        store.is_awake = True
        with contextlib.suppress(Incomplete):
            consolidate_location(store, *LOCATION, SHARDED)
        if store.is_awake:
            break
        assert contents(store).items() >= store.made.items()
    assert at > 8


class OvertakenAtListing(MemoryStore):
    """At its ``at``-th listing of records another head, much later, makes the model's files."""

    def __init__(self, at: int, other: HeadOptions) -> None:
        super().__init__()
        self._at, self._other, self.is_awake = at, other, False
        self.made: dict[str, bytes] = {}

    def names(self, prefix: str) -> Iterator[Entry]:
        if self.is_awake and prefix == "run/.ckptsync/checkpoint-4/":
            self._at -= 1
            if not self._at:
                self.is_awake = False
                pass_time(self)
                with contextlib.suppress(Unrecorded):
                    consolidate_location(WithoutRecord(self), *LOCATION, self._other)
                self.made = model_of(self) if not consolidated(self) else {}
        return super().names(prefix)


class Unrecorded(Exception):
    """A head died before its model record."""


class WithoutRecord(StoreWrapper):
    """A store in which a head dies before its model record."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if "/model-" in name and name.startswith("run/.ckptsync/"):
            raise Unrecorded
        super().create(name, chunks, about)


def test_bytes_in_the_way_that_nothing_binds_are_removed_and_bound_ones_never(
    plain: HeadOptions,
) -> None:
    store = Proven()
    two_nodes(store)
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        store.write(BESIDE + name, [b"of a head before agreements"])
    consolidate_location(store, *LOCATION, plain)
    assert model_of(store) == made_alone(plain)
    before = contents(store)
    consolidate_location(store, *LOCATION, SHARDED)
    assert contents(store).items() >= before.items(), "configuration is added, and nothing changes"


@pytest.mark.parametrize(
    "data",
    [
        b'{"run":"\xff"}',
        b"[" * 100_000,
        b" " * ((4 << 20) + 1),
        b"",
        b'{"allow_code":false,"code":[],"config":"","dtype":"fp16","format":1,"given":[],"merge":9}',
    ],
    ids=len,
)
def test_an_agreement_of_other_bytes_or_of_an_older_program_is_followed_by_the_next_number(
    plain: HeadOptions, data: bytes
) -> None:
    store = Proven()
    two_nodes(store)
    store.write(AGREEMENT, [data])
    store.write(AGREEMENT.replace("-0.", "-00."), [data])  # no agreement at all
    with pytest.raises(Incomplete, match="another head"):
        consolidate_location(store, *LOCATION, plain)
    pass_time(store)
    store.write(MODEL, [b"of a head that still writes"])
    with pytest.raises(Incomplete, match="another head"):
        consolidate_location(store, *LOCATION, plain)
    pass_time(store)
    consolidate_location(store, *LOCATION, plain)
    assert [s.n for s in consolidated(store)] == [1]
    assert model_of(store) == made_alone(plain)


def test_what_a_head_without_agreements_records_meanwhile_is_never_removed(
    plain: HeadOptions,
) -> None:
    whole = MemoryStore()
    two_nodes(whole)
    consolidate_location(whole, *LOCATION, HeadOptions(MergeOptions("fp16")))
    made = [
        e.name for e in whole.names("run/") if "/consolidated/" in e.name or "/model-" in e.name
    ]

    class Recorded(Proven):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            for other in made if name == MODEL else ():
                MemoryStore.write(self, other, [read_all(whole, other)])
            super().create(name, chunks, about)

    store = Recorded()
    two_nodes(store)
    with pytest.raises(Incomplete, match="consolidated by another head"):
        consolidate_location(store, *LOCATION, plain)
    assert read_state(store).readable[0].status == "CONSOLIDATED"


def test_a_head_that_comes_when_another_has_just_finished_begins_nothing(
    plain: HeadOptions,
) -> None:
    """Else it would write its files beside the other model, and nobody would name them."""
    store = Proven()
    two_nodes(store)
    seen = read_state(store).readable[0]
    consolidate_location(store, *LOCATION, plain)
    before = contents(store)
    with pytest.raises(Incomplete, match="consolidated by another head meanwhile"):
        agree(store, seen, {"options": {}})
    assert contents(store) == before
    store.delete(consolidated_name(store))
    newer(store, "model", "checkpoint-4")
    with pytest.raises(Incomplete, match="consolidated by another head meanwhile"):
        agree(store, seen, {"options": {}})


def test_of_two_heads_that_agree_at_once_the_second_begins_nothing() -> None:
    class Crossed(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            super().write(name, [b"{}"])
            super().create(name, chunks, about)

    store = Crossed()
    two_nodes(store)
    with pytest.raises(Incomplete, match="has begun to write this model"):
        agree(store, read_state(store).readable[0], {"options": {}})


def test_a_damaged_model_record_is_made_again_as_it_was_whatever_the_options(
    plain: HeadOptions,
) -> None:
    for options in (SHARDED, plain, HeadOptions()):
        store = MemoryStore()
        two_nodes(store)
        [made] = consolidate_location(store, *LOCATION, SHARDED)
        before = contents(store)
        store.write(made.model_record, [b"{}"])
        if options is SHARDED:
            store.write(CONFIG, [before[CONFIG].replace(b"llama", b"evils")])
        consolidate_location(store, *LOCATION, options)
        assert contents(store) == before


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, None], ids=["cut", "deep", "later"])
def test_without_its_agreement_a_damaged_model_record_is_made_by_the_options_of_now(
    plain: HeadOptions, data: bytes | None
) -> None:
    store = MemoryStore()
    two_nodes(store)
    [made] = consolidate_location(store, *LOCATION, SHARDED)
    store.write(made.model_record, [b"{}"])
    if data is None:  # another head has begun the next model, and died
        store.write(AGREEMENT.replace("-0.", "-1."), [read_all(store, AGREEMENT)])
        pass_time(store)
    else:
        store.write(AGREEMENT, [data])
    consolidate_location(store, *LOCATION, plain)
    assert model_of(store) == made_alone(plain)


def test_two_heads_that_add_configuration_bind_the_one_that_lies_there(plain: HeadOptions) -> None:
    for seed in range(15):
        store = Proven()
        two_nodes(store)
        consolidate_location(store, *LOCATION, HeadOptions())
        raced(
            seed,
            store,
            {"a": heading(replace(SHARDED, merge=MergeOptions())), "b": heading(plain)},
            is_exclusive=True,
        )
        assert CONFIG in contents(store)
        assert any("config.json" in {f.path for f in s.files} for s in consolidated(store))


def test_a_head_with_other_configuration_at_hand_repairs_what_the_first_has_consolidated(
    plain: HeadOptions,
) -> None:
    for first, other in ((SHARDED, plain), (plain, SHARDED)):
        store = MemoryStore()
        two_nodes(store)
        consolidate_location(store, *LOCATION, first)
        before = contents(store)
        for name in [
            name
            for name in before
            if name.startswith("run/consolidated/") and name.endswith(".safetensors")
        ]:
            store.delete(name)
        assert read_state(store).readable[0].status == "COMPLETE"
        consolidate_location(store, *LOCATION, other)
        assert {name: contents(store)[name] for name in before} == before


# What somebody may try who can write to the store: a policy of S3 keeps a worker's key from it
# (`tests/test_s3_policies.py`), a path nobody.

BESIDE = "run/consolidated/checkpoint-4/"
OWN = (DEMO / "base/config.json").read_bytes()
EVIL = json.dumps(
    json.loads(OWN) | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
).encode()
CODE = b"print('evil')"
BASE = HeadOptions(config_from={"*": str(DEMO / "base")})


def two_nodes_with(store: Store, tmp_path: Path, files: Mapping[str, bytes]) -> None:
    """The demo's checkpoint, to which its first node adds files."""
    own = copytree(DEMO / "fsdp2/node0/checkpoint-4", tmp_path / "own")
    for name, data in files.items():
        (own / name).write_bytes(data)
    send(store, own, "node0")
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1")


def published(store: Store, options: HeadOptions) -> dict[str, bytes]:
    """What of the model is VERIFIED, once a head and a verifier have done what they do."""
    consolidate_location(store, *LOCATION, options)
    verify_next(store, VerifyPolicy(), time.time())
    seen = read_state(store).of(*LOCATION)
    assert seen
    assert seen.model_record
    assert seen.status == "VERIFIED"
    return {file.path: read_all(store, BESIDE + file.path) for file in seen.model_record.files}


def test_what_lies_beside_a_model_is_never_taken_up() -> None:
    store = Proven()
    two_nodes(store)
    for name in ("config.json", "tokenizer.json"):
        store.write(BESIDE + name, [b'{"evil": 1}'])
    made = published(store, BASE)
    assert {name: data for name, data in made.items() if b"evil" in data} == {}
    assert made["tokenizer.json"] == (DEMO / "base/tokenizer.json").read_bytes()


def test_what_lies_beside_a_model_is_not_taken_up_later_either() -> None:
    store = Proven()
    two_nodes(store)
    two_nodes(store, location="checkpoint-5")
    for location in ("checkpoint-4", "checkpoint-5"):
        consolidate_location(store, "run", location, HeadOptions())
    store.write(CONFIG, [b'{"evil": 1}'])
    with pytest.raises(Incomplete, match="no model record names it") as caught:
        consolidate_location(store, "run", "", BASE)
    assert "delete the file" in str(caught.value.hint)
    assert [record.location for record in consolidated(store)].count("checkpoint-4") == 1
    assert "run/consolidated/checkpoint-5/config.json" in contents(store), "it stops no other"
    for name in contents(store):
        if "checkpoint-5" in name or name == CONFIG:
            store.delete(name)
    assert json.loads(published(store, BASE)["config.json"])["model_type"] == "llama"


def test_heads_of_one_configuration_bring_its_code_whichever_write_one_dies_at(
    tmp_path: Path,
) -> None:
    mine = copytree(DEMO / "base", tmp_path / "base")
    (mine / "config.json").write_bytes(EVIL)
    (mine / "modeling_evil.py").write_bytes(CODE)
    coding = HeadOptions(config_from={"*": str(mine)})
    for lives in itertools.count(0, 3):
        for own in ({}, {"config.json": EVIL.replace(b"modeling_evil", b"modeling_other")}):
            store = Proven()
            two_nodes_with(store, tmp_path / f"{lives}{len(own)}", own)
            try:
                consolidate_location(Dying(store, lives), *LOCATION, coding)
            except Crash:
                made = published(store, coding)
                assert json.loads(made["config.json"])["auto_map"] == {
                    "AutoModelForCausalLM": "modeling_evil.Evil"
                }
                assert made["modeling_evil.py"] == CODE
                assert [s.n for s in consolidated(store)] == [0]
            else:
                assert lives > 9
                return
            other = Proven()
            two_nodes_with(other, tmp_path / f"{lives}{len(own)}o", own)
            with pytest.raises(Crash):
                consolidate_location(Dying(other, lives), *LOCATION, coding)
            if not consolidated(other):
                pass_time(other)
                assert not {"modeling_evil.py"} & published(other, BASE).keys()


def test_a_head_that_allows_no_code_makes_none_of_what_one_that_does_has_begun(
    tmp_path: Path,
) -> None:
    allowing = HeadOptions(MergeOptions(allow_code=True))
    store = Proven()
    files = {"config.json": EVIL, "modeling_evil.py": CODE}
    two_nodes_with(store, tmp_path, files)
    with pytest.raises(Crash):
        consolidate_location(Dying(store, 8), *LOCATION, allowing)
    assert AGREEMENT in contents(store)
    pass_time(store)
    assert published(store, HeadOptions()).keys() == {"model.safetensors", "config.json"}
    [record] = consolidated(store)
    assert record.left_out == ("config.json: auto_map", "modeling_evil.py")
    assert record.options["allow_code"] == "false"


def test_code_of_a_damaged_model_record_does_not_come_back_without_the_operator(
    tmp_path: Path,
) -> None:
    """Whoever can write to the store can damage a record and write an agreement."""
    files = {"config.json": EVIL, "modeling_evil.py": CODE}
    own = copytree(DEMO / "base", tmp_path / "base")
    for name, data in files.items():
        (own / name).write_bytes(data)
    cases = {
        "own": HeadOptions(MergeOptions(allow_code=True)),
        "": HeadOptions(config_from={"*": str(own)}),
    }
    for sent, options in cases.items():
        store = MemoryStore()
        two_nodes_with(store, tmp_path / f"{sent}sent", files if sent else {})
        assert files.keys() <= published(store, options).keys()
        store.write(consolidated_name(store), [b"{}"])
        consolidate_location(store, *LOCATION, HeadOptions())
        (seen,) = read_state(store).readable
        assert seen.model_record
        assert not {"modeling_evil.py"} & {file.path for file in seen.model_record.files}
