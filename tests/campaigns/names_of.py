"""``merge --names-of`` and ``--fill-from`` against transformers, architecture by architecture.

    python -m tests.campaigns.names_of
    python -m tests.campaigns.names_of --classes MixtralForCausalLM LlavaForConditionalGeneration

For every class a small random model is written under its names in memory: as one file, and as a
distributed checkpoint that lacks every third tensor.  Each must become, bit for bit, what
``save_pretrained`` has written of the same model.  Classes that cannot be built so small are named
and not judged.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver as dcp

from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, verdict, working
from tests.support.vector import bits

LEAST = 20  # architectures whose names in memory are not those of their files
# None of a tied embedding's names that this one lacks is the one in the files: refused.
_REFUSED = ("T5ForConditionalGeneration/part",)
SIZES = {
    32: "hidden_size n_embd d_model embed_dim dim out_hidden_size projection_dim",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim",
    24: "moe_intermediate_size",
    40: "shared_expert_intermediate_size",
    2: (
        "num_hidden_layers n_layer num_layers depth encoder_layers decoder_layers "
        "num_key_value_heads num_experts_per_tok moe_k eos_token_id linear_num_key_heads"
    ),
    4: (
        "num_attention_heads num_heads n_head encoder_attention_heads decoder_attention_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts video_token_id "
        "mamba_num_heads linear_num_value_heads"
    ),
    8: (
        "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_n_heads mamba_head_dim "
        "mamba_d_head mamba_d_state ssm_state_size linear_key_head_dim linear_value_head_dim"
    ),
    96: "vocab_size",
    1: "n_group topk_group first_k_dense_replace moe_layer_start_index bos_token_id",
    16: "q_lora_rank kv_lora_rank sliding_window",
    64: "max_position_embeddings n_positions",
    28: "image_size",
    14: "patch_size",
    0: "pad_token_id",
    3: "image_token_id image_token_index",
    5: "vision_start_token_id",
    6: "vision_end_token_id",
    7: "audio_token_id audio_token_index",
    None: "layer_types mlp_layer_types",
}
"""Value → the settings that get it."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every model was as save_pretrained wrote it, 1 if not."""
    parser = arguments(__doc__, "home")
    parser.add_argument("--classes", nargs="*", default=CLASSES)
    args = parser.parse_args(argv)
    wrong: list[str] = []
    renamed = 0
    with working("names", args.home) as home:
        for name in args.classes:
            try:
                write(name, home / name)
            except Exception as e:  # noqa: BLE001 - of many classes some need numbers of their own
                print(f"{name}: not built: {type(e).__name__}: {e}"[:300], flush=True)
                continue
            lines, is_renamed = judged(home / name)
            renamed += is_renamed
            print(f"{name}: {len(lines)} wrong", flush=True)
            wrong += lines
    if args.classes == CLASSES and renamed < LEAST:
        wrong.append(f"{renamed} classes have other names in memory, at least {LEAST} expected")
    print(f"{renamed} classes with other names in memory; {len(wrong)} wrong")
    return verdict(wrong)


def shrink(config: Any) -> None:
    """Set a configuration's numbers to small ones, and those of its sections."""
    for key, value in ((key, value) for value, keys in SIZES.items() for key in keys.split()):
        own = getattr(config, key, None)
        if own is None or isinstance(own, (dict, tuple)) or (isinstance(own, list) and value):
            continue
        if value is None:
            config.__dict__[key] = own[:2]
            continue
        try:
            setattr(config, key, value)
        except Exception as e:  # noqa: BLE001 - a property of some classes
            print(f"{type(config).__name__}.{key}: {e}", file=sys.stderr)
    for key in getattr(config, "sub_configs", {}):
        if (section := getattr(config, key, None)) is not None:
            shrink(section)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for section in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(section, dict) and "mrope_section" in section:
            section["mrope_section"] = [2, 1, 1]


def write(name: str, out: Path) -> None:
    """Write a small random model of a class as files, as in memory, and without every third
    tensor.
    """
    cls = getattr(transformers, name)
    config = cls.config_class()
    shrink(config)
    torch.manual_seed(0)
    model = cls(config).to(torch.bfloat16)
    for tensor in {t.data_ptr(): t for t in model.state_dict().values()}.values():
        if tensor.is_floating_point():
            tensor.uniform_(-1, 1)  # norms of ones would hide that two were exchanged
    state = model.state_dict()
    model.save_pretrained(out / "base", max_shard_size="64KB")
    whole = {key: value.detach().clone().contiguous() for key, value in state.items()}
    (out / "whole").mkdir()
    save_file(whole, out / "whole/model.safetensors", {"format": "pt"})
    part = {key: value for n, (key, value) in enumerate(state.items()) if n % 3}
    dcp.save({"model": part}, checkpoint_id=out / "part", no_dist=True)
    for form in ("whole", "part"):
        model.config.save_pretrained(out / form)


def judged(model: Path) -> tuple[list[str], bool]:
    """Return what is wrong with the merges of one model, and whether memory has other names."""
    base, wrong = model / "base", list[str]()
    expected = bits(*base.glob("model*.safetensors"))
    for form in ("whole", "part"):
        fill = ["--fill-from", str(base)] if form == "part" else []
        where, out = f"{model.name}/{form}", model / f"merged-{form}"
        words = ["merge", str(model / form), str(out), "--dtype", "keep", "--names-of", str(base)]
        merge = subprocess.run(
            [*CKPTSYNC, *words, *fill], capture_output=True, text=True, env=CLEAN, check=False
        )
        if merge.returncode != (5 if where in _REFUSED else 0):
            wrong.append(f"{where}: exit code {merge.returncode}: {merge.stderr.strip()}")
        elif where not in _REFUSED and bits(*out.glob("model*.safetensors")) != expected:
            wrong.append(f"{where}: other tensors than save_pretrained wrote")
    return wrong, expected.keys() != bits(model / "whole/model.safetensors").keys()


if __name__ == "__main__":
    sys.exit(main())
