"""Two heads of other options and other configuration at hand: one model comes of it, and no seal ever binds bytes that differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Incomplete, Unsupported
from ckptsync.head.consolidate import HeadOptions, one
from ckptsync.merge.plan import FORMAT, Options
from ckptsync.records.coding import decode_any
from ckptsync.records.names import parse_record_name
from ckptsync.records.seal import Seal
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store
from ckptsync.stores.memory import MemoryStore
from tests.dying import Crash, Dying
from tests.filled import DEMO, contents, put, read, two_nodes
from tests.interleaved import raced

PLACE = ("run", "checkpoint-4")
AGREEMENT = "run/.ckptsync/checkpoint-4/agreement-0.json"
MODEL = "run/consolidated/checkpoint-4/model.safetensors"
CONFIG = "run/consolidated/checkpoint-4/config.json"
SHARDED = HeadOptions(Options("fp32", 9_000), {"run": str(DEMO / "base")})


class Proven(MemoryStore):
    """Whatever happens to it, every seal in it binds the bytes that are there."""

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().write(name, chunks, about)
        check(self)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().create(name, chunks, about)
        check(self)

    def delete(self, name: str) -> None:
        super().delete(name)
        check(self)


def sealed(store: Store) -> list[Seal]:
    named = [p for e in store.names("run/.ckptsync/") if (p := parse_record_name(e.name)) and p.kind == "seal"]
    found = [decode_any(p, read(store, str(p))) for p in named]
    return [seal for seal in found if isinstance(seal, Seal)]


def check(store: Store) -> None:
    for seal in sealed(store):
        for file in seal.files:
            assert digest(read(store, f"run/consolidated/{seal.place}/{file.path}")) == file.digest, file.path


@pytest.fixture
def plain(tmp_path: Path) -> HeadOptions:
    """The other head's: one file, another dtype, and a configuration that differs."""
    config = json.loads((DEMO / "base/config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return HeadOptions(Options("bf16"), {"run": str(tmp_path)})


def heading(options: HeadOptions) -> Callable[[Store], object]:
    def work(store: Store) -> object:
        return one(store, *PLACE, options)

    return work


@pytest.mark.parametrize("is_exclusive", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_two_heads_at_once_make_one_model_in_every_order_of_their_steps(
    seed: int, plain: HeadOptions, *, is_exclusive: bool
) -> None:
    store = Proven()
    two_nodes(store)
    outcomes = raced(seed, store, {"a": heading(SHARDED), "b": heading(plain)}, is_exclusive=is_exclusive)
    assert all(isinstance(o, tuple | CkptsyncError) for o in outcomes.values()), outcomes
    for options in (SHARDED, plain, SHARDED):
        one(store, *PLACE, options)
    [seen] = fresh(store).readable
    assert (seen.word, len({s.options["dtype"] for s in sealed(store)})) == ("CONSOLIDATED", 1)
    assert not is_exclusive or [s.n for s in sealed(store)].count(0) == 1, "of one agreement one seal comes"


def test_whichever_write_a_head_dies_at_the_other_one_ends_what_it_began(plain: HeadOptions) -> None:
    for lives in itertools.count():
        store = Proven()
        two_nodes(store)
        try:
            one(Dying(store, lives), *PLACE, SHARDED)
        except Crash:
            one(store, *PLACE, plain)
            began = AGREEMENT in contents(store) and json.loads(read(store, AGREEMENT))["dtype"]
            assert [s.options["dtype"] for s in sealed(store)] == [began]
            assert fresh(store).readable[0].word == "CONSOLIDATED"
        else:
            break
    assert lives > 3 * 8


def test_the_one_that_died_first_of_two_is_no_harm_when_it_is_back(plain: HeadOptions) -> None:
    for lives in itertools.count(0, 4):
        store = Proven()
        two_nodes(store)
        try:
            one(Dying(store, lives), *PLACE, SHARDED)
        except Crash:
            raced(lives, store, {"a": heading(SHARDED), "b": heading(plain)}, is_exclusive=True)
            one(store, *PLACE, SHARDED)
            assert fresh(store).readable[0].word == "CONSOLIDATED"
        else:
            break


def test_a_manifest_that_comes_after_the_agreement_changes_nothing_of_the_weights(plain: HeadOptions) -> None:
    store = Proven()
    two_nodes(store)
    with pytest.raises(Crash):
        one(Dying(store, 10), *PLACE, plain)
    late = fresh(store).readable[0].manifests[1].manifest
    put(store, replace(late, n=1, files=(replace(late.files[0], path="README.md"),)))
    one(store, *PLACE, SHARDED)
    assert [len(s.manifests) for s in sealed(store)] == [2]


def test_bytes_in_the_way_that_nothing_binds_are_removed_and_bound_ones_never(plain: HeadOptions) -> None:
    store = Proven()
    two_nodes(store)
    store.write("run/consolidated/checkpoint-4/model.safetensors", [b"of a head before agreements"])
    one(store, *PLACE, plain)
    assert fresh(store).readable[0].word == "CONSOLIDATED"
    before = contents(store)
    one(store, *PLACE, SHARDED)
    assert contents(store).items() >= before.items(), "configuration is added, and nothing changes"


def test_an_agreement_of_an_older_program_is_followed_by_the_next_and_one_of_a_newer_is_refused(plain: HeadOptions) -> None:
    for merge in (FORMAT - 1, FORMAT + 1):
        store = Proven()
        two_nodes(store)
        with pytest.raises(Crash):
            one(Dying(store, 20), *PLACE, SHARDED)
        store.write(AGREEMENT, [read(store, AGREEMENT).replace(b'"merge":%d' % FORMAT, b'"merge":%d' % merge)])
        if merge > FORMAT:
            with pytest.raises(Unsupported, match="newer program"):
                one(store, *PLACE, plain)
        else:
            one(store, *PLACE, plain)
            assert [(s.n, s.options["dtype"]) for s in sealed(store)] == [(1, "bf16")]


def test_a_head_that_was_overtaken_before_the_first_weights_follows(plain: HeadOptions) -> None:
    store = Overtaken(AGREEMENT)
    two_nodes(store)
    one(store, *PLACE, plain)
    assert [s.n for s in sealed(store)] == [1]


def test_a_head_that_was_overtaken_while_it_merged_does_not_seal(plain: HeadOptions) -> None:
    store = Overtaken(MODEL)
    two_nodes(store)
    with pytest.raises(Incomplete, match="overtaken by another head"):
        one(store, *PLACE, plain)
    assert sealed(store) == []
    one(store, *PLACE, SHARDED)
    assert [s.n for s in sealed(store)] == [1]


class Overtaken(Proven):
    """When a file gets its name, another head agrees on something else."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().create(name, chunks, about)
        if name == self._at:
            super().create(AGREEMENT.replace("-0", "-1"), [read(self, AGREEMENT).replace(b'"n":0', b'"n":1')])


def test_what_a_head_before_agreements_seals_meanwhile_is_never_removed(plain: HeadOptions) -> None:
    whole = MemoryStore()
    two_nodes(whole)
    one(whole, *PLACE, HeadOptions(Options("fp16")))
    made = [e.name for e in whole.names("run/") if "/consolidated/" in e.name or "/seal-" in e.name]

    class Sealed(Proven):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            for other in made if name == MODEL else ():
                MemoryStore.write(self, other, [read(whole, other)])
            super().create(name, chunks, about)

    store = Sealed()
    two_nodes(store)
    with pytest.raises(Incomplete, match="sealed by another head"):
        one(store, *PLACE, plain)
    assert fresh(store).readable[0].word == "CONSOLIDATED"


def test_two_heads_that_add_configuration_bind_the_one_that_lies_there(plain: HeadOptions) -> None:
    for seed in range(15):
        store = Proven()
        two_nodes(store)
        one(store, *PLACE, HeadOptions())
        raced(seed, store, {"a": heading(replace(SHARDED, merge=Options())), "b": heading(plain)}, is_exclusive=True)
        assert CONFIG in contents(store)
        assert any("config.json" in {f.path for f in s.files} for s in sealed(store))


def test_a_head_with_other_configuration_at_hand_mends_what_the_first_has_sealed(plain: HeadOptions) -> None:
    for first, other in ((SHARDED, plain), (plain, SHARDED)):
        store = MemoryStore()
        two_nodes(store)
        one(store, *PLACE, first)
        before = contents(store)
        for name in [name for name in before if name.startswith("run/consolidated/") and name.endswith(".safetensors")]:
            store.delete(name)
        assert fresh(store).readable[0].word == "COMPLETE"
        one(store, *PLACE, other)
        assert {name: contents(store)[name] for name in before} == before
