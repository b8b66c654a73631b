"""What the metadata of a distributed checkpoint says, and what it may not say.

That of every rank for itself.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import dcp, registry
from ckptsync.merger.plan import MergeOptions, plan
from ckptsync.tensors import Shape
from tests.support.dcp_writer import (
    DATA,
    Built,
    Chunk,
    described,
    fields_of,
    found,
    item,
    metadata,
    one,
)
from tests.support.files_in_memory import MemoryFiles, torch_pickle


def test_a_node_without_metadata_cannot_say_what_is_demanded() -> None:
    files = MemoryFiles({"m/__2_0.distcp": b"x"})
    for read in (dcp.demands, dcp.tensors):
        with pytest.raises(Incomplete, match=r"m/\.metadata: not found") as e:
            read(files, "m")
        assert "rank 0" in e.value.hint
    assert not registry.demands(files).model


def test_a_chunk_that_lies_in_no_file_is_corrupt_unless_it_is_empty() -> None:
    for sizes, refused in [((4,), True), ((0,), False)]:
        whole = Built("metadata", "Metadata", fields_of("w", sizes))
        files = MemoryFiles({".metadata": torch_pickle(whole)})
        with pytest.raises(Corrupt, match="in no file") if refused else contextlib.nullcontext():
            assert dcp.tensors(files, "")[0].copies[0].parts == ()


@pytest.mark.parametrize(
    "transforms",
    [("stream.zstd/1",), ("stream.zstd/1", "stream.zstd/1"), ("stream.brotli/1",), ("aes",)],
)
def test_items_of_an_extension_are_refused_by_its_name_and_demanded_all_the_same(
    transforms: tuple[str, ...],
) -> None:
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 9, transforms)
    data = metadata({"w": ("float32", (4,), (chunk,))})
    files = MetadataAlone({".metadata": data, "__0_0.distcp": bytes(9)})
    assert dcp.demands(files, "") == {".metadata": len(data), "__0_0.distcp": 9}
    name = {"stream.zstd/1": "packed by torch's ZStandard extension"}.get(
        transforms[0], f"written through ('{transforms[0]}')"
    )
    with pytest.raises(Unsupported, match=re.escape(f"__0_0.distcp: item w was {name}")) as refused:
        dcp.tensors(files, "")
    assert refused.value.hint == "save it again without the extension"


class MetadataAlone(MemoryFiles):
    """Files of which nothing but the metadata may be read."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        assert name == ".metadata"
        super().read_into(name, start, out)


def test_metadata_that_is_no_pickle_or_more_is_corrupt_and_named() -> None:
    good = one(root="pytorch_model_fsdp_0")
    name = "pytorch_model_fsdp_0/.metadata"
    for content in (bytes(300), b"\x80\x04.", b"", good.content[name] + b"x"):
        with pytest.raises(Corrupt, match=r"^pytorch_model_fsdp_0/\.metadata: pickle"):
            found(MemoryFiles({**good.content, name: content}), "pytorch_model_fsdp_0")
    with pytest.raises(Corrupt, match=r"^__1\.metadata: pickle"):
        found(MemoryFiles({**rank(0), **rank(1), **states(2), "__1.metadata": b"\x80\x04."}))


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        *(({"model.w": path}, "is") for path in [("model", "v"), ("mpdel", "w"), ("w",)]),
        ({"model.v": ("model", "v")}, "has no path"),
    ],
)
def test_a_name_that_its_own_path_does_not_spell_is_corrupt(
    paths: dict[str, tuple[str, ...]], match: str
) -> None:
    with pytest.raises(Corrupt, match=rf"'model\.w' {match}"):
        found(one("model.w", paths=paths))


@pytest.mark.parametrize("field", ["planner_data", "state_dict_metadata", "storage_data"])
def test_metadata_without_one_of_its_fields_is_corrupt(field: str) -> None:
    fields = fields_of("w", (0,))
    del fields[field]
    for value in (Built("metadata", "Metadata", fields), fields, 5):
        held = MemoryFiles({".metadata": torch_pickle(value)})
        with pytest.raises(Corrupt, match=r"no planner_data|without its fields"):
            dcp.tensors(held, "")


@pytest.mark.parametrize(
    ("attribute", "value"), [("properties", 5), ("chunks", 5), ("chunks", [5])]
)
def test_a_tensor_that_is_not_described_is_corrupt(attribute: str, value: object) -> None:
    fields: dict[str, Any] = fields_of("w", (4,))
    fields["state_dict_metadata"]["w"].state[attribute] = value
    data = torch_pickle(Built("metadata", "Metadata", fields))
    with pytest.raises(Corrupt, match="without properties, size and chunks"):
        found(MemoryFiles({".metadata": data}))


def test_two_chunks_in_one_item_are_corrupt() -> None:
    where = _StorageInfo("__0_0.distcp", 0, 9)
    whole = Metadata({}, None, {MetadataIndex(name): where for name in "ab"})
    with pytest.raises(Corrupt, match="two chunks in one item"):
        found(MemoryFiles({".metadata": pickle.dumps(whole, 4)}))


@pytest.mark.parametrize(
    "module", ["distributed._shard.sharded_tensor.metadata", "distributed.checkpoint.metadata"]
)
def test_properties_of_torch_2_1_and_2_2_are_those_of_sharded_tensors(module: str) -> None:
    files = one()
    own = b"torch.distributed.checkpoint.metadata"
    held = files.content[".metadata"]
    at = held.index(own + b"\nTensorProperties") if own + b"\nTensorProperties" in held else -1
    assert at >= 0, "the helper writes names in lines"
    changed = held[:at] + b"torch." + module.encode() + held[at + len(own) :]
    assert found(MemoryFiles({**files.content, ".metadata": changed})).keys() == {"w"}


def test_plans_of_megatron_beside_the_metadata_are_passed_over() -> None:
    data = item(DATA, (4,))
    whole = described({"w": ("float32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, len(data)),))})
    items = [Built("planner", "WriteItem", {"index": 0})]
    plans = [Built("planner", "SavePlan", {"items": items, "planner_data": {}})]
    assert isinstance(whole.state, dict)
    state = {**whole.state, "planner_data": {}, "all_local_plans": plans}
    told = torch_pickle(whole.with_state(state))
    assert found(MemoryFiles({".metadata": told, "__0_0.distcp": data})).keys() == {"w"}


HALVES = {0: ((0,), DATA[:8]), 1: ((2,), DATA[8:])}


def rank(
    number: int, shape: Shape = (4,), dtype: str = "float32", offset: int | None = None
) -> dict[str, bytes]:
    """One rank's half of "w", and its copy of "b"."""
    own, both = item(HALVES[number % 2][1], (2,)), item(DATA, (4,))
    file = f"__{number}_0.distcp"
    at = HALVES[number % 2][0] if offset is None else (offset,)
    chunk, copy = Chunk(at, (2,), file, 0, len(own)), Chunk((0,), (4,), file, len(own), len(both))
    told = metadata({"w": (dtype, shape, (chunk,)), "b": ("float32", (4,), (copy,))})
    return {f"__{number}.metadata": told, file: own + both}


def states(count: int) -> dict[str, bytes]:
    return {f"rng_state_{n}.pth": b"" for n in range(count)}


def test_boxes_of_all_ranks_are_put_together_and_replicas_read_once() -> None:
    files = MemoryFiles({**rank(0), **rank(1), **states(2)})
    assert dcp.roots(files.sizes()) == ("",)
    assert dcp.demands(files, "").keys() == rank(0).keys() | rank(1).keys()
    told = found(files)
    assert [p.offsets for p in told["w"].copies[0].parts] == [(0,), (2,)]
    assert [p.extent.file for p in told["b"].copies[0].parts] == ["__0_0.distcp"]
    plan(dcp.tensors(files, ""), MergeOptions())
    assert [t.remark for t in dcp.tensors(files, "")] == [
        (
            "world size 2 is inferred from random-state files only; if you know that it is right:"
            " --source 'dcp:.#world=2'"
        ),
        "",
    ]
    assert not any(t.remark for t in dcp.tensors(files, "#world=2"))
    registry.require(files, dcp.demands(files, ""))
    around = {f"model/{n}": data for n, data in {**rank(0), **rank(1)}.items()}
    around |= {f"random_states_{n}.pkl": b"" for n in range(2)}
    assert found(MemoryFiles(around), "model").keys() == {"w", "b"}


def test_without_a_word_from_outside_nobody_knows_that_it_is_all() -> None:
    files = MemoryFiles({**rank(0), **rank(1)})
    with pytest.raises(Incomplete, match="the world size is unknown") as refused:
        dcp.demands(files, "")
    assert "#world=2" in refused.value.hint
    assert len(dcp.tensors(files, "#world=2")) == 2


@pytest.mark.parametrize("there", [(0,), (1,), (0, 2), (1, 2)])
def test_a_missing_rank_is_named(there: tuple[int, ...]) -> None:
    last = {"rng_state_2.pth": b""}
    files = MemoryFiles({k: v for n in there for k, v in rank(n).items()} | last)
    with pytest.raises(
        Incomplete, match=rf"^__{min(set(range(3)) - set(there))}\.metadata: not found, of 3 ranks"
    ):
        dcp.demands(files, "")


def test_a_rank_beyond_the_world_is_of_another_save() -> None:
    of_ranks = {name: data for n in range(11) for name, data in rank(n).items()}
    with pytest.raises(Corrupt, match="metadata of rank 10, of 10 ranks"):
        dcp.demands(MemoryFiles({**of_ranks, **states(10)}), "")


def test_metadata_of_all_beside_that_of_one_are_two_saves() -> None:
    one = metadata({"b": ("float32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, 9),))})
    with pytest.raises(Unsupported, match="two saves in one directory"):
        dcp.demands(MemoryFiles({**rank(0), **states(1), ".metadata": one}), "")


def test_ranks_that_disagree_on_a_path_are_corrupt() -> None:
    whole = {"a.b": ("float32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, 9),))}
    told = [metadata(whole, {"a.b": path}) for path in [("a", "b"), ("a.b",)]]
    files = {f"__{n}.metadata": data for n, data in enumerate(told)}
    with pytest.raises(Corrupt, match=r"'a\.b': ranks disagree on its path"):
        found(MemoryFiles({**files, **states(2)}))


@pytest.mark.parametrize(
    ("shape", "dtype", "word"), [((5,), "float32", "shape"), ((4,), "int32", "shape or dtype")]
)
def test_ranks_that_disagree_are_of_different_saves(shape: Shape, dtype: str, word: str) -> None:
    files = MemoryFiles({**rank(0), **rank(1, shape, dtype), **states(2)})
    with pytest.raises(Corrupt, match=f"'w': ranks disagree on its {word}"):
        found(files)


def test_boxes_that_overlap_or_leave_a_hole_are_not_a_tensor() -> None:
    for offset in (1, 3):
        files = MemoryFiles({**rank(0), **rank(1, offset=offset), **states(2)})
        with pytest.raises(Corrupt):
            plan(dcp.tensors(files, ""), MergeOptions())
