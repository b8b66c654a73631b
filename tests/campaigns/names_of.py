"""``merge --names-of`` and ``--fill-from`` against transformers, architecture by architecture.

    python -m tests.campaigns.names_of --python /opt/transformers/bin/python
    python -m tests.campaigns.names_of --classes MixtralForCausalLM LlavaForConditionalGeneration

For every class a small random model is written under its names in memory: as one file, and as a
distributed checkpoint that lacks every third tensor.  Each must become, bit for bit, what
``save_pretrained`` has written of the same model.  Classes that cannot be built so small are named
and not judged.  ``names_of.py DIRECTORY [CLASS …]`` with ``CKPTSYNC_WRITE`` set is the child that
writes the models, in the Python that has torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WRITE = "CKPTSYNC_WRITE"
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


def shrink(config: Any, name: str = "") -> None:
    """Set a configuration's numbers to small ones, and those of its sections."""
    for key, value in ((key, value) for value, keys in SIZES.items() for key in keys.split()):
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
    import torch
    import transformers

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
    """Write a model as files, as in memory, and without every third tensor."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import state_dict_saver as dcp

    model = build(name)
    state = model.state_dict()
    model.save_pretrained(out / "base", max_shard_size="64KB")
    whole = {key: value.detach().clone().contiguous() for key, value in state.items()}
    (out / "whole").mkdir()
    save_file(whole, out / "whole/model.safetensors", {"format": "pt"})
    model.config.save_pretrained(out / "whole")
    part = {key: value for n, (key, value) in enumerate(state.items()) if n % 3}
    dcp.save({"model": part}, checkpoint_id=out / "part", no_dist=True)
    model.config.save_pretrained(out / "part")
    return {"name": name, "tensors": len(state), "model_type": model.config.model_type}


def write_all(directory: str, names: Sequence[str]) -> None:
    """Write the models of these classes, or of all; print a line of JSON for each."""
    for name in names or CLASSES:
        out = Path(directory) / name
        out.mkdir(parents=True)
        try:
            made = write(name, out)
        except Exception as e:  # noqa: BLE001 - of many classes some need numbers of their own
            made = {"name": name, "error": f"{type(e).__name__}: {e}"[:300]}
        print(json.dumps(made), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every model was as save_pretrained wrote it, 1 if not."""
    from tests.campaigns.campaign import arguments, verdict, working
    from tests.campaigns.two_nodes import default_python, has_modules

    parser = arguments(__doc__, "home")
    parser.add_argument("--classes", nargs="*", default=[])
    told = "that has torch and transformers"
    parser.add_argument("--python", default=default_python(), help=told)
    args = parser.parse_args(argv)
    if not has_modules(args.python, "torch", "transformers"):
        print(f"left out: {args.python} has no transformers")
        return 0
    wrong: list[str] = []
    renamed = 0
    with working("names", args.home) as home:
        for model in _written(home, args):
            if "error" in model:
                print(f"{model['name']}: not built: {model['error']}", flush=True)
                continue
            lines, is_renamed = judged(home / model["name"])
            renamed += is_renamed
            print(f"{model['name']}: {len(lines)} wrong", flush=True)
            wrong += lines
    if not args.classes and renamed < LEAST:
        wrong.append(f"{renamed} classes have other names in memory, at least {LEAST} expected")
    print(f"{renamed} classes with other names in memory; {len(wrong)} wrong")
    return verdict(wrong)


def _written(home: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what the child says of each model, once all are written."""
    command = [args.python, str(Path(__file__)), str(home), *args.classes]
    told = {**os.environ, WRITE: "1"}
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=told, check=False)
    yield from (json.loads(line) for line in child.stdout.splitlines() if line.startswith("{"))


def judged(model: Path) -> tuple[list[str], bool]:
    """Return what is wrong with the merges of one model, and whether memory has other names."""
    from tests.campaigns.campaign import CKPTSYNC, CLEAN
    from tests.support.vector import bits

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
    if WRITE in os.environ:
        write_all(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(main())
