"""The files to download: all of a checkpoint, those that one node needs, or the model.

And no unsafe names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import Checker, digest, digested_ranges
from ckptsync.downloader.download_plan import model_digests, plan_checkpoint, plan_model, pointers
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.records.location_status import LocationState
from ckptsync.records.model_record import ModelFile
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from tests.support.filled_stores import put
from tests.support.verified_stores import LOCATION, RUN, arrive, manifest, whole_store

NODES = {
    "n0": {
        "fsdp/meta.json": b"meta",
        "fsdp/__0_0.distcp": b"00",
        "rng_state_0.pth": b"r0",
        "args.bin": b"zero",
    },
    "n1": {"fsdp/__1_0.distcp": b"11", "rng_state_1.pth": b"r1", "args.bin": b"one"},
}


def two_nodes(change: Callable[[bytes], bytes] = bytes) -> MemoryStore:
    store = MemoryStore()
    for node, files in NODES.items():
        arrive(store, {path: change(data) for path, data in files.items()}, node, demands=Demands())
    return store


def seen(store: MemoryStore) -> LocationState:
    return read_state(store, RUN).locations[0]


def contents(store: MemoryStore, node: str = "") -> dict[str, bytes]:
    return {f.under: read_all(store, f.name) for f in plan_checkpoint(seen(store), node).files}


def test_all_files_are_planned_under_their_own_names_and_other_copies_are_named() -> None:
    store = two_nodes()
    assert contents(store) == NODES["n1"] | NODES["n0"]
    assert plan_checkpoint(seen(store)).notes == (
        (
            "1 files of n1 differ from the files of the same name that were chosen: --node n1"
            " chooses them"
        ),
    )


def test_a_node_gets_its_own_files_and_bytes_and_every_shard_but_no_other_ranks_states() -> None:
    everything = NODES["n1"] | NODES["n0"]
    assert contents(two_nodes(), "n1") == {
        p: d for p, d in everything.items() if p != "rng_state_0.pth"
    } | {"args.bin": b"one"}
    assert contents(two_nodes(), "n0") == {
        p: d for p, d in everything.items() if p != "rng_state_1.pth"
    }
    with pytest.raises(ConfigError, match="n7: this node uploaded no file"):
        plan_checkpoint(seen(two_nodes()), "n7")


def test_times_and_digests_are_the_manifests_and_the_same_files_have_the_same_key() -> None:
    plan = plan_checkpoint(seen(two_nodes()))
    assert set(plan.times.values()) == {1000}
    assert {f.under: f.digest.digest for f in plan.files if f.digest} == {
        p: digest(d) for p, d in (NODES["n1"] | NODES["n0"]).items()
    }
    others = plan_checkpoint(seen(two_nodes()), "n0"), plan_checkpoint(seen(two_nodes(bytes.upper)))
    assert plan.key == plan_checkpoint(seen(two_nodes())).key
    assert plan.key not in {other.key for other in others}


def test_a_file_that_is_not_in_the_store_is_missing_and_not_planned() -> None:
    store = two_nodes()
    store.write(f"{RUN}/{LOCATION}/rng_state_1.pth", [b"r"])
    put(
        store,
        manifest({"args.bin": b"zero"}, "n0", demands=Demands({}, {"rng_state_2.pth": None}), n=1),
    )
    plan = plan_checkpoint(seen(store))
    assert plan.missing == (
        "rng_state_1.pth: missing in the store, or not as n1 uploaded it",
        "rng_state_2.pth: no node has uploaded it",
    )
    assert "rng_state_1.pth" not in {f.under for f in plan.files}
    assert plan_checkpoint(seen(store), "n0").missing == ()


@pytest.mark.parametrize(
    "paths", [("A/x", "a/X"), ("ss", "ß"), ("e\u0301.txt", "é.txt"), ("a", "A/b"), ("É", "e\u0301")]
)
def test_names_that_are_one_file_on_some_file_systems_are_told(paths: tuple[str, str]) -> None:
    store = MemoryStore()
    arrive(store, dict.fromkeys(paths, b"1"), demands=Demands())
    [pair] = plan_checkpoint(seen(store)).alike
    assert set(pair) == set(paths)


def test_a_file_that_lies_in_a_file_is_refused() -> None:
    store = MemoryStore()
    arrive(store, dict.fromkeys(("a", "a/b"), b"1"), demands=Demands())
    with pytest.raises(Corrupt, match="which is a file"):
        plan_checkpoint(seen(store))


@pytest.mark.parametrize("name", ["../checkpoint-4", ".checkpoint", "a/b"])
def test_an_unsafe_name_of_a_checkpoint_is_refused(name: str) -> None:
    snapshot = dataclasses.replace(seen(two_nodes()), checkpoint=name)
    with pytest.raises(Corrupt):
        plan_checkpoint(snapshot)


def test_a_model_is_verified_tensor_by_tensor() -> None:
    store = whole_store()
    plan = plan_model(seen(store))
    assert sorted(f.under for f in plan.files) == ["config.json", "model.safetensors"]
    (weights,) = [f for f in plan.files if f.under == "model.safetensors"]
    data = read_all(store, weights.name)
    assert weights.digest
    spans = [(start, end) for start, end, _ in digested_ranges(weights.digest, 0, weights.size)]
    assert len(spans) == 1 + 3
    for start, end in spans:
        found = Checker("m", weights.digest, start, end)
        found.add(memoryview(data)[start:end])
        found.end()


def test_a_file_with_bytes_of_no_tensor_is_verified_as_a_whole() -> None:
    model_record = seen(whole_store()).model_record
    assert model_record
    (file,) = [f for f in model_record.files if f.path == "model.safetensors"]
    longer = ModelFile(file.path, file.size + 1, file.digest)
    unknown = [dataclasses.replace(t, digest="") for t in model_record.tensors]
    for one, tensors in (
        (longer, model_record.tensors),
        (file, unknown),
        (file, ()),
        (file, [dataclasses.replace(model_record.tensors[0], dtype="X")]),
    ):
        assert model_digests(one, tensors).ends == (one.size,)


def test_a_missing_model_or_file_of_it_is_named() -> None:
    store = MemoryStore()
    arrive(store, {"a": b"1"}, demands=Demands())
    with pytest.raises(Incomplete, match="no consolidated model yet"):
        plan_model(seen(store))
    whole_ = whole_store()
    whole_.write(consolidated_prefix(RUN, LOCATION) + "config.json", [b"{}"])
    assert plan_model(seen(whole_)).missing == (
        "config.json: missing in the store, or of another size",
    )


ZERO = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("checkpoint", "paths", "wanted"),
    [
        ("global_step40", ZERO[:1], {"latest": b"global_step40"}),
        ("mytag", ZERO[1:], {"latest": b"mytag"}),
        (
            "global_step_40",
            ("actor/model_world_size_2_rank_0.pt",),
            {"latest_checkpointed_iteration.txt": b"40"},
        ),
        (
            "global_step_40",
            ("policy/model_world_size_2_rank_0.pt",),
            {"latest_ckpt_global_step.txt": b"40"},
        ),
        ("actor.global_step40", ZERO, {"latest": b"actor.global_step40"}),
        ("iter_0000500", (".metadata",), {"latest_checkpointed_iteration.txt": b"500"}),
        ("checkpoint-40", (f"global_step40/{ZERO[0]}", "latest"), {}),
        ("global_step40", ("model.safetensors",), {}),
        ("final", ("model.safetensors",), {}),
    ],
)
def test_a_pointer_file_names_the_checkpoint_as_its_trainer_reads_it(
    checkpoint: str, paths: tuple[str, ...], wanted: dict[str, bytes]
) -> None:
    assert pointers(checkpoint, paths) == wanted
