"""What a configuration implies, against the models that transformers makes of such
configurations.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptsync.errors import Corrupt
from ckptsync.layouts.config_shapes import HEAD, MOST_LAYERS, expected, parsed, shapes, ties
from tests.support.vector import ROOT

MODELS: list[dict[str, Any]] = json.loads((ROOT / "architectures.json").read_text())
LLAMA: dict[str, Any] = MODELS[0]["config"]


@pytest.mark.parametrize(
    "of", MODELS, ids=lambda m: f"{m['config']['model_type']}-{m['config'].get('head_dim')}"
)
def test_every_name_and_shape_is_what_transformers_makes(of: dict[str, Any]) -> None:
    for form in {"shapes", "stored"} & of.keys():
        told = {name: tuple(shape) for name, shape in of[form].items()}
        assert shapes(of["config"], told) == told


def test_what_is_left_to_a_default_is_not_demanded_but_the_rest_is() -> None:
    old = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "num_key_value_heads")}
    found = expected(old).sizes
    assert found["model.layers.1.self_attn.k_proj.weight"] == (None, 20)
    assert found.keys() == shapes(LLAMA).keys()


UNSAID = {
    "another class": {"architectures": ["LlamaForSequenceClassification"]},
    "two classes": {"architectures": ["LlamaForCausalLM", "LlamaModel"]},
    "no class": {"architectures": None},
    "a class that is no text": {"architectures": [{}]},
    "quantised": {"quantization_config": {"bits": 4}},
    "no vocabulary": {"vocab_size": None},
    "a number that is text": {"hidden_size": "20"},
    "a number that is true": {"num_hidden_layers": True},
    "nothing": {"intermediate_size": 0},
    "layers without end": {"num_hidden_layers": MOST_LAYERS + 1},
    "a flag that is not told": {"attention_bias": None},
    "heads that do not share the hidden size": {"head_dim": None, "num_attention_heads": 3},
    "no heads": {"head_dim": None, "num_attention_heads": 0},
    "heads that are text": {"head_dim": None, "num_attention_heads": "4"},
}


@pytest.mark.parametrize("change", UNSAID.values(), ids=UNSAID)
def test_what_is_not_said_exactly_implies_nothing(change: dict[str, Any]) -> None:
    assert shapes(LLAMA)
    assert shapes({**LLAMA, **change}) == {}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mixtral", {"num_local_experts": MOST_LAYERS + 1}),
        ("mixtral", {"num_hidden_layers": MOST_LAYERS, "num_local_experts": 99}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("opt", {"word_embed_proj_dim": 10}),  # it projects in and out
    ],
)
def test_what_a_kind_of_model_does_not_say_exactly_implies_nothing(
    kind: str, change: dict[str, Any]
) -> None:
    of = next(model for model in MODELS if model["config"]["model_type"] == kind)
    names = of.get("stored", of["shapes"])
    assert shapes(of["config"], names)
    assert shapes({**of["config"], **change}, names) == {}


def test_a_text_model_inside_of_another_implies_what_there_is_and_not_all() -> None:
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "text_config": LLAMA}
    assert expected(config).sizes
    assert shapes(config) == {}


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("llama", k) for k in ("num_key_value_heads", "vocab_size", "mlp_bias", "architectures")),
        ("deepseek_v3", "q_lora_rank"),
    ],
)
def test_a_default_that_is_left_out_is_not_filled_in(kind: str, key: str) -> None:
    of = next(model for model in MODELS if model["config"]["model_type"] == kind)
    config = {name: value for name, value in of["config"].items() if name != key}
    assert shapes(config, of.get("stored", of["shapes"])) == {}


def test_ties_are_what_the_configuration_says_and_both_names_are_known() -> None:
    assert ties({"tie_word_embeddings": True})
    assert not any(
        ties(told) for told in ({}, {"tie_word_embeddings": None}, {"tie_word_embeddings": "yes"})
    )
    assert HEAD in shapes({**LLAMA, "tie_word_embeddings": True})


def test_what_is_no_configuration_is_corrupt() -> None:
    for data in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"5"):
        with pytest.raises(Corrupt, match=r"sub/config.json: not a configuration"):
            parsed("sub/config.json", data)
    assert parsed("config.json", b"{}") == {}
