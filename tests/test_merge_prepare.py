"""What is known, noted and refused before anything is written."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.merge.consolidate import consolidate
from ckptsync.merge.plan import Options
from ckptsync.merge.prepare import prepare
from tests.consolidated import FILES, MODEL, Written, run
from tests.dcp_files import checkpoint
from tests.plain_files import MemoryFiles, safetensors_file, tree
from tests.vector import Vector, vector, vectors


def test_lora_that_is_no_adapter_of_pefts_is_merged_and_said() -> None:
    names = ("base.q.lora_A.weight", "base.q.weight")
    notes = [run(MemoryFiles(FILES | {"model.safetensors": safetensors_file({n: ("U8", (1,), b"x")})}))[1].notes for n in names]
    assert ["LoRA" in " ".join(n) for n in notes] == [True, False]


def test_a_model_without_configuration_says_so() -> None:
    _, merged = run(MemoryFiles({"model.safetensors": MODEL}))
    assert "no config.json was found" in merged.notes[0]


@pytest.mark.parametrize("of", vectors(), ids=lambda v: v.name)
def test_a_preparation_reads_no_weights_and_names_the_files_that_hold_them(of: Vector) -> None:
    files = tree(*of.sources)
    job = prepare(files, Options("keep"))
    assert job.reads <= files.sizes().keys()
    before = files.read
    run(files, Options("keep"))
    assert before < files.read


def test_a_shard_that_is_missing_is_incomplete_and_one_cut_short_is_corrupt() -> None:
    files = tree(*vector("hf-fsdp2-2node").sources)
    name = "pytorch_model_fsdp_0/__3_0.distcp"
    data = files.content.pop(name)
    with pytest.raises(Incomplete, match="__3_0"):
        run(files)
    files.content[name] = data[:-1]
    with pytest.raises(Corrupt, match="expected by the metadata"):
        run(files)


def test_overlapping_shards_are_refused_before_anything_is_written() -> None:
    box = ((3,), bytes(12))
    files = MemoryFiles(checkpoint("", {"w": ((4,), {(0,): box, (1,): box})}))
    written = Written()
    with pytest.raises(Corrupt, match="given twice"):
        consolidate(files, written.write, Options())
    assert not written


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_a_model_without_tensors_is_no_model(name: str) -> None:
    with pytest.raises(Unsupported, match="a model without tensors"):
        run(MemoryFiles({name: safetensors_file({})}))


def test_an_index_of_nothing_is_no_model() -> None:
    with pytest.raises(Unsupported, match="a model without tensors"):
        run(MemoryFiles({"model.safetensors.index.json": b'{"weight_map": {}}'}))
