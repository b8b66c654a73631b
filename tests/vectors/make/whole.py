"""Checkpoints that are whole already, by save_pretrained: whole.py {sharded,adapter} --base DIR --reference DIR."""

from pathlib import Path

import torch
from common import parser, save_reference, train
from transformers import AutoModelForCausalLM, AutoTokenizer


def sharded(base: Path, reference: Path) -> None:
    """bf16 over several files with an index."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained("out", max_shard_size="6KB")
    AutoTokenizer.from_pretrained(base).save_pretrained("out")
    save_reference(reference / "full.safetensors", model.state_dict())


def adapter(base: Path, reference: Path) -> None:
    """A LoRA adapter with one module trained whole, after two steps."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, 0)
    model.save_pretrained("out")
    AutoTokenizer.from_pretrained(base).save_pretrained("out")
    save_reference(reference / "adapter.safetensors", get_peft_model_state_dict(model))
    save_reference(reference / "full.safetensors", model.merge_and_unload().state_dict())


def main() -> None:
    """Write out/ in the working directory."""
    kinds = {"sharded": sharded, "adapter": adapter}
    options = parser(__doc__, kinds).parse_args()
    kinds[options.kind](options.base, options.reference)


if __name__ == "__main__":
    main()
