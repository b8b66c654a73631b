"""Models within a training's module: where their names begin, and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from ckptsync.errors import Unsupported
from ckptsync.layouts import config_shapes
from ckptsync.merger.model_prefix import IN_DOUBT, InnerModel, find_inner_model, split_source
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.tensors import Copy, Tensor
from tests.support.deepspeed_in_memory import TAG, changed
from tests.support.files_in_memory import MemoryFiles
from tests.support.merge_in_memory import run
from tests.support.torch_bytes import saved
from tests.support.zero_writer import Zero
from tests.support.zero_writer import files as zero_files

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 7,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
}
SHAPES = config_shapes.shapes(LLAMA)
BASE = tuple(SHAPES)
Q = "model.layers.0.self_attn.q_proj"
LORA = (f"{Q}.lora_A.default.weight", f"{Q}.lora_B.default.weight")
PEFT = tuple(f"base_model.model.{name.replace(Q, f'{Q}.base_layer')}" for name in BASE) + tuple(
    f"base_model.model.{name}" for name in LORA
)
HEAD = ("v_head.summary.weight", "v_head.summary.bias")
ADAPTER = {"peft_type": "LORA", "r": 2, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def tensors(names: Iterable[str]) -> list[Tensor]:
    return [Tensor(name, "F32", (), (Copy("F32", (), ()),)) for name in names]


def under(path: str, names: Iterable[str]) -> list[str]:
    return [f"{path}.{name}" for name in names]


def names(found: InnerModel) -> list[str]:
    return [t.name for t in found.tensors]


PATHS = ("model", "policy", "actor.model", "module.model", "pretrained_model", "net.backbone")


@pytest.mark.parametrize("path", PATHS)
def test_a_peft_model_begins_where_its_names_say(path: str) -> None:
    found = find_inner_model(tensors([*under(path, PEFT), "classifier.weight"]), None)
    assert names(found) == list(PEFT)
    assert found.notes[1] == (
        f"1 tensors are outside of the model at {path} and are left out: classifier (1 tensors);"
        " --source SOURCE@module=classifier writes those of one part"
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("known", ["base", "config"])
def test_a_model_begins_where_the_names_that_it_must_have_begin(path: str, known: str) -> None:
    given = tensors([*under(path, BASE), "loss.scale"])
    found = find_inner_model(
        given, None, BASE if known == "base" else (), LLAMA if known == "config" else None
    )
    assert (names(found), len(found.notes)) == (list(BASE), 2)


def test_a_model_that_stands_alone_keeps_its_names() -> None:
    for config in (None, LLAMA, {"architectures": ["XForCausalLM"]}):
        for base in ((), BASE):
            found = find_inner_model(tensors([*BASE, "extra.weight"]), None, base, config)
            assert (names(found), found.notes) == ([*BASE, "extra.weight"], ())


def test_a_class_without_its_head_begins_where_its_layers_do() -> None:
    inside = [n.removeprefix("model.") for n in BASE if n.startswith("model.")]
    given = tensors([*under("backbone", inside), "classifier.weight"])
    for config in (LLAMA, {**LLAMA, "architectures": ["LlamaModel"]}):
        assert names(find_inner_model(given, None, (), config)) == inside


GPT2 = ["transformer.wte.weight", "transformer.h.0.ln_1.weight", "lm_head.weight"]
BERT = ["bert.embeddings.word_embeddings.weight", "classifier.weight", "classifier.bias"]

MLM = ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"]
VIT = ["vit.embeddings.cls_token", "vit.layernorm.weight", "classifier.weight"]


@pytest.mark.parametrize(
    ("own", "base", "architecture"),
    [
        (GPT2, ["wte.weight", "h.0.ln_1.weight"], ""),
        (GPT2, GPT2, ""),
        (GPT2, [], "GPT2LMHeadModel"),
        (BERT, ["embeddings.word_embeddings.weight"], ""),
        (BERT, [], "BertForSequenceClassification"),
        (MLM, [], "BertForMaskedLM"),
        (VIT, [], "ViTForImageClassification"),
    ],
)
def test_a_head_beside_the_named_model_belongs_to_it(
    own: list[str], base: list[str], architecture: str
) -> None:
    config = {"architectures": [architecture]} if architecture else None
    assert names(find_inner_model(tensors(own), None, base, config)) == own
    wrapped = [*under("net.model", own), "loss.scale"]
    assert names(find_inner_model(tensors(wrapped), None, base, config)) == own


@pytest.mark.parametrize(
    ("first", "architecture"),
    [
        ("embeddings.word_embeddings.weight", "BertModel"),
        ("embeddings.position_embedding.weight", "CLIPTextModel"),
        ("shared.weight", "T5EncoderModel"),
        ("logit_scale", "CLIPModel"),
    ],
)
def test_a_class_without_a_head_begins_where_its_embeddings_do(
    first: str, architecture: str
) -> None:
    config = {"architectures": [architecture]}
    own = [first, *(f"encoder.layers.{n}.weight" for n in range(9))]
    assert names(find_inner_model(tensors(own), None, (), config)) == own
    given = [*under("encoder.net", own), "head.weight"]
    assert names(find_inner_model(tensors(given), None, (), config)) == own


OF_LAYERS = [f"layers.{n}.weight" for n in range(9)]
POSITION = "embeddings.position_embedding.weight"
OF_SEVERAL = ["language_model.lm_head.weight", "language_model.model.norm.weight", "vision.weight"]
KEPT: dict[str, list[str]] = {
    # the embeddings of a part are not where the model begins
    "SiglipVisionModel": under("vision_model", [POSITION, *OF_LAYERS]),
    "LlavaModel": [f"vision_tower.{POSITION}", *under("language_model", OF_LAYERS)],
    # a small head further inside is not the model
    "XForCausalLM": [*under("model", OF_LAYERS), "mtp.lm_head.weight"],
    "LlavaForConditionalGeneration": OF_SEVERAL,
    # a value head of the model's own
    "": ["model.norm.weight", "v_head.weight", "model.v_head.summary.weight"],
}


@pytest.mark.parametrize("architecture", KEPT)
def test_a_model_with_others_inside_keeps_its_names(architecture: str) -> None:
    own = KEPT[architecture]
    config = {"architectures": [architecture], "text_config": {"model_type": ""}}
    config = config if own is OF_SEVERAL else {"architectures": [architecture]}
    found = find_inner_model(tensors(own), None, (), config if architecture else None)
    assert names(found) == own


def test_a_model_of_several_is_found_where_its_names_begin() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": ""}}
    new = ["model.language_model.norm.weight", "model.visual.weight", "lm_head.weight"]
    for path in ("policy", "model"):
        assert names(find_inner_model(tensors(under(path, new)), None, (), config)) == new


def test_a_model_with_its_head_inside_is_found_where_its_base_is() -> None:
    own = [
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "lm_head.weight",
    ]  # T5
    for path in ("model", "net.model", "transformer"):
        assert names(find_inner_model(tensors(under(path, own)), None, own)) == own


def test_a_policy_with_a_head_is_preferred_to_a_value_model_of_the_same_kind() -> None:
    value = [n for n in BASE if n != "lm_head.weight"] + ["score.weight"]
    given = tensors([*under("policy", BASE), *under("value_model", value)])
    assert names(find_inner_model(given, None, (), LLAMA)) == list(BASE)


@pytest.mark.parametrize("own", [BASE, PEFT])
def test_of_two_models_none_is_guessed(own: tuple[str, ...]) -> None:
    given = tensors([*under("actor", own), *under("critic", own)])
    with pytest.raises(Unsupported, match="2 models in one module: at actor, critic") as e:
        find_inner_model(given, None, (), LLAMA)
    assert e.value.hint.startswith("--source SOURCE@module=actor")
    for path in ("actor", "critic"):
        assert names(find_inner_model(given, path, (), LLAMA)) == list(own)
    assert len(names(find_inner_model(given, ".", (), LLAMA))) == 2 * len(own)
    with pytest.raises(Unsupported, match="@module=model: no tensor's name begins so") as e:
        find_inner_model(given, "model")
    assert e.value.hint == "some: actor, critic"


def test_names_that_have_nothing_of_the_configured_class_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"tok_embeddings.*: LlamaForCausalLM, which config.json"):
        find_inner_model(tensors(["tok_embeddings.weight", "output.weight"]), None, (), LLAMA)


@pytest.mark.parametrize("path", ["model", "policy", "actor.model"])
def test_an_injected_adapter_begins_where_its_model_does(path: str) -> None:
    whole = [*under(path, [*BASE, *LORA]), "head.weight"]
    for base, config in ((BASE, None), ((), LLAMA), ((), None)):
        found = find_inner_model(tensors(whole), None, base, config, ADAPTER)
        assert names(found) == [*BASE, *LORA]
        if base or config:
            alone = find_inner_model(tensors(under(path, LORA)), None, base, config, ADAPTER)
            assert names(alone) == list(LORA)


def test_an_injected_adapter_without_its_model_is_refused_where_its_names_are_in_doubt() -> None:
    assert names(find_inner_model(tensors(LORA), None, (), None, ADAPTER)) == list(LORA)
    with pytest.raises(Unsupported, match=r"model\.model\.layers.*nothing says where"):
        find_inner_model(tensors(under("model", LORA)), None, (), None, ADAPTER)


def test_a_prompt_begins_where_its_peft_model_does() -> None:
    own = ["prompt_encoder.default.embedding.weight", "base_model.lm_head.weight"]
    assert names(find_inner_model(tensors(under("net", own)), None)) == own
    others = ["net.prompt_encoder.mask_embed.weight", "net.x"]  # as SAM has
    assert names(find_inner_model(tensors(others), None)) == others


@pytest.mark.parametrize(
    ("before", "own"),
    [
        ("", BASE),
        ("pretrained_model.", BASE),
        ("pretrained_model.", PEFT),
        ("pretrained_model.", GPT2),
    ],
)
def test_trls_value_head_is_no_part_of_the_model(before: str, own: tuple[str, ...]) -> None:
    for wrapper in ("", "actor."):
        config = LLAMA if wrapper and not before else None
        given = [*(wrapper + before + name for name in own), *(wrapper + name for name in HEAD)]
        found = find_inner_model(tensors(given), None, (), config)
        assert names(found) == list(own)
        assert [t.name for t in found.value_head] == list(HEAD)


def test_what_is_tied_to_a_tensor_outside_of_the_model_is_tied_no_more() -> None:
    given = tensors(["policy.a", "other.a"])
    given = [given[0], Tensor("policy.b", "F32", (), given[0].copies, "policy.a"), given[1]]
    given.append(Tensor("policy.c", "F32", (), given[0].copies, "other.a"))
    found = find_inner_model(given, "policy")
    assert [(t.name, t.tied) for t in found.tensors] == [("a", None), ("b", "a"), ("c", None)]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (None, (None, None)),
        ("zero", ("zero", None)),
        ("dcp:a@base", ("dcp:a@base", None)),
        ("dcp:a@module=actor.x", ("dcp:a", "actor.x")),
        ("@module=actor", (None, "actor")),
        ("dcp:a@module=actor@adapter=b", ("dcp:a@adapter=b", "actor")),
        ("@module=.@base", ("@base", ".")),
    ],
)
def test_the_path_is_a_part_of_the_source(
    source: str | None, parts: tuple[str | None, str | None]
) -> None:
    assert split_source(source) == parts


# Whole merges


def values(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {n: torch.full(shape, float(i)) for i, (n, shape) in enumerate(shapes.items(), 1)}


def lora() -> dict[str, torch.Tensor]:
    module = f"base_model.model.{Q}"
    return values({f"{module}.lora_A.weight": (2, 4), f"{module}.lora_B.weight": (4, 2)})


def head() -> dict[str, torch.Tensor]:
    return values({HEAD[0]: (1, 4), HEAD[1]: (1,)})


def same(data: bytes, wanted: Mapping[str, torch.Tensor]) -> None:
    found = load(data)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_peft_model_in_a_lightning_module_is_written_as_peft_saves_it() -> None:
    state = {
        **{
            f"base_model.model.{n.replace(Q, f'{Q}.base_layer')}": t
            for n, t in values(SHAPES).items()
        },
        **{name.replace(".weight", ".default.weight"): t for name, t in lora().items()},
    }
    state = {f"policy.{name}": tensor for name, tensor in state.items()}
    state["classifier.weight"] = torch.ones(2)
    files = MemoryFiles(
        {
            "last.ckpt": saved({"state_dict": state}),
            "adapter_config.json": json.dumps(ADAPTER).encode(),
            "config.json": json.dumps(LLAMA).encode(),
        }
    )
    written, merged = run(files)
    assert list(written) == ["adapter_model.safetensors", "adapter_config.json"]
    same(written["adapter_model.safetensors"], lora())
    assert any("left out: classifier" in note for note in merged.notes)
    options = MergeOptions(source="lightning:last.ckpt@module=classifier")
    assert prepare(files, options).source == "lightning:last.ckpt@module=classifier"


def test_a_module_of_which_nothing_says_where_the_model_begins_is_in_doubt() -> None:
    state = {"state_dict": {"net.embeddings.weight": torch.ones(2)}}
    files = {"last.ckpt": saved(state), "config.json": b'{"architectures": ["BertModel"]}'}
    assert IN_DOUBT in prepare(MemoryFiles(files), MergeOptions()).notes
    whole = {"pytorch_model.bin": saved(state["state_dict"]), "config.json": files["config.json"]}
    assert IN_DOUBT in prepare(MemoryFiles(whole), MergeOptions()).notes
    job = prepare(MemoryFiles(files), MergeOptions(source="@module=net"))
    assert [t.name for t in job.plans[0].tensors] == ["embeddings.weight"]
    assert IN_DOUBT not in job.notes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("before", "frozen"), [("", ""), ("encoder.", "model.layers.0."), ("", "model.layers.1.")]
)
def test_a_value_head_model_under_deepspeed_is_written_once_with_its_head(
    stage: int, before: str, frozen: str
) -> None:
    model = values(config_shapes.shapes({**LLAMA, "num_hidden_layers": 2}))
    inner = {f"pretrained_model.{n}": t for n, t in model.items()}
    fixed = f"pretrained_model.{frozen or 'none'}"
    frozen_tensors = {n: t for n, t in inner.items() if n.startswith(fixed)}
    trained = {n: t for n, t in inner.items() if n not in frozen_tensors} | head()
    files = zero_files(Zero(stage, 2, [trained], frozen_tensors))

    # TRL's model overrides `state_dict`: the module has other names than the parameters
    def rename(state: dict[str, Any]) -> None:
        module = state["module"].items()
        state["module"] = {n.replace("pretrained_model.", before): t for n, t in module}

    for name in [n for n in files.content if n.endswith("model_states.pt")]:
        files = changed(files, name, rename)
    written, _ = run(files, MergeOptions("keep"))
    assert list(written) == ["model.safetensors", "value_head.safetensors"]
    same(written["model.safetensors"], model)
    same(written["value_head.safetensors"], head())
    plans = prepare(files, MergeOptions()).plans
    dtypes = {t.dtype for plan in plans for t in plan.tensors if frozen not in t.name or not frozen}
    assert dtypes == {"BF16"}


def test_a_parameter_that_the_module_does_not_have_gets_the_dtype_of_the_training() -> None:
    of = Zero(2, 2, [{f"pretrained_model.{n}": t for n, t in values(SHAPES).items()}])
    files = zero_files(of)
    change = {"module": {}, "ds_config": {"bf16": {"enabled": True}}}
    files = changed(files, f"{TAG}/mp_rank_00_model_states.pt", lambda c: c.update(change))
    files.content["value_head.safetensors"] = save(head())  # beside the directory of the shards
    plan, value_head = prepare(files, MergeOptions()).plans
    assert {t.dtype for t in plan.tensors} == {"BF16"}
    assert value_head.name == "value_head.safetensors"


@pytest.mark.parametrize("name", ["value_head.safetensors", "value_head.bin", "pytorch_model.bin"])
def test_a_value_head_beside_an_adapter_is_written_beside_it(name: str) -> None:
    data = save(head()) if name.endswith("safetensors") else saved(head())
    adapter = {
        "adapter_model.safetensors": save(lora()),
        "adapter_config.json": json.dumps(ADAPTER).encode(),
    }
    for above in ("", "checkpoint/"):
        files = MemoryFiles({above + n: d for n, d in {**adapter, name: data}.items()})
        written, merged = run(files)
        same(written["adapter_model.safetensors"], lora())
        same(written["value_head.safetensors"], head())
        assert merged.notes[0].endswith(f"from {above}{name}")


def test_a_value_head_beside_a_whole_model_or_in_it_is_in_no_index() -> None:
    model = values(SHAPES)
    beside = {"model.safetensors": save(model), "value_head.safetensors": save(head())}
    for content in (beside, {"model.safetensors": save(model | head())}):
        written, _ = run(MemoryFiles(content))
        same(written["model.safetensors"], model)
        same(written["value_head.safetensors"], head())
        assert "model.safetensors.index.json" not in written
        written, _ = run(MemoryFiles(content), MergeOptions(max_shard_size=100))
        index = json.loads(written["model.safetensors.index.json"])
        assert index["weight_map"].keys() == model.keys()
        same(written["value_head.safetensors"], head())


def test_a_value_head_alone_is_no_model() -> None:
    files = MemoryFiles({"pytorch_model.bin": saved(head())})
    with pytest.raises(Unsupported, match="only a value head, without its model"):
        prepare(files, MergeOptions())
