"""Write small random models of many architectures: as in memory, and as save_pretrained has them.

A child of `tests.campaigns.names_of`, run with the Python that has torch and transformers:
``architectures.py DIRECTORY [CLASS …]``; by torchrun, on several ranks, in shards.  Prints a line
of JSON for each model.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as dcp
import transformers
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "embed_dim": 32,
    "dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "depth": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "audio_token_id": 7,
    "audio_token_index": 7,
    "sliding_window": 16,
    "layer_types": None,
    "mlp_layer_types": None,
    "mamba_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CLASSES = """
LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MistralForCausalLM Gemma3ForCausalLM
GPT2LMHeadModel GPTNeoXForCausalLM Phi3ForCausalLM MixtralForCausalLM Qwen2MoeForCausalLM
Qwen3MoeForCausalLM OlmoeForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
Glm4MoeForCausalLM PhimoeForCausalLM Ernie4_5_MoeForCausalLM GraniteMoeForCausalLM
GptOssForCausalLM JambaForCausalLM Lfm2MoeForCausalLM MiniMaxM2ForCausalLM NemotronHForCausalLM
Qwen3NextForCausalLM HunYuanMoEV1ForCausalLM FlexOlmoForCausalLM Dots1ForCausalLM AfmoeForCausalLM
ExaoneMoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM BertForMaskedLM
T5ForConditionalGeneration WhisperForConditionalGeneration LlavaForConditionalGeneration
LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration
Gemma3ForConditionalGeneration PaliGemmaForConditionalGeneration Mistral3ForConditionalGeneration
InternVLForConditionalGeneration AyaVisionForConditionalGeneration AriaForConditionalGeneration
Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration
Qwen3VLMoeForConditionalGeneration Qwen2AudioForConditionalGeneration
Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration Idefics3ForConditionalGeneration
MllamaForConditionalGeneration Llama4ForConditionalGeneration VideoLlavaForConditionalGeneration
Gemma3nForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
PaddleOCRVLForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration
""".split()  # noqa: SIM905


def shrink(config: Any, name: str = "") -> None:
    """Set a configuration's numbers to small ones, and those of its sections."""
    for key, value in SIZES.items():
        own = getattr(config, key, None)
        if own is None or isinstance(own, (dict, tuple)) or (isinstance(own, list) and value):
            continue
        if key in {"layer_types", "mlp_layer_types"}:
            config.__dict__[key] = own[:2]
            continue
        try:
            setattr(config, key, value)
        except Exception as e:  # noqa: BLE001 - a property of some classes
            print(f"{name}.{key}: {e}", file=sys.stderr)
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            shrink(inner, f"{name}.{key}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for one in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(one, dict) and "mrope_section" in one:
            one["mrope_section"] = [2, 1, 1]


def build(name: str) -> Any:
    """Return a small random model of a class."""
    cls = getattr(transformers, name)
    config = cls.config_class()
    shrink(config, name)
    torch.manual_seed(0)
    model = cls(config).to(torch.bfloat16)
    seen = set()
    for tensor in model.state_dict().values():
        if tensor.data_ptr() not in seen and tensor.is_floating_point():
            seen.add(tensor.data_ptr())
            tensor.uniform_(-1, 1)  # norms of ones would hide that two were exchanged
    return model


def write(name: str, out: Path) -> dict[str, Any]:
    """Write a model as files, twice as in memory, and without every third tensor."""
    model = build(name)
    state = model.state_dict()
    model.save_pretrained(out / "base", max_shard_size="64KB")
    whole = {key: value.detach().clone().contiguous() for key, value in state.items()}
    (out / "whole").mkdir()
    save_file(whole, out / "whole/model.safetensors", {"format": "pt"})
    model.config.save_pretrained(out / "whole")
    dcp.save({"model": state}, checkpoint_id=out / "dcp", no_dist=True)
    model.config.save_pretrained(out / "dcp")
    part = {key: value for n, (key, value) in enumerate(state.items()) if n % 3}
    dcp.save({"model": part}, checkpoint_id=out / "part", no_dist=True)
    model.config.save_pretrained(out / "part")
    return {"name": name, "tensors": len(state), "model_type": model.config.model_type}


def write_shards(name: str, out: Path) -> dict[str, Any]:
    """Write a model that is sharded by FSDP2: a distributed checkpoint, and a file a rank."""
    model, rank = build(name), dist.get_rank()
    if rank == 0:
        model.save_pretrained(out / "base", max_shard_size="64KB")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=out / "fsdp2")
    (out / "ranks").mkdir(exist_ok=True)
    torch.save(state, out / f"ranks/model_world_size_{dist.get_world_size()}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(out / "fsdp2")
        model.config.save_pretrained(out / "ranks")
    dist.barrier()
    return {"name": name, "tensors": len(state), "model_type": model.config.model_type}


def main(directory: str, *names: str) -> None:
    """Write the models of these classes, or of all."""
    is_sharded = "WORLD_SIZE" in os.environ
    if is_sharded:
        dist.init_process_group("gloo")
    for name in names or CLASSES:
        try:
            out = Path(directory) / name
            out.mkdir(parents=True, exist_ok=is_sharded)
            found = (write_shards if is_sharded else write)(name, out)
        except Exception as e:  # noqa: BLE001 - of many classes some need numbers of their own
            traceback.print_exc(limit=-3, file=sys.stderr)
            found = {"name": name, "error": f"{type(e).__name__}: {e}"[:300]}
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
