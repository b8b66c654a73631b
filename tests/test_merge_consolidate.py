"""From files to a model, through a function that writes."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.merge.consolidate import Chunk, Merged, consolidate, prepare
from ckptsync.merge.plan import DTYPES, DType, Options
from ckptsync.model import Files
from tests.dcp_files import checkpoint
from tests.plain_files import MemoryFiles, safetensors_file, tree
from tests.vector import ROOT, Vector, vector, vectors

MODEL = safetensors_file({"w": ("F32", (2,), b"12345678"), "n": ("I64", (), b"abcdefgh")})
FILES = {"model.safetensors": MODEL, "config.json": b'{"dtype": "float32"}', "tokenizer.json": b"{}", "trainer_state.json": b"{}"}


class Written(dict[str, bytes]):
    """What was written, in order."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        assert name not in self
        self[name] = b"".join(map(bytes, chunks))


def run(files: Files, options: Options | None = None, config: tuple[Files, ...] = ()) -> tuple[Written, Merged]:
    written = Written()
    return written, consolidate(files, written.write, options or Options(), config)


def test_weights_come_first_and_the_index_last() -> None:
    written, merged = run(MemoryFiles(FILES), Options(max_shard_size=8))
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert list(written) == [*names, "config.json", "tokenizer.json", "model.safetensors.index.json"]
    assert [f.path for f in merged.files] == list(written)
    assert merged.source == "whole:."


def test_configuration_is_taken_from_the_checkpoint_first_and_then_from_the_places_in_order() -> None:
    alone = MemoryFiles({"model.safetensors": MODEL, "tokenizer.json": b"own"})
    one, two = (
        MemoryFiles({"config.json": b"one", "tokenizer.json": b"one"}),
        MemoryFiles({"config.json": b"two", "merges.txt": b"two"}),
    )
    written, merged = run(alone, config=(one, two))
    assert {n: d for n, d in written.items() if n != "model.safetensors"} == {
        "config.json": b"one",
        "tokenizer.json": b"own",
        "merges.txt": b"two",
    }
    assert merged.notes == ()


def test_lora_that_is_no_adapter_of_pefts_is_merged_and_said() -> None:
    names = ("base.q.lora_A.weight", "base.q.weight")
    notes = [run(MemoryFiles(FILES | {"model.safetensors": safetensors_file({n: ("U8", (1,), b"x")})}))[1].notes for n in names]
    assert ["LoRA" in " ".join(n) for n in notes] == [True, False]


def test_a_model_without_configuration_says_so() -> None:
    _, merged = run(MemoryFiles({"model.safetensors": MODEL}))
    assert "no config.json was found" in merged.notes[0]


def test_the_configuration_names_the_element_type_that_was_written() -> None:
    written, _ = run(MemoryFiles(FILES), Options("bf16"))
    assert json.loads(written["config.json"]) == {"dtype": "bfloat16"}


def test_an_adapter_keeps_its_name_and_its_own_configuration() -> None:
    written, merged = run(tree(*vector("peft-adapter").sources), config=(tree(ROOT / "base"),))
    assert "adapter_model.safetensors" in written
    assert "adapter_config.json" in written
    assert "config.json" not in written
    assert not merged.notes


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_floats_are_cast(dtype: DType) -> None:
    _, merged = run(MemoryFiles(FILES), Options(dtype))
    wanted = {"bf16": "BF16", "fp16": "F16"}.get(dtype, "F32")
    assert {t.name: t.dtype for t in merged.tensors} == {"w": wanted, "n": "I64"}


def test_finite_values_that_became_infinite_are_told() -> None:
    files = MemoryFiles({"model.safetensors": safetensors_file({"w": ("F32", (2,), b"\xff\xff\x7f\x7f" * 2)})})
    assert "w: 2 finite values became infinite in the cast" in run(files, Options("fp16"))[1].notes


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_the_same_input_gives_the_same_bytes_whatever_else_lies_there(data: st.DataObject) -> None:
    of = vector(data.draw(st.sampled_from(["hf-fsdp2-2node", "hf-zero2", "raw-ds-zero3-tied"])))
    options = Options(data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1000, 100_000)))
    files, other = tree(*of.sources), tree(*of.sources[::-1])
    other.content = dict(sorted(other.content.items(), reverse=True)) | {"rng_state_99.pth": b"", "x/y": b""}
    assert run(files, options) == run(other, options)


def test_progress_ends_at_the_whole() -> None:
    seen: list[tuple[int, int]] = []
    files = MemoryFiles(FILES)
    job = prepare(files, Options())
    consolidate(files, Written().write, Options(), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {job.size}
    assert seen[-1][0] == 16


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


@pytest.mark.parametrize("name", ["hf-fsdp1", "hf-zero3-2node", "raw-ds-zero2-bf16-tied"])
def test_one_flipped_bit_in_a_shards_weights_is_noticed(name: str) -> None:
    files = tree(*vector(name).sources)
    job = prepare(files, Options("keep"))
    for extent in {part.extent for plan in job.plans for t in plan.tensors for part in t.copy.parts}:
        good = files.content[extent.file]
        at = extent.start + extent.size // 2
        files.content[extent.file] = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        with pytest.raises(Corrupt, match="CRC32"):
            run(files, Options("keep"))
        files.content[extent.file] = good


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
