"""Names in files and in memory, family by family; the campaign `names_of` asks transformers."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.layouts.weight_renaming import Place, places

L = "model.layers.0"
QWEN2_5 = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
SIGLIP = {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}}
NESTED = {"model_type": "llava", "text_config": {"model_type": "mixtral"}}


@pytest.mark.parametrize(
    ("config", "file", "memory"),
    [
        ({}, f"{L}.x.weight", f"{L}.x.weight"),
        ({"model_type": "no such"}, f"{L}.block_sparse_moe.gate", f"{L}.block_sparse_moe.gate"),
        ({"model_type": "mixtral"}, f"{L}.block_sparse_moe.gate.weight", f"{L}.mlp.gate.weight"),
        ({"model_type": "llava"}, "language_model.lm_head.weight", "lm_head.weight"),
        ({"model_type": "gemma3"}, "language_model.model.norm", "model.language_model.norm"),
        (SIGLIP, "vision_tower.vision_model.head.x", "model.vision_tower.head.x"),
        (SIGLIP, "model.vision_tower.head.x", "model.vision_tower.head.x"),
        (QWEN2_5, "visual.blocks.0.x", "model.visual.blocks.0.x"),
        (QWEN2_5, "model.layers.0.x", "model.language_model.layers.0.x"),
        (QWEN2_5, "model.language_model.layers.0.x", "model.language_model.layers.0.x"),
        (QWEN2_5, "lm_head.weight", "lm_head.weight"),
        ({"architectures": ["GPTNeoXForCausalLM"]}, "embed_out.weight", "lm_head.weight"),
        ({"model_type": "bert"}, "x.LayerNorm.gamma", "x.LayerNorm.weight"),
        ({"model_type": "deepseek_v4"}, f"{L}.attn.norm.weight", f"{L}.self_attn.kv_norm.weight"),
        ({"model_type": "deepseek_v4"}, "model.norm.weight", "model.norm.weight"),
        ({"architectures": [7], "model_type": []}, "x", "x"),
    ],
)
def test_a_tensor_that_is_whole_has_one_place(
    config: dict[str, Any], file: str, memory: str
) -> None:
    assert places([file], config) == {file: (Place(memory),)}


@pytest.mark.parametrize(
    ("config", "file", "its"),
    [
        (
            {"model_type": "mixtral"},
            f"{L}.block_sparse_moe.experts.7.w3.weight",
            [Place(f"{L}.mlp.experts.gate_up_proj", 7, 1, 2)],
        ),
        (
            {"model_type": "qwen3_moe"},
            f"{L}.mlp.experts.12.down_proj.weight",
            [Place(f"{L}.mlp.experts.down_proj", 12)],
        ),
        (
            NESTED,
            "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight",
            [Place("model.language_model.layers.0.mlp.experts.gate_up_proj", 0, 0, 2)],
        ),
        (
            {"model_type": "nomic_bert"},
            "encoder.layers.0.attn.Wqkv.weight",
            [
                Place(f"layers.0.self_attn.{n}_proj.weight", part=p, parts=3)
                for p, n in enumerate("qkv")
            ],
        ),
        (
            {"model_type": "qwen3_vl_moe"},
            "model.language_model.layers.0.mlp.experts.down_proj",
            [Place("model.language_model.layers.0.mlp.experts.down_proj", may_transpose=True)],
        ),
    ],
)
def test_what_is_split_or_fused_says_which_piece_it_is(
    config: dict[str, Any], file: str, its: list[Place]
) -> None:
    assert places([file], config) == {file: tuple(its)}
