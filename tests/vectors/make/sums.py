"""../sums.json: what peft's merge_and_unload makes of adapters and bases: sums.py OUT.

Names, shapes and configurations are transformers' and peft's own; values are small whole numbers
that `value` computes from a tensor's name, so that every sum is exact, and a digest says what it
is. Recorded are the tensors that differ from the base's.
"""

import hashlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

S = dict(
    vocab_size=12, hidden_size=8, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=8,
)
MOE = dict(num_experts=3, num_experts_per_tok=1, moe_intermediate_size=6)
VISION = dict(hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
SMALL = dict(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2)
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 1]}}
QWEN_VISION = dict(
    depth=1, hidden_size=8, intermediate_size=6, num_heads=2, out_hidden_size=8, patch_size=2, spatial_merge_size=1,
    temporal_patch_size=1,
)
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return whole numbers from -2 to 2; of a factor from -1 to 1."""
    most = 3 if ".lora_" in name else 5
    numbers = np.arange(int(np.prod(shape)), dtype="u4") * np.uint32(2654435761) + np.uint32(zlib.crc32(name.encode()))
    return ((numbers >> 13) % most).astype("f4").reshape(shape) - most // 2


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()[:12]


def fill(folder: Path) -> dict[str, list[int]]:
    """Give every tensor of a directory its value; return their shapes."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        tensors = {n: torch.from_numpy(value(n, tuple(t.shape))) for n, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        shapes |= {n: list(t.shape) for n, t in tensors.items()}
    return shapes


def read(folder: Path) -> dict[str, np.ndarray]:
    return {n: t.float().numpy() for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def case(model: Any, rows: int | None = None, task: Any = None, **lora: Any) -> dict[str, Any]:
    """Return what peft makes of an adapter; ``rows``: of a resized vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, out = (Path(folder, name) for name in ("base", "adapter", "out"))
        model.save_pretrained(base)
        config = json.loads((base / "config.json").read_text())
        kind = task or type(model)

        def load() -> Any:
            loaded = kind.from_pretrained(base, dtype="auto", **({"num_labels": 3} if task else {}))
            if rows:
                loaded.resize_token_embeddings(rows)
            return loaded

        shapes = fill(base)
        before = read(base)
        get_peft_model(load(), LoraConfig(**{"r": 2, "lora_alpha": 4, **lora})).save_pretrained(adapter)
        own = fill(adapter)
        PeftModel.from_pretrained(load(), adapter).merge_and_unload().save_pretrained(out)
        after = read(out)
        peft = json.loads((adapter / "adapter_config.json").read_text())
    same = {n for n, v in after.items() if n in before and np.array_equal(v, before[n])}
    plain = {k: v for k, v in peft.items() if v not in (None, {}, [], False) and k != "base_model_name_or_path"}
    kept = {k: _kept(v) for k, v in config.items() if k in _KEPT or k.endswith("_config")}
    return {
        "config": {k: v for k, v in kept.items() if v is not None},
        "base": shapes,
        "adapter_config": plain,
        "adapter": own,
        "changed": {n: digest(v) for n, v in sorted(after.items()) if n not in same},
        "lost": sorted(before.keys() - after.keys()),
    }


_KEPT = ("model_type", "architectures", "tie_word_embeddings", "vocab_size")


def _kept(value: Any) -> Any:
    return {k: v for k, v in value.items() if k in _KEPT} or None if isinstance(value, dict) else value


def llama(tie: bool = False, layers: int = 1) -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(**{**S, "tie_word_embeddings": tie, "num_hidden_layers": layers}))


def gpt2() -> Any:
    return T.GPT2LMHeadModel(T.GPT2Config(**SMALL))


def moe() -> Any:
    return T.Qwen2MoeForCausalLM(T.Qwen2MoeConfig(**S, **MOE, shared_expert_intermediate_size=6))


def llava() -> Any:
    return T.LlavaForConditionalGeneration(
        T.LlavaConfig(text_config=T.LlamaConfig(**S), vision_config=T.CLIPVisionConfig(**VISION))
    )


def gemma3() -> Any:
    text = T.Gemma3TextConfig(**S, head_dim=4).to_dict()
    return T.Gemma3ForConditionalGeneration(T.Gemma3Config(text_config=text, vision_config=VISION))


def qwen25vl() -> Any:
    return T.Qwen2_5_VLForConditionalGeneration(T.Qwen2_5_VLConfig(text_config={**S, **MROPE}, vision_config=QWEN_VISION))


def make() -> dict[str, Any]:
    q, qv = ["q_proj"], ["q_proj", "v_proj"]
    words = ["embed_tokens", "lm_head"]
    mixtral = T.MixtralConfig(**S, num_local_experts=3, num_experts_per_tok=1)
    qwen3_vl_moe = T.Qwen3VLMoeConfig(
        text_config={**S, **MOE, **MROPE, "head_dim": 4, "mlp_only_layers": []},
        vision_config={**QWEN_VISION, "num_position_embeddings": 4, "deepstack_visual_indexes": []},
    )
    return {
        "llama": case(llama(), target_modules=qv),
        "all-linear": case(llama(), target_modules="all-linear"),
        "rslora": case(llama(), r=4, use_rslora=True, target_modules=qv),
        "patterns": case(
            llama(layers=2), target_modules=[*qv, "up_proj"], rank_pattern={"q_proj": 4, r"layers\.1\.mlp\.up_proj": 1},
            alpha_pattern={"^model.layers.0.self_attn.v_proj": 8},
        ),
        "overlap": case(llama(layers=2), target_modules=q, alpha_pattern={"q_proj": 8, r"layers\.1\.self_attn\.q_proj": 2}),
        "embeddings": case(llama(), target_modules=[*words, *q]),
        "tied-embedding": case(llama(tie=True), target_modules=["embed_tokens", *q]),
        "tied-head": case(llama(tie=True), target_modules=["lm_head", *q]),
        "saved": case(llama(), target_modules=q, modules_to_save=[*words, "norm"]),
        "saved-tied-embedding": case(llama(tie=True), target_modules=q, modules_to_save=["embed_tokens"]),
        "saved-tied-head": case(llama(tie=True), target_modules=q, modules_to_save=["lm_head"]),
        "resized": case(llama(), rows=15, target_modules=q, modules_to_save=words),
        "resized-lora": case(llama(), rows=15, target_modules=[*words, *q]),
        "smaller": case(llama(), rows=11, target_modules=q, modules_to_save=words),
        "resized-tied": case(llama(tie=True), rows=15, target_modules=["embed_tokens", *q]),
        "bias": case(T.Qwen2ForCausalLM(T.Qwen2Config(**S)), target_modules=q, bias="lora_only"),
        "biases": case(gpt2(), target_modules=["c_attn"], bias="all"),
        "lora-bias": case(gpt2(), target_modules=["c_attn"], lora_bias=True),
        "conv1d": case(gpt2(), target_modules=["c_attn", "c_proj", "c_fc", "wte"]),
        "conv1d-square": case(gpt2(), target_modules=r".*attn.c_proj"),
        "linear-square": case(T.GPTBigCodeForCausalLM(T.GPTBigCodeConfig(**SMALL)), target_modules=r".*attn.c_proj"),
        "tokens": case(llama(), target_modules=q, trainable_token_indices=[3, 7]),
        "tokens-tied": case(llama(tie=True), target_modules=q, trainable_token_indices=[7, 3]),
        "tokens-both": case(llama(), target_modules=q, trainable_token_indices={"embed_tokens": [5, 1], "lm_head": [2]}),
        "experts": case(moe(), target_modules=q, target_parameters=BOTH),
        "experts-down": case(moe(), target_modules=q, target_parameters=BOTH[1:]),
        "experts-saved": case(moe(), target_modules=q, modules_to_save=["mlp"]),
        "router": case(moe(), target_modules=q, target_parameters=["mlp.gate.weight"]),
        "mixtral": case(T.MixtralForCausalLM(mixtral), target_modules=q, target_parameters=BOTH),
        "gpt-oss": case(
            T.GptOssForCausalLM(T.GptOssConfig(**S, head_dim=4, num_local_experts=3, num_experts_per_tok=1)),
            target_modules=q, target_parameters=BOTH,
        ),
        "qwen3-vl-moe": case(
            T.Qwen3VLMoeForConditionalGeneration(qwen3_vl_moe), target_modules=q, target_parameters=BOTH
        ),
        "llava": case(llava(), target_modules=[*qv, "lm_head", "linear_1"]),
        "convolution": case(llava(), target_modules=["patch_embedding"]),
        "gemma3": case(gemma3(), target_modules=qv),
        "qwen2.5-vl": case(qwen25vl(), target_modules=[*q, "qkv", "patch_embed.proj"]),
        "classifier": case(llama(), task=T.LlamaForSequenceClassification, target_modules=q, task_type="SEQ_CLS"),
        "t5": case(
            T.T5ForConditionalGeneration(T.T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=6, num_layers=1, num_heads=2)),
            target_modules=["q", "shared"],
        ),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    text = json.dumps(make(), separators=(",", ":"), sort_keys=True)
    Path(sys.argv[1]).write_text(text.replace('},"', '},\n"') + "\n")
