"""PEFT adapters with names of their own: in directories, in a state dict, without a name."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from ckptsync.errors import Incomplete, Unsupported
from ckptsync.merger.adapter import SeveralAdapters
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import check_complete, prepare
from ckptsync.tensors import Shape
from tests.support.dcp_writer import checkpoint
from tests.support.files_in_memory import MemoryFiles, safetensors_file
from tests.support.merge_in_memory import Written, consolidate

LORA = "base_model.model.m.q_proj.lora_A.weight"
BOX: Mapping[Shape, tuple[Shape, bytes]] = {(0, 0): ((1, 1), b"AABB")}
OTHER = LORA.replace("lora_A", "lora_B")


def adapter(value: int, **config: object) -> dict[str, bytes]:
    tensors = {name: ("U8", (1, 1), bytes([value])) for name in (LORA, OTHER)}
    return {
        "adapter_model.safetensors": safetensors_file(tensors),
        "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 1, **config}).encode(),
    }


def below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def merged(files: MemoryFiles, source: str | None = None) -> Written:
    written = Written()
    consolidate(files, written.write, MergeOptions(source=source))
    return written


DPO = {**adapter(1), **below("ref", adapter(2, lora_alpha=3)), "tokenizer.json": b"{}"}
NAMED = {**below("policy", adapter(1)), **below("reference", adapter(2)), "tokenizer.json": b"{}"}


def test_one_of_several_is_written_with_its_own_configuration() -> None:
    written = merged(MemoryFiles(DPO), "ref")
    assert written.keys() == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"}
    assert written["adapter_config.json"] == DPO["ref/adapter_config.json"]
    assert written["adapter_model.safetensors"].endswith(bytes([2, 2]))


def test_what_is_left_out_is_named_with_how_to_get_it() -> None:
    job = prepare(MemoryFiles(DPO), MergeOptions())
    assert job.source == "peft:."
    assert "left out: the adapter peft:ref; --source peft:ref writes it" in job.notes


@pytest.mark.parametrize("files", [DPO, NAMED])
def test_every_adapter_is_written_where_peft_saves_it(files: dict[str, bytes]) -> None:
    written = merged(MemoryFiles(files), "peft:*")
    assert written.keys() == files.keys()
    assert all(data == files[name] for name, data in written.items() if name.endswith(".json"))


def test_a_store_has_every_adapter_and_the_command_asks() -> None:
    with pytest.raises(Unsupported, match="2 sets of weights"):
        prepare(MemoryFiles(NAMED), MergeOptions())
    job = prepare(MemoryFiles(NAMED), MergeOptions(), every=True)
    assert job.source == "peft:*"
    assert job.is_adapter
    assert [plan.name for plan in job.plans] == [n for n in NAMED if n.endswith(".safetensors")]


def test_the_adapters_of_one_state_dict_can_all_be_written() -> None:
    names = [
        one.replace("weight", f"{name}.weight")
        for one in (LORA, OTHER)
        for name in ("default", "policy")
    ]
    shards = checkpoint("", dict.fromkeys(names, ((1, 1), BOX)))
    files = MemoryFiles({**shards, **below("policy", adapter(0, lora_alpha=7))})
    del files.content["policy/adapter_model.safetensors"]
    with pytest.raises(SeveralAdapters, match="default, policy"):
        prepare(files, MergeOptions())
    for job in (
        prepare(files, MergeOptions(), every=True),
        prepare(files, MergeOptions(source="dcp:.@adapter=*")),
    ):
        assert job.source == "dcp:.@adapter=*"
        assert [p.name for p in job.plans] == [
            "adapter_model.safetensors",
            "policy/adapter_model.safetensors",
        ]
        own = "policy/adapter_config.json"
        assert job.content(own) == files.content[own]


def test_the_rank_and_alpha_that_verl_notes_become_a_configuration() -> None:
    files = MemoryFiles(
        {
            **checkpoint("", dict.fromkeys((LORA, OTHER), ((1, 1), BOX))),
            "lora_train_meta.json": b'{"r": 1, "lora_alpha": 4, "task_type": "CAUSAL_LM"}',
        }
    )
    job = prepare(files, MergeOptions())
    assert json.loads(job.content("adapter_config.json")) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "inference_mode": True,
    }
    files.content["lora_train_meta.json"] = b'{"r": "2"}'
    assert "adapter_config.json" not in dict(prepare(files, MergeOptions()).beside)


def test_an_adapter_without_values_is_incomplete_and_named() -> None:
    files = MemoryFiles(NAMED)
    hollow = dict.fromkeys((LORA, OTHER), ("F32", (0,), b""))
    files.content["policy/adapter_model.safetensors"] = safetensors_file(hollow)
    with pytest.raises(Incomplete, match="2 of 2 tensors are empty"):
        prepare(files, MergeOptions(source="policy"))
    with pytest.raises(Incomplete, match="peft:policy: 2 of 2 tensors are empty"):
        check_complete(files)
    assert check_complete(MemoryFiles(NAMED)) == ()
