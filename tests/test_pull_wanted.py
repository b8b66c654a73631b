"""What a machine wants of a checkpoint: all of it, or what one node needs; and only names that land where they should."""

from __future__ import annotations

import dataclasses

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.model import Demands
from ckptsync.pull.wanted import model, stretches, whole
from ckptsync.records.names import consolidated_prefix, node_file_name
from ckptsync.records.seal import SealedFile
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.proof import pieces, proof
from tests.verified import PLACE, RUN, arrive, manifest, put, whole_store

NODES = {
    "n0": {"fsdp/meta.json": b"meta", "fsdp/__0_0.distcp": b"00", "rng_state_0.pth": b"r0", "args.bin": b"zero"},
    "n1": {"fsdp/__1_0.distcp": b"11", "rng_state_1.pth": b"r1", "args.bin": b"one"},
}


def two_nodes() -> MemoryStore:
    store = MemoryStore()
    for node, files in NODES.items():
        arrive(store, {path: data for path, data in files.items() if (node, path) != ("n1", "args.bin")}, node, demands=Demands())
    store.write(node_file_name(RUN, PLACE, "n1", "args.bin"), [b"one"])
    put(store, manifest({"args.bin": b"one"}, "n1", demands=Demands(), n=1))
    return store


def seen(store: MemoryStore) -> Snapshot:
    return fresh(store, RUN).places[0]


def contents(store: MemoryStore, node: str = "") -> dict[str, bytes]:
    return {f.under: read_all(store, f.name) for f in whole(seen(store), node).files}


def test_all_files_come_under_their_own_names_and_what_lies_apart_is_told() -> None:
    store = two_nodes()
    assert contents(store) == NODES["n1"] | NODES["n0"]
    assert whole(seen(store)).notes == (
        "1 files of n1 have other bytes than those of the same name that are given: --node n1 gives them",
    )


def test_a_node_gets_its_own_files_in_its_own_content_and_every_shard_but_no_other_ranks_states() -> None:
    everything = NODES["n1"] | NODES["n0"]
    assert contents(two_nodes(), "n1") == {p: d for p, d in everything.items() if p != "rng_state_0.pth"} | {"args.bin": b"one"}
    assert contents(two_nodes(), "n0") == {p: d for p, d in everything.items() if p != "rng_state_1.pth"}
    with pytest.raises(ConfigError, match="n7: no node that sent files"):
        whole(seen(two_nodes()), "n7")


def test_times_and_digests_are_the_manifests_and_the_same_files_are_the_same_order() -> None:
    order = whole(seen(two_nodes()))
    assert set(order.times.values()) == {1000}
    assert {f.under: f.digest.digest for f in order.files if f.digest} == {
        p: digest(d) for p, d in (NODES["n1"] | NODES["n0"]).items()
    }
    assert order.key == whole(seen(two_nodes())).key != whole(seen(two_nodes()), "n0").key


def test_what_is_not_in_the_store_is_told_and_not_wanted() -> None:
    store = two_nodes()
    store.delete(f"{RUN}/{PLACE}/rng_state_1.pth")
    put(store, manifest({"args.bin": b"zero"}, "n0", demands=Demands({}, {"rng_state_2.pth": None}), n=1))
    order = whole(seen(store))
    assert order.lacking == ("rng_state_1.pth: not in the store as n1 has sent it", "rng_state_2.pth: no node has sent it")
    assert "rng_state_1.pth" not in {f.under for f in order.files}
    assert whole(seen(store), "n0").lacking == ()


@pytest.mark.parametrize(
    ("paths", "words"),
    [(("A/x", "a/X"), "the same file as"), (("ss", "ß"), "the same file"), (("a", "a/b"), "which is a file")],
)
def test_names_that_would_land_on_each_other_are_refused(paths: tuple[str, str], words: str) -> None:
    store = MemoryStore()
    arrive(store, dict.fromkeys(paths, b"1"), demands=Demands())
    with pytest.raises(Corrupt, match=words):
        whole(seen(store))


@pytest.mark.parametrize("name", ["../checkpoint-4", ".checkpoint", "a/b"])
def test_a_checkpoint_lands_in_a_directory_of_its_own(name: str) -> None:
    snapshot = dataclasses.replace(seen(two_nodes()), checkpoint=name)
    with pytest.raises(Corrupt):
        whole(snapshot)


def test_a_model_is_proven_tensor_by_tensor() -> None:
    store = whole_store()
    order = model(seen(store))
    assert sorted(f.under for f in order.files) == ["config.json", "model.safetensors"]
    (weights,) = [f for f in order.files if f.under == "model.safetensors"]
    data = read_all(store, weights.name)
    assert weights.digest
    spans = list(pieces(weights.digest, 0, weights.size))
    assert len(spans) == 1 + 3
    for start, end in spans:
        found = proof("m", weights.digest, start, end)
        found.add(memoryview(data)[start:end])
        found.end()


def test_a_file_whose_tensors_do_not_make_it_up_is_proven_as_a_whole() -> None:
    seal = seen(whole_store()).seal
    assert seal
    (file,) = [f for f in seal.files if f.path == "model.safetensors"]
    longer = SealedFile(file.path, file.size + 1, file.digest)
    unknown = [dataclasses.replace(t, digest="") for t in seal.tensors]
    for one, tensors in (
        (longer, seal.tensors),
        (file, unknown),
        (file, ()),
        (file, [dataclasses.replace(seal.tensors[0], dtype="X")]),
    ):
        assert stretches(one, tensors).ends == (one.size,)


def test_a_model_that_is_not_there_is_told() -> None:
    store = MemoryStore()
    arrive(store, {"a": b"1"}, demands=Demands())
    with pytest.raises(Incomplete, match="not been consolidated"):
        model(seen(store))
    whole_ = whole_store()
    whole_.delete(consolidated_prefix(RUN, PLACE) + "config.json")
    assert model(seen(whole_)).lacking == ("config.json: not in the store as it was sealed",)
