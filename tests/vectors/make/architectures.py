"""Write ../architectures.json: configurations as save_pretrained writes them, and the tensors that transformers makes of each."""

import json
from pathlib import Path

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

SIZES = {
    "vocab_size": 71,
    "hidden_size": 20,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"head_dim": 6, "tie_word_embeddings": False}
BIASED = {
    "head_dim": 8,
    **{name: True for name in ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias")},
    "tie_word_embeddings": True,
    "num_hidden_layers": 1,
}
SHARING = {"hidden_size": 24, "num_hidden_layers": 1}  # for the classes that can do without head_dim
EXPERTS = {
    "moe_intermediate_size": 11,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 3,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 13,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {**EXPERTS, "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3, "hidden_size": 24}
OF_DENSE = "Llama Mistral Ministral Ministral3 Qwen2 Qwen3 Gemma Gemma2 Gemma3 Granite SmolLM3 SeedOss Ernie4_5 HunYuanDenseV1 Glm Glm4 Cohere2"
SHARES = "Llama Mistral Qwen2 Granite SmolLM3 Exaone4 Olmo Olmo2 Olmo3 Cohere Phi Phi3 Starcoder2 StableLm"
# Class → further options, each in a configuration of its own.
MORE = {
    "Cohere": ({**SHARING, "use_qk_norm": True, "attention_bias": True},),
    "Phi": ({**SHARING, "qk_layernorm": True, "tie_word_embeddings": True},),
    "StableLm": ({**SHARING, "use_parallel_residual": True, "use_qkv_bias": True},),
    "Starcoder2": ({**SHARING, "use_bias": False},),
    "GPT2": ({"n_embd": 20, "n_layer": 2, "n_head": 4, "n_positions": 33}, {"n_embd": 20, "n_layer": 1, "n_head": 4, "n_positions": 33, "n_inner": 23}),
    "GPTNeoX": ({}, {"attention_bias": False}),
    "Bloom": ({"n_layer": 2, "n_head": 4},),
    "OPT": (
        {"ffn_dim": 23, "max_position_embeddings": 33, "word_embed_proj_dim": 20},
        {"ffn_dim": 23, "max_position_embeddings": 33, "word_embed_proj_dim": 20, "do_layer_norm_before": False, "enable_bias": False},
    ),
    "Mixtral": ({**EXPERTS, "head_dim": 6}, {**EXPERTS, **SHARING}),
    "Qwen2Moe": ({**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2}, {**EXPERTS, "qkv_bias": False, "mlp_only_layers": [0]}),
    "Qwen3Moe": ({**EXPERTS, "head_dim": 6}, {**EXPERTS, "head_dim": 6, "attention_bias": True, "mlp_only_layers": [1]}),
    "Olmoe": (EXPERTS, {**EXPERTS, "attention_bias": True}),
    "Glm4Moe": ({**EXPERTS, "head_dim": 6}, {**EXPERTS, "head_dim": 6, "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 1}),
    "DeepseekV2": (LATENT, {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0}),
    "DeepseekV3": (LATENT, {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    "GptOss": ({**EXPERTS, "head_dim": 6}, {**EXPERTS, "head_dim": 6, "attention_bias": False}),
}
NAMES = {"GPT2": "GPT2LMHeadModel"}


def described(name: str, options: dict[str, object]) -> dict[str, object]:
    """Return one configuration, and the names and shapes of its model's state dict, in memory and as it is saved."""
    kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = kind(**{**SIZES, **options})
    with torch.device("meta"):
        model = getattr(transformers, NAMES.get(name, f"{name}ForCausalLM"))(config)
    config.architectures = [type(model).__name__]
    state = model.state_dict()
    shapes = {key: list(value.shape) for key, value in state.items()}
    stored = {key: list(value.shape) for key, value in revert_weight_conversion(model, dict(state)).items()}
    told = {"config": json.loads(config.to_json_string()), "shapes": shapes}
    return told | ({"stored": stored} if stored != shapes else {})


def main() -> None:
    """Write every class with every set of options that it can have."""
    pairs = [(name, options) for name in OF_DENSE.split() for options in (WIDE, BIASED)]
    pairs += [(name, SHARING) for name in SHARES.split()]
    pairs += [(name, options) for name, several in MORE.items() for options in several]
    found = [described(name, options) for name, options in pairs]
    path = Path(__file__).resolve().parent.parent / "architectures.json"
    path.write_text("[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in found) + "\n]\n")
    print(f"{len(found)} configurations, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
