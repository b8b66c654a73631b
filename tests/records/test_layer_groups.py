"""Groups of layers, by names of tensors as the families have them."""

from __future__ import annotations

import pytest

from ckptsync.records.layer_groups import layer_group

NAMES = {
    # Llama, Qwen2, Mistral
    "model.embed_tokens.weight": "embeddings",
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.self_attn.q_norm.weight": "norm",
    "model.layers.0.mlp.gate_proj.weight": "mlp",
    "model.layers.0.input_layernorm.weight": "norm",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
    # Mixtral, Qwen2-MoE, fused experts
    "model.layers.0.block_sparse_moe.gate.weight": "mlp",
    "model.layers.0.block_sparse_moe.experts.7.w1.weight": "mlp",
    "model.layers.0.mlp.experts.gate_up_proj": "mlp",
    # DeepSeek
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "attention",
    # Qwen2-VL
    "visual.patch_embed.proj.weight": "embeddings",
    "visual.blocks.0.attn.qkv.weight": "attention",
    "visual.blocks.0.mlp.fc1.weight": "mlp",
    "visual.merger.ln_q.weight": "norm",
    # GPT-2
    "transformer.wte.weight": "embeddings",
    "wpe.weight": "embeddings",
    "h.0.attn.c_attn.weight": "attention",
    "h.0.ln_1.weight": "norm",
    "transformer.ln_f.bias": "norm",
    # GPT-NeoX, OPT, Bloom
    "gpt_neox.embed_in.weight": "embeddings",
    "gpt_neox.layers.0.attention.dense.weight": "attention",
    "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": "mlp",
    "embed_out.weight": "head",
    "model.decoder.layers.0.fc2.weight": "mlp",
    "transformer.word_embeddings_layernorm.weight": "norm",
    # BERT
    "bert.embeddings.word_embeddings.weight": "embeddings",
    "bert.encoder.layer.0.attention.self.query.weight": "attention",
    "bert.encoder.layer.0.attention.output.dense.weight": "attention",
    "bert.encoder.layer.0.intermediate.dense.weight": "mlp",
    "bert.encoder.layer.0.output.dense.weight": "mlp",
    "bert.pooler.dense.weight": "head",
    "cls.predictions.decoder.weight": "head",
    "classifier.weight": "head",
    # T5
    "shared.weight": "embeddings",
    "encoder.block.0.layer.0.SelfAttention.q.weight": "attention",
    "decoder.block.0.layer.1.EncDecAttention.v.weight": "attention",
    "decoder.block.0.layer.2.DenseReluDense.wi_0.weight": "mlp",
    "encoder.block.0.layer.0.layer_norm.weight": "norm",
    # adapters, whole and within a module
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": "lora_a",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight": "lora_b",
    "base_model.model.model.embed_tokens.lora_embedding_A": "lora_a",
    "base_model.model.lm_head.modules_to_save.weight": "head",
    # reward models, unknown names
    "v_head.summary.weight": "head",
    "multi_modal_projector.linear_1.weight": "other",
    "weight": "other",
    "": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_is_of_the_group_that_its_innermost_module_names(name: str) -> None:
    assert layer_group(name) == NAMES[name]
