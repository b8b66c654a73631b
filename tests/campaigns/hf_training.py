"""A real training: the Hugging Face Trainer over gloo on CPUs, which keeps what every save ought to
hold.

    torchrun ... hf_training.py MODE --out DIR --truth DIR --base DIR [--steps N] [--pause SECONDS]
    [--hook]

It runs in a Python that has transformers, accelerate, for ZeRO DeepSpeed, and for LoRA peft, and
knows nothing of the rest of this project but its hook. In ``--truth``, a directory of each node:
``events-R.jsonl``, what happened when; and, on the node of rank 0, ``model-N.safetensors``, the
weights as the framework gathered them at the end of step N.
"""

import argparse
import importlib
import os
import time
from typing import Any

from tests.campaigns.witness import RANK, Witness, sentence, training_parser

os.environ["DS_ACCELERATOR"] = "cpu"
MODES = ("ddp", "fsdp2", "zero2", "zero3", "lora")


def options() -> argparse.Namespace:
    """Read before anything heavy is imported."""
    parser = training_parser(__doc__, MODES)
    parser.add_argument("--hook", action="store_true", help="with ckptsync's callback")
    told = "width of the model, if not the base's"
    parser.add_argument("--hidden", type=int, default=0, help=told)
    parser.add_argument("--save-steps", type=int, default=1)
    parser.add_argument("--no-truth", action="store_true", help="keep the events only")
    return parser.parse_args()


OPTIONS = options()

import torch  # noqa: E402


def allow_fsdp_on_cpu() -> None:
    """accelerate allows FSDP only where the distributed type is MULTI_GPU and the like.

    The saving code is untouched.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import accelerate.state
    from accelerate.utils import DistributedType

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    accelerate.state.PartialState._prepare_backend = lambda *_, **__: (
        "gloo",
        DistributedType.MULTI_GPU,
    )
    accelerate.state.PartialState.set_device = set_device


if OPTIONS.mode not in ("ddp", "lora"):
    allow_fsdp_on_cpu()  # before transformers looks at the state

from safetensors.torch import save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


def strategy(mode: str) -> dict[str, Any]:
    """What TrainingArguments is told about sharding."""
    if mode in ("ddp", "lora"):
        return {"use_cpu": True}
    if mode == "fsdp2":
        wrapped = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        return {"fsdp": True, "fsdp_config": {**wrapped, "sync_module_states": True}}
    few = 1500
    return {
        "deepspeed": {
            "zero_optimization": {
                "stage": int(mode[-1]),
                "stage3_gather_16bit_weights_on_model_save": False,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": few,
                "stage3_prefetch_bucket_size": few,
                "allgather_bucket_size": few,
            },
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    }


def gather(trainer: Any, mode: str) -> dict[str, torch.Tensor]:
    """Let the framework itself put the weights together; a collective."""
    if mode == "zero3":
        import deepspeed

        full = {}
        for name, parameter in trainer.deepspeed.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                full[name] = parameter.detach().clone()
        return full
    if mode == "zero2":
        return dict(trainer.deepspeed.module.named_parameters())
    if mode == "fsdp2":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        gathered: dict[str, Any] = get_model_state_dict(
            trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return gathered
    return trainer.model.state_dict()


class Callback(TrainerCallback, Witness):
    """Says what happens.

    Its only collective is what gathers the weights, at the end of a step: none stands between a
    save and the next step.
    """

    trainer: Any = None

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Let checkpoints live."""
        self.say("begin", state.global_step + 1)
        time.sleep(OPTIONS.pause)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Before the save of this step, and so before rotation."""
        self.say("end", state.global_step)
        if OPTIONS.no_truth:
            return
        full = gather(self.trainer, OPTIONS.mode)
        if RANK == 0:
            tensors = {
                name: value.detach().cpu().contiguous().clone() for name, value in full.items()
            }
            save_file(tensors, OPTIONS.truth / f"model-{state.global_step}.safetensors")

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """What a step's training came to."""
        if logs and "loss" in logs:
            norm = float(logs.get("grad_norm", 0.0))
            self.say("loss", state.global_step, loss=logs["loss"], norm=norm)

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Its own part is written, on this rank."""
        self.say("saved", state.global_step)


def trained() -> None:
    """From start to end, as users write it."""
    set_seed(1)
    arguments = TrainingArguments(
        output_dir=str(OPTIONS.out),
        max_steps=OPTIONS.steps,
        save_strategy="steps",
        save_steps=OPTIONS.save_steps,
        save_total_limit=OPTIONS.limit,
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
    witness = Callback(OPTIONS.truth)
    callbacks: list[Any] = [witness]
    if OPTIONS.hook:
        callbacks.append(importlib.import_module("ckptsync.hooks.hf").CkptSyncCallback())
    trainer = Trainer(
        model=model(),
        args=arguments,
        train_dataset=[
            {"input_ids": tokenizer(sentence(n) + "</s>")["input_ids"][:24]} for n in range(40)
        ],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=callbacks,
    )
    witness.trainer = trainer
    if OPTIONS.slow:
        importlib.import_module("tests.campaigns.slow_saving").slow_down(trainer, OPTIONS.slow)
    trainer.train(resume_from_checkpoint=str(OPTIONS.resume) if OPTIONS.resume else None)
    trainer.save_model()
    witness.say("trained", trainer.state.global_step)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def model() -> Any:
    """The base, one as wide as asked, or the base with an adapter."""
    if OPTIONS.mode == "lora":
        peft = importlib.import_module("peft")
        base = AutoModelForCausalLM.from_pretrained(OPTIONS.base, dtype=torch.float32)
        adapter = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
        return peft.get_peft_model(base, adapter)
    if not OPTIONS.hidden:
        return AutoModelForCausalLM.from_pretrained(OPTIONS.base, dtype=torch.float32)
    config = AutoConfig.from_pretrained(OPTIONS.base)
    config.hidden_size, config.intermediate_size = OPTIONS.hidden, 4 * OPTIONS.hidden
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


if __name__ == "__main__":
    trained()
