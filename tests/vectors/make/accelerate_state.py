"""accelerator.save_state of a tiny Llama: accelerate_state.py {fsdp2,zero3} --base DIR --reference DIR [--bf16].

Writes out/checkpoints/checkpoint_0 in the working directory.
"""

import argparse
import os
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import shim  # noqa: F401  must come before the first Accelerator
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from common import batch, finish, save_reference
from transformers import AutoModelForCausalLM


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
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": False}
    config = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=project)


def gather(model: torch.nn.Module, mode: str) -> dict[str, torch.Tensor]:
    """Let the framework itself put the full state together; a collective."""
    if mode == "fsdp2":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    import deepspeed

    full = {}
    for name, parameter in model.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            full[name] = parameter.detach().clone()
    return full


def main() -> None:
    """Train two steps, save the state, gather."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("fsdp2", "zero3"))
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    acc = accelerator(options.mode)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16 if options.bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
    generator = torch.Generator().manual_seed(acc.process_index)
    for _ in range(2):
        ids = batch(generator)
        acc.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    acc.save_state()
    save_reference(options.reference / "full.safetensors", gather(model, options.mode))
    finish()


if __name__ == "__main__":
    main()
