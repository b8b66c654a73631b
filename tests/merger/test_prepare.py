"""What is known, noted and refused before anything is written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import pytest

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.merger.plan import DType, FilePlan, MergeOptions, PlannedTensor
from ckptsync.merger.prepare import _check_bounds, prepare
from ckptsync.tensors import Copy, Extent, Part
from tests.support.dcp_writer import checkpoint
from tests.support.files_in_memory import MemoryFiles, safetensors_file, tree
from tests.support.merge_in_memory import Written, consolidate, run
from tests.support.vector import ROOT, vector


def test_bytes_behind_a_files_end_are_found_missing_whichever_part_they_are_of() -> None:
    extents = [Extent("g", 0, 8), Extent("f", 98, 4), Extent("f", 0, 4)]
    copies = [Copy("U8", (e.size,), (Part((0,), (e.size,), e),)) for e in extents]
    written = FilePlan(
        "model", b"", tuple(PlannedTensor("t", "U8", c.grid, 0, 4, c) for c in copies)
    )
    _check_bounds(MemoryFiles({"f": bytes(110), "g": bytes(8)}), [written])
    with pytest.raises(Corrupt, match="f: 101 bytes, at least 102 expected"):
        _check_bounds(MemoryFiles({"f": bytes(101), "g": bytes(8)}), [written])


def test_overlapping_shards_are_refused_before_anything_is_written() -> None:
    box = ((3,), bytes(12))
    files = MemoryFiles(checkpoint("", {"w": ((4,), {(0,): box, (1,): box})}))
    written = Written()
    with pytest.raises(Corrupt, match="given twice"):
        consolidate(files, written.write, MergeOptions())
    assert not written


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("model.safetensors", safetensors_file({})),
        ("model-00001-of-00001.safetensors", safetensors_file({})),
        ("model.safetensors.index.json", b'{"weight_map": {}}'),
    ],
    ids=["whole", "numbered", "index"],
)
def test_a_model_without_tensors_is_no_model(name: str, data: bytes) -> None:
    with pytest.raises(Unsupported, match="a model without tensors"):
        run(MemoryFiles({name: data}))


P = "base_model.model.m.q."
LORA = {
    P + "lora_A.default.weight": ("F32", (1, 2), bytes(8)),
    P + "lora_B.default.weight": ("F32", (2, 1), bytes(8)),
}
BOTH = LORA | {
    P + "base_layer.weight": ("F32", (2, 2), bytes(16)),
    P + "base_layer.bias": ("F32", (2,), bytes(8)),
}


def model(
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], **beside: object
) -> MemoryFiles:
    content = {f"{name}.json": json.dumps(config).encode() for name, config in beside.items()}
    return MemoryFiles({"model.safetensors": safetensors_file(tensors), **content})


def names_of(written: Written, file: str = "model.safetensors") -> list[str]:
    return list(
        json.loads(written[file][8 : 8 + int.from_bytes(written[file][:8], "little")]).keys()
        - {"__metadata__"}
    )


def test_an_adapter_is_one_file_with_its_own_configuration_and_no_models() -> None:
    files = model(LORA, config={}, adapter_config={"r": 1}, tokenizer={})
    written, merged = run(files, MergeOptions(max_shard_size=1))
    assert sorted(written) == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert sorted(names_of(written, "adapter_model.safetensors")) == [
        P + "lora_A.weight",
        P + "lora_B.weight",
    ]
    assert not any("adapter_config.json" in note for note in merged.notes)


def test_an_adapters_configuration_is_never_invented_and_it_is_said_how_to_give_one() -> None:
    written, merged = run(model(LORA, config={}))
    assert list(written) == ["adapter_model.safetensors"]
    assert any(
        "adapter_config.json was found: give its directory with --config-from" in note
        for note in merged.notes
    )


def test_an_adapter_of_another_name_has_its_configuration_in_a_directory_of_that_name() -> None:
    tensors = {name.replace("default", "mine"): value for name, value in BOTH.items()}
    files, own = model(tensors, adapter_config={"r": 2}), b'{"r": 1, "bias": "all"}'
    files.content["mine/adapter_config.json"] = own
    written, _ = run(files)
    assert written["adapter_config.json"] == own
    assert P + "base_layer.bias" in names_of(written, "adapter_model.safetensors")


def test_an_adapters_configuration_says_what_is_saved_with_it() -> None:
    written, _ = run(model(BOTH, adapter_config={"bias": "all"}))
    assert P + "base_layer.bias" in names_of(written, "adapter_model.safetensors")
    with pytest.raises(Corrupt, match="rank 8"):
        run(model(BOTH, adapter_config={"peft_type": "LORA", "r": 8}))


def test_the_base_model_under_an_adapter_is_a_model_with_a_models_configuration() -> None:
    files = model(BOTH, config={"dtype": "bfloat16"}, adapter_config={})
    written, merged = run(files, MergeOptions(source="whole:.@base"))
    assert sorted(written) == ["config.json", "model.safetensors"]
    assert (sorted(names_of(written)), merged.source) == (
        ["m.q.bias", "m.q.weight"],
        "whole:.@base",
    )
    assert prepare(files, MergeOptions(source=merged.source)).source == merged.source


def base_of(**tensors: tuple[str, tuple[int, ...], bytes]) -> MemoryFiles:
    return model(tensors, config={"tie_word_embeddings": True})


def test_auto_writes_each_tensor_as_the_base_has_it_and_keep_as_it_is_stored() -> None:
    stored = {"w": ("F32", (1,), bytes(4)), "n": ("I64", (), bytes(8))}
    base = base_of(w=("BF16", (1,), bytes(2)), n=("BF16", (), bytes(2)))
    dtypes: dict[DType, str] = {"auto": "BF16", "keep": "F32", "fp16": "F16"}
    for option, dtype in dtypes.items():
        (plan,) = prepare(model(stored), MergeOptions(option), base=base).plans
        assert {t.name: t.dtype for t in plan.tensors} == {"w": dtype, "n": "I64"}


def test_a_tied_head_is_neither_missing_nor_unexpected_whichever_of_the_two_has_it() -> None:
    embedding = {"m.embed_tokens.weight": ("F32", (2, 1), b"12345678")}
    head = {"lm_head.weight": ("F32", (2, 1), b"12345678")}
    both = embedding | head
    for stored, of_base in itertools.product((embedding, both), (embedding, head, both)):
        job = prepare(model(stored), MergeOptions(), base=base_of(**of_base))
        assert [t.name for t in job.plans[0].tensors] == ["m.embed_tokens.weight"]
        assert not any("not in the base model" in note for note in job.notes)


def test_a_tie_is_found_before_the_base_gives_one_of_the_two_another_dtype() -> None:
    stored = dict.fromkeys(
        ("lm_head.weight", "m.embed_tokens.weight"), ("F32", (2, 1), b"12345678")
    )
    job = prepare(
        model(stored),
        MergeOptions(),
        base=base_of(**{"m.embed_tokens.weight": ("BF16", (2, 1), bytes(4))}),
    )
    assert [(t.name, t.dtype) for t in job.plans[0].tensors] == [("m.embed_tokens.weight", "BF16")]


@pytest.mark.parametrize("name", ["w.absmax", "w.quant_state.bitsandbytes__nf4", "SCB.w.SCB"])
def test_quantised_weights_are_copied_and_never_cast(name: str) -> None:
    files = model({"w": ("BF16", (4, 1), bytes(8)), name: ("F32", (1,), bytes(4))})
    assert {t.dtype for t in prepare(files, MergeOptions()).plans[0].tensors} == {"BF16", "F32"}
    with pytest.raises(Unsupported, match="cannot be cast to fp16"):
        prepare(files, MergeOptions("fp16"))


def test_against_a_base_what_is_missing_is_refused() -> None:
    base = base_of(a=("F32", (1,), bytes(4)), b=("F32", (1,), bytes(4)))
    with pytest.raises(Incomplete, match="1 of the base model's 2 tensors are missing"):
        prepare(model({"a": ("F32", (1,), bytes(4))}), MergeOptions(), base=base)
    with pytest.raises(Corrupt, match="belong to modules that the base model does not have"):
        prepare(model(LORA), MergeOptions(), base=base)


def test_the_bases_configuration_serves_where_there_is_no_other() -> None:
    base, stored = base_of(a=("F32", (), bytes(4))), {"a": ("F32", (), bytes(4))}
    assert dict(prepare(model(stored), MergeOptions(), base=base).beside)["config.json"] is base
    own = model(stored, config={})
    assert dict(prepare(own, MergeOptions(), base=base).beside)["config.json"] is not base


def test_wrappers_are_taken_out_of_whole_models_too_before_ties_are_looked_for() -> None:
    names = ("_orig_mod.m.embed_tokens.weight", "_orig_mod.lm_head.weight")
    written, merged = run(
        model({n: ("F32", (2, 1), bytes(8)) for n in names}, config={"tie_word_embeddings": True})
    )
    assert names_of(written) == ["m.embed_tokens.weight"]
    assert merged.notes[0].startswith("_orig_mod taken out of 2 names")
    assert merged.notes[1] == "lm_head.weight is tied to m.embed_tokens.weight: one copy is kept"


def test_shards_in_safetensors_take_their_shapes_from_the_base_model_or_a_configuration_given() -> (
    None
):
    files = tree(*vector("tf5-hsdp").sources)
    told = MemoryFiles({"config.json": files.content.pop("config.json")})
    with pytest.raises(Incomplete, match="nothing says what shape it has") as e:
        prepare(files, MergeOptions("keep"))
    assert "--base" in e.value.hint
    assert (
        prepare(files, MergeOptions("keep"), [told]).plans
        == prepare(files, MergeOptions("keep"), base=tree(ROOT / "base")).plans
    )
    del files.content["shard-00004-model-00001-of-00001.safetensors"]
    for given in ({"config": [told]}, {"base": tree(ROOT / "base")}):
        with pytest.raises(Incomplete, match="in the shards that are here"):
            prepare(files, MergeOptions("keep"), **given)


def test_a_broken_whole_model_says_that_the_shards_beside_it_can_be_merged() -> None:
    files = tree(*vector("hf-zero1").sources)
    files.content["model.safetensors"] = files.content["model.safetensors"][:-4]
    with pytest.raises(Corrupt, match=r"model\.safetensors") as broken:
        run(files)
    assert "can be merged: --source zero:global_step4" in broken.value.hint
    assert run(files, MergeOptions(source="zero:global_step4"))[0]
    shard = next(name for name in files.content if name.startswith("global_step4/"))
    del files.content[shard]
    with pytest.raises(Corrupt, match=r"model\.safetensors") as broken:
        run(files)
    assert "--source" not in broken.value.hint
