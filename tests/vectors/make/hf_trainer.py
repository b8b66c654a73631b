"""HF Trainer over gloo on the CPU: hf_trainer.py MODE --base DIR --reference DIR [--lora] [--save-steps N].

Writes out/checkpoint-4 in the working directory, and REFERENCE/full.safetensors as the framework itself gathered it.
"""

import argparse
import os
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
MODES = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")


def options() -> argparse.Namespace:
    """Read the command line before anything heavy is imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


OPTIONS = options()
if OPTIONS.mode != "ddp":
    import shim  # noqa: F401  must come before transformers looks at the state

import torch  # noqa: E402
from common import Tensors, finish, full_state, gathered_zero3, save_reference  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)


def strategy(mode: str) -> dict[str, object]:
    """Return what TrainingArguments is told about sharding."""
    if mode == "ddp":
        return {"use_cpu": True}
    if mode.startswith("fsdp"):
        version = int(mode[-1])
        config = {
            "version": version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "sync_module_states": version == 2,
        }
        return {"fsdp": True if version == 2 else "full_shard auto_wrap", "fsdp_config": config}
    zero = {
        "stage": int(mode[-1]),
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 1500,
        "stage3_prefetch_bucket_size": 1500,
        "allgather_bucket_size": 1500,
    }
    return {
        "deepspeed": {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    }


def lora(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap the model in an fp32 adapter of rank 3."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))


def gather(trainer: Trainer, mode: str) -> Tensors:
    """Let the framework itself put the full state together; a collective."""
    if mode == "zero3":
        return gathered_zero3(trainer.deepspeed.module)
    if mode.startswith("zero"):
        return dict(trainer.deepspeed.module.named_parameters())
    if mode == "fsdp2":
        return full_state(trainer.model)
    if mode == "fsdp1":
        from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(trainer.model_wrapped, StateDictType.FULL_STATE_DICT, config):
            return trainer.model_wrapped.state_dict()
    return trainer.model.state_dict()


def main() -> None:
    """Train four steps, save at the last, gather."""
    set_seed(1)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=OPTIONS.steps,
        save_strategy="steps",
        save_steps=OPTIONS.steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        learning_rate=1e-2,
        seed=7,
        disable_tqdm=True,
        lr_scheduler_type="linear",
        warmup_steps=1,
        optim="adamw_torch",
        **strategy(OPTIONS.mode),
    )
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS.base)
    model = AutoModelForCausalLM.from_pretrained(OPTIONS.base, dtype=torch.float32)
    if OPTIONS.lora:
        model = lora(model)
    lines = (OPTIONS.base / "corpus.txt").read_text().splitlines()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": tokenizer(line + "</s>")["input_ids"][:24]} for line in lines],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainable = {name.replace("_fsdp_wrapped_module.", "") for name, p in trainer.model.named_parameters() if p.requires_grad}
    full = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in gather(trainer, OPTIONS.mode).items()}
    if OPTIONS.lora:
        full = {name: value for name, value in full.items() if name in trainable}
    if OPTIONS.lora and OPTIONS.mode == "fsdp2":
        from peft import get_peft_model_state_dict

        full = get_peft_model_state_dict(trainer.model, state_dict=full)
    save_reference(OPTIONS.reference / "full.safetensors", full)
    finish()


if __name__ == "__main__":
    main()
