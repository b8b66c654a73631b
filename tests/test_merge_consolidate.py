"""From files to a model, through a function that writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.merge.consolidate import consolidate
from ckptsync.merge.plan import DTYPES, DType, Options
from ckptsync.merge.prepare import prepare
from tests.consolidated import FILES, MODEL, Written, run
from tests.plain_files import MemoryFiles, safetensors_file, tree
from tests.vector import ROOT, vector


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
