"""accelerator.save_state of a tiny Llama: accelerate_state.py {fsdp2,zero3} --base DIR --reference DIR [--bf16].

Writes out/checkpoints/checkpoint_0 in the working directory.
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import shim  # noqa: F401  must come before the first Accelerator
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from common import batch, finish, full_state, gathered_zero3, parser, save_reference
from transformers import AutoModelForCausalLM

ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": False}


def accelerator(zero: dict[str, object] | None) -> Accelerator:
    """Return the accelerator of FSDP2, or of DeepSpeed with these options."""
    project = ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True, total_limit=1)
    if zero is None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
        return Accelerator(fsdp_plugin=plugin, project_config=project)
    config = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=project)


def main() -> None:
    """Train two steps, save the state, gather."""
    words = parser(__doc__, ("fsdp2", "zero3"))
    words.add_argument("--bf16", action="store_true")
    options = words.parse_args()
    torch.manual_seed(0)
    is_fsdp = options.kind == "fsdp2"
    acc = accelerator(None if is_fsdp else ZERO3)
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
    save_reference(options.reference / "full.safetensors", full_state(model) if is_fsdp else gathered_zero3(model.module))
    finish()


if __name__ == "__main__":
    main()
