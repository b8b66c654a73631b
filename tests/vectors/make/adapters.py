"""accelerator.save_state of a PEFT model, base and adapter in the same shards: adapters.py {fsdp2,zero2} --base DIR --reference DIR.

DoRA, a module that is saved whole, biases; under ZeRO the MLPs are compiled, so that their names have `_orig_mod`. Reference:
adapter.safetensors as peft's save_pretrained writes it; the base model is frozen, so its own file is the other reference. Writes
out/checkpoints/checkpoint_0, and peft's adapter_config.json in it.
"""

import shutil
from pathlib import Path

import shim  # noqa: F401  must come before the first Accelerator
import torch
from accelerate_state import accelerator
from common import RANK, Tensors, finish, full_state, parser, save_reference, train
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CHECKPOINT = Path("out/checkpoints/checkpoint_0")


def adapted(base: Path) -> PeftModel:
    """Return the model with an adapter of which every part is another than at the beginning."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_dora=True, modules_to_save=["norm"], task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def reference(base: Path, state: Tensors, folder: Path) -> None:
    """Let peft save what was trained."""
    model = adapted(base)
    model.load_state_dict({name.replace("_orig_mod.", ""): value for name, value in state.items()}, strict=True)
    model.save_pretrained("saved")
    shutil.copyfile("saved/adapter_config.json", CHECKPOINT / "adapter_config.json")
    save_reference(folder / "adapter.safetensors", load_file("saved/adapter_model.safetensors"))


def main() -> None:
    """Train two steps, save the state, gather."""
    options = parser(__doc__, ("fsdp2", "zero2")).parse_args()
    is_fsdp = options.kind == "fsdp2"
    acc = accelerator(None if is_fsdp else {"stage": 2})
    model = adapted(options.base)
    if not is_fsdp:
        for layer in model.base_model.model.model.layers:
            layer.mlp = torch.compile(layer.mlp, backend="eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = acc.prepare(model, optimizer)
    train(model, optimizer, acc.process_index, acc.backward)
    acc.save_state()
    state = full_state(model) if is_fsdp else dict(model.module.state_dict())
    if RANK == 0:
        reference(options.base, state, options.reference)
    finish()


if __name__ == "__main__":
    main()
