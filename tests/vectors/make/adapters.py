"""accelerator.save_state of a PEFT model, base and adapter in the same shards: adapters.py {fsdp2,zero2} --base DIR --reference DIR.

DoRA, a module that is saved whole, biases; under ZeRO the MLPs are compiled, so that their names have `_orig_mod`. Reference:
adapter.safetensors as peft's save_pretrained writes it; the base model is frozen, so its own file is the other reference. Writes
out/checkpoints/checkpoint_0, and peft's adapter_config.json in it.
"""

import argparse
import shutil
from pathlib import Path

import shim  # noqa: F401  must come before the first Accelerator
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from common import RANK, batch, finish, save_reference
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CHECKPOINT = Path("out/checkpoints/checkpoint_0")


def accelerator(mode: str) -> Accelerator:
    """Return the accelerator of one plugin."""
    project = ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True, total_limit=1)
    if mode == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        return Accelerator(fsdp_plugin=plugin, project_config=project)
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=project)


def adapted(base: Path) -> PeftModel:
    """Return the model with an adapter of which every part is another than at the beginning."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_dora=True, modules_to_save=["norm"], task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def gather(model: torch.nn.Module, mode: str) -> dict[str, torch.Tensor]:
    """Let the framework itself put the full state together; a collective."""
    if mode == "fsdp2":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(model.module.state_dict())


def reference(base: Path, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Let peft save what was trained."""
    model = adapted(base)
    model.load_state_dict({name.replace("_orig_mod.", ""): value for name, value in state.items()}, strict=True)
    model.save_pretrained("saved")
    shutil.copyfile("saved/adapter_config.json", CHECKPOINT / "adapter_config.json")
    save_reference(folder / "adapter.safetensors", load_file("saved/adapter_model.safetensors"))


def main() -> None:
    """Train two steps, save the state, gather."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("fsdp2", "zero2"))
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    options = parser.parse_args()
    acc = accelerator(options.mode)
    model = adapted(options.base)
    if options.mode == "zero2":
        for layer in model.base_model.model.model.layers:
            layer.mlp = torch.compile(layer.mlp, backend="eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = acc.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(acc.process_index)
    for _ in range(2):
        ids = batch(generator)
        acc.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    acc.save_state()
    state = gather(model, options.mode)
    if RANK == 0:
        reference(options.base, state, options.reference)
    finish()


if __name__ == "__main__":
    main()
