"""Two heads of other options and other configuration at hand: one model comes of it, and no model
record ever binds bytes that differ.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.head.agreement import Agreement
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.head.schedule import VerifyPolicy
from ckptsync.merge.plan import FORMAT, MergeOptions
from ckptsync.records.io import decode
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store
from ckptsync.stores.memory import MemoryStore
from tests.support.crashing_store import Crash, Dying
from tests.support.filled_stores import DEMO, contents, put, read, send, two_nodes
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


def consolidated(store: Store) -> list[ModelRecord]:
    named = [
        p
        for e in store.names("run/.ckptsync/")
        if (p := parse_record_name(e.name)) and p.kind == "model"
    ]
    found = [decode(str(p), read(store, str(p))) for p in named]
    return [model_record for model_record in found if isinstance(model_record, ModelRecord)]


def check(store: Store) -> None:
    for model_record in consolidated(store):
        for file in model_record.files:
            assert (
                digest(read(store, f"run/consolidated/{model_record.location}/{file.path}"))
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


@pytest.mark.parametrize("is_exclusive", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_two_heads_at_once_make_one_model_in_every_order_of_their_steps(
    seed: int, plain: HeadOptions, *, is_exclusive: bool
) -> None:
    store = Proven()
    two_nodes(store)
    outcomes = raced(
        seed, store, {"a": heading(SHARDED), "b": heading(plain)}, is_exclusive=is_exclusive
    )
    assert all(isinstance(o, tuple | CkptsyncError) for o in outcomes.values()), outcomes
    for options in (SHARDED, plain, SHARDED):
        consolidate_location(store, *LOCATION, options)
    [seen] = read_state(store).readable
    assert (seen.status, len({s.options["dtype"] for s in consolidated(store)})) == (
        "CONSOLIDATED",
        1,
    )
    assert not is_exclusive or [s.n for s in consolidated(store)].count(0) == 1, (
        "of one agreement one model record comes"
    )


def test_whichever_write_a_head_dies_at_the_other_one_ends_what_it_began(
    plain: HeadOptions,
) -> None:
    for lives in itertools.count():
        store = Proven()
        two_nodes(store)
        try:
            consolidate_location(Dying(store, lives), *LOCATION, SHARDED)
        except Crash:
            consolidate_location(store, *LOCATION, plain)
            began = AGREEMENT in contents(store) and json.loads(read(store, AGREEMENT))["dtype"]
            assert [s.options["dtype"] for s in consolidated(store)] == [began]
            assert read_state(store).readable[0].status == "CONSOLIDATED"
        else:
            break
    assert lives > 3 * 8


def test_the_one_that_died_first_of_two_is_no_harm_when_it_is_back(plain: HeadOptions) -> None:
    for lives in itertools.count(0, 4):
        store = Proven()
        two_nodes(store)
        try:
            consolidate_location(Dying(store, lives), *LOCATION, SHARDED)
        except Crash:
            raced(lives, store, {"a": heading(SHARDED), "b": heading(plain)}, is_exclusive=True)
            consolidate_location(store, *LOCATION, SHARDED)
            assert read_state(store).readable[0].status == "CONSOLIDATED"
        else:
            break


def test_a_manifest_that_comes_after_the_agreement_changes_nothing_of_the_weights(
    plain: HeadOptions,
) -> None:
    store = Proven()
    two_nodes(store)
    with pytest.raises(Crash):
        consolidate_location(Dying(store, 10), *LOCATION, plain)
    late = read_state(store).readable[0].manifests[1].manifest
    put(store, replace(late, n=1, files=(replace(late.files[0], path="README.md"),)))
    consolidate_location(store, *LOCATION, SHARDED)
    assert [len(s.manifests) for s in consolidated(store)] == [2]


def test_bytes_in_the_way_that_nothing_binds_are_removed_and_bound_ones_never(
    plain: HeadOptions,
) -> None:
    store = Proven()
    two_nodes(store)
    store.write("run/consolidated/checkpoint-4/model.safetensors", [b"of a head before agreements"])
    consolidate_location(store, *LOCATION, plain)
    assert read_state(store).readable[0].status == "CONSOLIDATED"
    before = contents(store)
    consolidate_location(store, *LOCATION, SHARDED)
    assert contents(store).items() >= before.items(), "configuration is added, and nothing changes"


def test_an_agreement_of_an_older_program_is_followed_by_the_next_and_one_of_a_newer_is_refused(
    plain: HeadOptions,
) -> None:
    for merge in (FORMAT - 1, FORMAT + 1):
        store = Proven()
        two_nodes(store)
        with pytest.raises(Crash):
            consolidate_location(Dying(store, 20), *LOCATION, SHARDED)
        store.write(
            AGREEMENT,
            [read(store, AGREEMENT).replace(b'"merge":%d' % FORMAT, b'"merge":%d' % merge)],
        )
        if merge > FORMAT:
            with pytest.raises(Unsupported, match="newer ckptsync"):
                consolidate_location(store, *LOCATION, plain)
        else:
            consolidate_location(store, *LOCATION, plain)
            assert [(s.n, s.options["dtype"]) for s in consolidated(store)] == [(1, "bf16")]


@pytest.mark.parametrize(
    "data", [b'{"run":"\xff"}', b"[" * 100_000, b" " * ((4 << 20) + 1), b""], ids=len
)
def test_an_agreement_that_cannot_be_read_is_followed_by_the_next(
    plain: HeadOptions, data: bytes
) -> None:
    store = Proven()
    two_nodes(store)
    store.write(AGREEMENT, [data])
    store.write(AGREEMENT.replace("-0.", "-00."), [data])  # no agreement at all
    consolidate_location(store, *LOCATION, plain)
    assert [s.n for s in consolidated(store)] == [1]


def test_a_head_that_was_overtaken_before_the_first_weights_follows(plain: HeadOptions) -> None:
    store = Overtaken(AGREEMENT)
    two_nodes(store)
    consolidate_location(store, *LOCATION, plain)
    assert [s.n for s in consolidated(store)] == [1]


def test_a_head_that_was_overtaken_while_it_merged_writes_no_model_record(
    plain: HeadOptions,
) -> None:
    store = Overtaken(MODEL)
    two_nodes(store)
    with pytest.raises(Incomplete, match="another head has replaced"):
        consolidate_location(store, *LOCATION, plain)
    assert consolidated(store) == []
    consolidate_location(store, *LOCATION, SHARDED)
    assert [s.n for s in consolidated(store)] == [1]


class Overtaken(Proven):
    """When a file gets its name, another head agrees on something else."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().create(name, chunks, about)
        if name == self._at:
            super().create(
                AGREEMENT.replace("-0", "-1"), [read(self, AGREEMENT).replace(b'"n":0', b'"n":1')]
            )


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
                MemoryStore.write(self, other, [read(whole, other)])
            super().create(name, chunks, about)

    store = Recorded()
    two_nodes(store)
    with pytest.raises(Incomplete, match="consolidated by another head"):
        consolidate_location(store, *LOCATION, plain)
    assert read_state(store).readable[0].status == "CONSOLIDATED"


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


def plant(store: Store, files: Mapping[str, bytes], *, of: str = "given", **more: object) -> None:
    """An agreement that gives these files, which lie there."""
    [seen] = read_state(store).readable
    for name, data in files.items():
        with contextlib.suppress(Corrupt):  # no store takes such a name
            store.write(BESIDE + name, [data])
    described = tuple(ModelFile(name, len(data), digest(data)) for name, data in files.items())
    names = tuple(k.name for k in seen.manifests)
    planted = Agreement(*LOCATION, 0, names, "auto", 5_000_000_000, "dcp:pytorch_model_fsdp_0")
    store.write(AGREEMENT, [replace(planted, **{of: described, **more}).encoded()])  # type: ignore[arg-type]


def published(store: Store, options: HeadOptions) -> dict[str, bytes]:
    """What of the model is VERIFIED, once a head and a verifier have done what they do."""
    consolidate_location(store, *LOCATION, options)
    verify_next(store, VerifyPolicy(), time.time())
    seen = read_state(store).of(*LOCATION)
    assert seen
    assert seen.model_record
    assert seen.status == "VERIFIED"
    return {file.path: read(store, BESIDE + file.path) for file in seen.model_record.files}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "model.safetensors",
            "model.safetensors.index.json",
            "trainer_state.json",
            "adapter_config.json",
            "modeling_evil.py",
            "evil.py",
        ),
        *(
            "../../checkpoint-4/config.json",
            "a/config.json",
            "./config.json",
            "CONFIG.json",
            "con\u0301fig.json",
            "c\u03bfnfig.json",
            "",
        ),
    ],
)
def test_an_agreement_gives_only_what_may_stand_beside_a_model(name: str) -> None:
    store = MemoryStore()
    two_nodes(store)
    plant(store, {name: b'{"evil": 1}'})
    made = published(store, HeadOptions())
    assert made.keys() == {"model.safetensors"}
    assert b"evil" not in made["model.safetensors"][:4096]


def test_an_agreement_gives_no_file_twice_and_reads_none_elsewhere() -> None:
    class Reading(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            assert ".." not in name
            super().read_into(name, start, out)

    for name in ("tokenizer.json", "../../../elsewhere/checkpoint-4/config.json"):
        store = Reading()
        two_nodes(store)
        plant(store, {name: b"{}"}, given=(ModelFile(name, 2, digest(b"{}")),) * 2)
        assert published(store, HeadOptions()).keys() == {"model.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_an_agreement_never_replaces_what_the_checkpoint_has(tmp_path: Path, name: str) -> None:
    store = MemoryStore()
    two_nodes_with(store, tmp_path, {name: OWN})
    plant(store, {name: b'{"evil": 1}'})
    assert published(store, BASE)[name] == OWN


@pytest.mark.parametrize("more", [{}, {"of": "code"}, {"allow_code": True}])
def test_an_agreement_brings_no_code_that_the_head_would_not_bring_itself(
    tmp_path: Path, more: dict[str, object]
) -> None:
    for files in (
        {"config.json": EVIL, "modeling_evil.py": CODE},
        {"config.json": EVIL},
        {"modeling_evil.py": CODE},
    ):
        store = MemoryStore()
        two_nodes(store)
        plant(store, files, **more)  # type: ignore[arg-type]
        assert published(store, HeadOptions()).keys() == {"model.safetensors"}
    store = MemoryStore()
    mine = copytree(DEMO / "base", tmp_path / "base")
    (mine / "modeling_mine.py").write_bytes(b"mine")
    two_nodes(store)
    plant(store, {"modeling_mine.py": CODE}, **more)  # type: ignore[arg-type]
    assert (
        published(store, HeadOptions(config_from={"*": str(mine)}))["modeling_mine.py"] == b"mine"
    )


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
    consolidate_location(store, *LOCATION, HeadOptions())
    store.write(CONFIG, [b'{"evil": 1}'])
    with pytest.raises(Incomplete, match="no model record names it") as caught:
        consolidate_location(store, *LOCATION, BASE)
    assert "delete the file" in str(caught.value.hint)
    assert len(consolidated(store)) == 1
    store.delete(CONFIG)
    assert json.loads(published(store, BASE)["config.json"])["model_type"] == "llama"


@pytest.mark.parametrize("at", [AGREEMENT, MODEL])
def test_a_given_file_that_is_replaced_after_it_was_agreed_on_is_never_published(at: str) -> None:
    class Replacing(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            super().create(name, chunks, about)
            if name == at:
                super().write(CONFIG, [read(self, CONFIG).replace(b"llama", b"evil!")])

    store = Replacing()
    two_nodes(store)
    with pytest.raises(Incomplete, match="does not match the checksum in"):
        consolidate_location(store, *LOCATION, BASE)
    assert b"evil" in read(store, CONFIG)
    assert json.loads(published(store, BASE)["config.json"])["model_type"] == "llama"


def test_heads_of_one_configuration_follow_each_others_code_and_others_do_not(
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
                began = AGREEMENT in contents(store)
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
            assert not {"modeling_evil.py"} & published(other, BASE).keys()
            assert [s.n for s in consolidated(other)] == [int(began)]


def test_a_head_that_allows_no_code_does_not_follow_one_that_does_and_is_followed_by_it(
    tmp_path: Path,
) -> None:
    allowing = HeadOptions(MergeOptions(allow_code=True))
    for first, second, numbers in ((allowing, HeadOptions(), [1]), (HeadOptions(), allowing, [0])):
        store = Proven()
        two_nodes_with(
            store, tmp_path / str(numbers), {"config.json": EVIL, "modeling_evil.py": CODE}
        )
        with pytest.raises(Crash):
            consolidate_location(Dying(store, 8), *LOCATION, first)
        assert AGREEMENT in contents(store)
        assert published(store, second).keys() == {"model.safetensors", "config.json"}
        [model_record] = consolidated(store)
        assert ([model_record.n], model_record.left_out, model_record.options["allow_code"]) == (
            numbers,
            ("config.json: auto_map", "modeling_evil.py"),
            "false",
        )
