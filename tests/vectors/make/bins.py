"""Models by torch.save: bins.py {sharded,legacy,adapter} --base DIR --reference DIR.

transformers 5 writes safetensors only: files, names and index are made as transformers 4 made them, by huggingface_hub's own split.
"""

import json
from pathlib import Path

import torch
from common import parser, save_reference
from huggingface_hub import split_torch_state_dict_into_shards
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path("out")


def sharded(base: Path, reference: Path) -> None:
    """bf16 over several files with an index; tied names share a storage."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    state = model.state_dict()
    split = split_torch_state_dict_into_shards(state, max_shard_size="6KB", filename_pattern="pytorch_model{suffix}.bin")
    for name, keys in split.filename_to_tensors.items():
        torch.save({key: state[key] for key in keys}, OUT / name)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (OUT / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    finish(base, model)
    save_reference(reference / "full.safetensors", state)


def legacy(base: Path, reference: Path) -> None:
    """One file in the container that torch wrote before 1.6, tied names in one storage, a transposed and a 0-d tensor besides."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    state = model.state_dict()
    state["extra.transposed"] = torch.arange(12.0).reshape(3, 4).t()
    state["extra.scalar"] = torch.tensor(7)
    state["extra.row"] = state["model.norm.weight"][3:9]
    torch.save(state, OUT / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    finish(base, model)
    save_reference(reference / "full.safetensors", state)


def adapter(base: Path, reference: Path) -> None:
    """peft's own save_pretrained without safetensors."""
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.save_pretrained("out", safe_serialization=False)
    save_reference(reference / "adapter.safetensors", get_peft_model_state_dict(model))


def finish(base: Path, model: torch.nn.Module) -> None:
    """Configuration and tokenizer, by transformers."""
    model.config.save_pretrained(OUT)
    AutoTokenizer.from_pretrained(base).save_pretrained(OUT)


def main() -> None:
    """Write out/ in the working directory."""
    kinds = {"sharded": sharded, "legacy": legacy, "adapter": adapter}
    options = parser(__doc__, kinds).parse_args()
    OUT.mkdir(exist_ok=True)
    kinds[options.kind](options.base, options.reference)


if __name__ == "__main__":
    main()
