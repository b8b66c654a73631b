"""What a configuration implies must be there; what only seems to be missing is a doubt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ckptsync.errors import Incomplete
from ckptsync.layouts.zero import WITHOUT_FROZEN
from ckptsync.merger.completeness import check_adapter, check_model
from ckptsync.tensors import Shape, Tensor
from tests.support.vector import ROOT

MODELS: list[dict[str, Any]] = json.loads((ROOT / "architectures.json").read_text())
Shapes = dict[str, Shape]


def model(kind: str) -> tuple[dict[str, Any], Shapes]:
    """Return the first configuration of a class, and what save_pretrained stores of its model."""
    of = next(m for m in MODELS if m["config"]["architectures"][0].startswith(kind))
    told = of.get("stored", of["shapes"])
    return dict(of["config"]), {name: tuple(shape) for name, shape in told.items()}


def check(found: Mapping[str, Shape], config: Mapping[str, Any] | None) -> str:
    """Return the doubts about a model of these shapes."""
    return "; ".join(check_model([Tensor(n, "F32", s, ()) for n, s in found.items()], config))


def without(found: Shapes, part: str) -> Shapes:
    return {name: shape for name, shape in found.items() if part not in name}


@pytest.mark.parametrize("of", MODELS, ids=lambda m: m["config"]["architectures"][0])
def test_what_transformers_makes_is_whole(of: dict[str, Any]) -> None:
    nameless = {**of["config"], "architectures": ["OfMyOwnForCausalLM"]}
    for form in {"shapes", "stored"} & of.keys():
        told = {name: tuple(shape) for name, shape in of[form].items()}
        assert check(told, of["config"]) == check(told, nameless) == ""


def test_an_embedding_of_opt_may_be_narrower_than_its_layers() -> None:
    config, found = model("OPT")
    narrow = {
        n: (s[0], 10) if "embed_tokens" in n or "lm_head" in n else s for n, s in found.items()
    }
    sides = {
        "model.decoder.project_in.weight": (20, 10),
        "model.decoder.project_out.weight": (10, 20),
    }
    config["word_embed_proj_dim"] = 10
    assert check(narrow | sides, config) == ""


def test_a_tied_head_need_not_be_there_under_its_own_name_or_that_of_the_embedding() -> None:
    config, found = model("LlamaForCausalLM")
    config["tie_word_embeddings"] = True
    assert check(without(found, "lm_head"), config) == ""
    assert check(without(found, "embed_tokens"), config) == ""
    with pytest.raises(Incomplete, match="embed_tokens"):
        check(without(without(found, "embed_tokens"), "lm_head"), config)


MISSING: dict[str, tuple[str, str]] = {
    "the last layer": ("Llama", "model.layers.1."),
    "a tensor": ("Qwen3ForCausalLM", "layers.0.self_attn.k_norm.weight"),
    "the last norm": ("Qwen2ForCausalLM", "model.norm.weight"),
    "the head": ("MistralForCausalLM", "lm_head.weight"),
    "biases": ("Qwen2ForCausalLM", "v_proj.bias"),
    "an expert of one layer": ("Qwen3Moe", "layers.1.mlp.experts.2."),
    "an expert of every layer": ("Mixtral", "experts.2."),
    "the router": ("DeepseekV3", "mlp.gate.weight"),
    "positions": ("GPT2", "wpe"),
}


@pytest.mark.parametrize(("kind", "part"), MISSING.values(), ids=MISSING)
def test_what_a_known_class_lacks_is_incomplete(kind: str, part: str) -> None:
    config, found = model(kind)
    tensors = [Tensor(n, "F32", shape, ()) for n, shape in without(found, part).items()]
    with pytest.raises(Incomplete, match=r"that config\.json implies are missing"):
        check_model([*tensors, Tensor("counts", "U8", (3,), ())], config)
    check_model([*tensors, Tensor("packed.weight", "U8", (3, 3), ())], config)  # quantised


def test_frozen_parameters_that_a_save_says_it_left_out_are_a_doubt() -> None:
    config, found = model("LlamaForCausalLM")
    first, *rest = [Tensor(n, "F32", s, ()) for n, s in without(found, "embed_tokens").items()]
    (doubt,) = check_model([replace(first, remark=f"x; {WITHOUT_FROZEN}"), *rest], config)
    assert "1 of the 21 tensors that config.json implies are missing" in doubt


def test_biases_that_a_flag_demands_must_be_there() -> None:
    config, found = model("LlamaForCausalLM")
    with pytest.raises(Incomplete, match=r"8 of the 29 tensors .* model.layers.0.self_attn.q_p"):
        check(found, {**config, "attention_bias": True})


def test_half_a_vocabulary_is_incomplete_and_a_larger_one_is_said() -> None:
    config, found = model("LlamaForCausalLM")
    rows, width = found["lm_head.weight"]
    with pytest.raises(Incomplete, match=r"lm_head.weight: 35 x 20 is a part of 71 x 20"):
        check({**found, "lm_head.weight": (rows // 2, width)}, config)
    padded = {n: (128, width) if s == (rows, width) else s for n, s in found.items()}
    assert "128 rows, config.json implies 71" in check(padded, config)


def test_a_tensor_that_is_larger_in_any_way_is_no_part_but_of_another_shape() -> None:
    config, found = model("LlamaForCausalLM")
    name = "model.layers.0.mlp.down_proj.weight"
    height, width = found[name]
    for shape in ((height * 2, width // 2), (height // 2, width * 2), (height,)):
        said = check({**found, name: shape}, config)
        assert f"1 tensors have not the shapes that config.json implies, such as {name}" in said


def test_experts_in_one_tensor_may_be_too_few() -> None:
    of = next(m for m in MODELS if m["config"]["model_type"] == "qwen3_moe")
    found = {name: tuple(shape) for name, shape in of["shapes"].items()}
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(Incomplete, match="is a part of"):
        check({**found, name: (2, *found[name][1:])}, of["config"])


@pytest.mark.parametrize("config", [None, {}, {"architectures": ["OfMyOwn"]}])
def test_weights_that_were_not_gathered_are_incomplete_whatever_they_are_of(
    config: dict[str, Any] | None,
) -> None:
    with pytest.raises(Incomplete, match="1 of 2 tensors are empty") as refused:
        check({"a.weight": (0,), "b.weight": (3,)}, config)
    assert "stage3_gather_16bit_weights_on_model_save" in str(refused.value.hint)
    assert check({"observer.min_val": (0,), "b.weight": (3,)}, config) == ""


Change = Callable[[dict[str, Any], Shapes], tuple[dict[str, Any], Shapes]]
SOUND: dict[str, Change] = {
    "another head": lambda c, f: (c, {**without(f, "lm_head"), "score.weight": (2, 20)}),
    "no head, of a class without": lambda c, f: (
        c,
        {n.removeprefix("model."): s for n, s in without(f, "lm_head").items()},
    ),
    "more layers: multi-token prediction": lambda c, f: (
        c,
        f | {n.replace("layers.1", "layers.2"): s for n, s in f.items() if "layers.1" in n},
    ),
    "a buffer of old": lambda c, f: (c, f | {"model.layers.0.rotary_emb.inv_freq": (3,)}),
    "in an attribute": lambda c, f: (c, {f"language_model.{n}": s for n, s in f.items()}),
    "quantised": lambda c, f: ({**c, "quantization_config": {"bits": 4}}, without(f, "q_proj.w")),
    "of an unknown name": lambda c, f: (c, {f"policy.{n}": s for n, s in f.items()}),
}


@pytest.mark.parametrize("change", SOUND.values(), ids=SOUND)
def test_a_sound_model_is_not_refused(change: Change) -> None:
    config, found = change(*model("LlamaForCausalLM"))
    check(found, config)


DOUBTS: dict[str, tuple[Callable[[Shapes], Shapes], str]] = {
    "layers": (lambda f: without(f, "layers.2."), "layer 2 is missing, of 4"),
    "last": (lambda f: without(f, "layers.3."), "3 layers, config.json says num_hidden_layers 4"),
    "tensor": (lambda f: without(f, "layers.1.c.weight"), "layers.1 has no c.weight"),
    "expert": (lambda f: without(f, "layers.1.mlp.experts.1"), "1 experts, 2 in other layers"),
    "experts": (lambda f: without(f, "experts.1."), "1 experts in a layer"),
    "head": (lambda f: without(f, "lm_head"), "no output layer"),
    "hollow": (lambda f: f | {"x.weight": (0, 3)}, "1 weights have no elements"),
}


@pytest.mark.parametrize(("change", "doubt"), DOUBTS.values(), ids=DOUBTS)
def test_what_an_unknown_class_seems_to_lack_is_a_doubt(
    change: Callable[[Shapes], Shapes], doubt: str
) -> None:
    config = {
        "architectures": ["OfMyOwnForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 7,
        "num_experts": 2,
        "tie_word_embeddings": False,
    }
    parts = ("a.weight", "b.weight", "c.weight", "mlp.experts.0.w", "mlp.experts.1.w")
    found: Shapes = {f"net.layers.{n}.{part}": (7, 7) for n in range(4) for part in parts}
    found |= {"net.embed_tokens.weight": (9, 7), "lm_head.weight": (9, 7)}
    assert check(found, config) == ""
    for told in (config, {"architectures": config["architectures"], "text_config": config}):
        assert doubt in check(change(found), told)


def test_layers_of_a_vision_model_beside_a_known_class_are_compared_with_each_other() -> None:
    config, found = model("LlamaForCausalLM")
    found |= {f"vision.layers.{n}.{part}": (3,) for n in (0, 1, 3) for part in "abc"}
    assert "vision.layers: layer 2 is missing" in check(found, config | {"vision_config": {}})


def test_layers_of_several_kinds_are_no_doubt() -> None:
    of = {n: ("norm.w", "out.w", "q.w" if n % 4 == 3 else "mamba.a") for n in range(8)}
    found: Shapes = {f"layers.{n}.{part}": (7,) for n, parts in of.items() for part in parts}
    found |= {f"mlp.{n}.{part}": (3,) for n in (0, 2) for part in ("weight", "bias")}
    assert check(found, {"num_hidden_layers": 8, "hidden_size": 7}) == ""
    assert check(found, {"num_layers": 9}) == ""  # which other parts than a transformer have, too


@pytest.mark.parametrize("number", [0, 3])
def test_the_first_and_last_layer_may_differ_but_in_a_language_model(number: int) -> None:
    found: Shapes = {f"h.{n}.{part}.w": (7,) for n in range(4) for part in "abcd"}
    less = without(found, f"h.{number}.d")
    assert check(less, {}) == ""
    causal = {"architectures": ["OfMyOwnForCausalLM"]}
    assert f"h.{number} has no d.w" in check(less, causal)
    assert check(without(less, "h.1.d"), causal) == ""  # two are a kind of their own


def adapter(layers: int = 4, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> list[str]:
    return [
        f"base_model.model.model.layers.{n}.self_attn.{target}.lora_{half}.weight"
        for n in range(layers)
        for target in targets
        for half in "AB"
    ]


def doubts(names: list[str], **config: object) -> str:
    return "; ".join(check_adapter([Tensor(name, "F32", (2, 2), ()) for name in names], config))


@pytest.mark.parametrize("number", ["999999999", "9" * 5000])
def test_a_number_in_a_name_takes_neither_time_nor_memory(number: str) -> None:
    """What a file names is bounded: nobody counts to it."""
    parts = ("a.weight", "b.weight", "c.weight")
    names = [f"model.layers.{n}.{part}" for n in ("0", number) for part in parts]
    experts = [f"model.layers.{n}.experts.{number}.w.weight" for n in ("0", number)]
    said = check(dict.fromkeys([*names, *experts], (2, 2)), None)
    assert ("layers 1, 2, 3 and 999999995 more are missing" in said) == (len(number) < 10)
    factors = [
        f"base_model.model.layers.{n}.q.lora_{ab}.weight" for n in ("0", number) for ab in "AB"
    ]
    check_adapter([Tensor(n, "F32", (2, 2), ()) for n in factors], {"target_modules": ["q"]})


def test_an_adapter_lacks_a_target_or_a_layer() -> None:
    targets = ["q_proj", "v_proj"]
    assert doubts(adapter(), target_modules=targets) == ""
    assert "target modules o_proj" in doubts(adapter(), target_modules=[*targets, "o_proj"])
    gap = [name for name in adapter() if ".layers.2." not in name]
    assert "layer 2 is missing, of 4" in doubts(gap, target_modules=targets)
    assert doubts(gap, target_modules=targets, layers_to_transform=[0, 1, 3]) == ""
    excluded = {"target_modules": [*targets, "o_proj"], "exclude_modules": ["o_proj"]}
    assert doubts(adapter(), **excluded) == doubts(gap, **excluded) == ""
    assert doubts(gap, target_modules=r".*layers\.[013]\..*_proj") == ""
    assert doubts([*gap, "base_model.model.lm_head.weight"]) == ""
    assert "modules_to_save" in doubts(gap, target_modules="x", modules_to_save=["score"])


def test_half_an_adapter_and_an_empty_one_are_incomplete() -> None:
    for half in (adapter()[1:], ["base_model.model.e.lora_embedding_A"]):
        with pytest.raises(Incomplete, match="the other one is missing"):
            doubts(half)
    with pytest.raises(Incomplete, match="1 of 1 tensors are empty"):
        check_adapter([Tensor(adapter()[0], "F32", (0,), ())], None)
