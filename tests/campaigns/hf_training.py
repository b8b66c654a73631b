"""A real training on CPUs: the Trainer of transformers or TRL, which keeps what every save ought to
hold.

    torchrun ... hf_training.py MODE --out DIR --truth DIR --base DIR [--steps N] [--pause SECONDS]
    [--hook]

It runs in a Python that has what the mode needs (`tests.campaigns.two_nodes.MODES`), and knows
nothing of the rest of this project but its hook. In ``--truth``, a directory of each node:
``events-R.jsonl``, what happened when; and, on the node of rank 0, ``model-N.safetensors``, the
weights as the framework gathered them at the end of step N, of modes that train all weights.
"""

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
TRL = ("sft", "dpo", "grpo", "named", "best", "hub")
ADAPTERS = ("lora", "dpo", "named")
RANK = int(os.environ.get("RANK", "0"))
WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on")


def options() -> argparse.Namespace:
    """Read before anything heavy is imported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("ddp", "fsdp2", "zero2", "zero3", "lora", *TRL))
    for name in ("--out", "--truth", "--base"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=int, default=1, help="save_total_limit")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    slow = "seconds that each file of a save takes, about"
    parser.add_argument("--slow", type=float, default=0.0, help=slow)
    parser.add_argument("--hook", action="store_true", help="with ckptsync's callback")
    width = "width of the model, if not the base's"
    parser.add_argument("--hidden", type=int, default=0, help=width)
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


if OPTIONS.mode in ("fsdp2", "zero2", "zero3"):
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
    """Return what TrainingArguments is told about sharding."""
    if mode == "fsdp2":
        wrapped = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        return {"fsdp": True, "fsdp_config": {**wrapped, "sync_module_states": True}}
    if not mode.startswith("zero"):
        return {"use_cpu": True}
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


class Witness(TrainerCallback):
    """Writes what happens on one rank into ``--truth``.

    Its only collective is what gathers the weights, at the end of a step: none stands between a
    save and the next step.
    """

    trainer: Any = None

    def __init__(self) -> None:
        OPTIONS.truth.mkdir(parents=True, exist_ok=True)
        self._events = (OPTIONS.truth / f"events-{RANK}.jsonl").open("a")

    def say(self, event: str, step: int, **more: object) -> None:
        """Write a line, with the time in seconds."""
        line = {"event": event, "step": step, "at": time.time(), **more}
        print(json.dumps(line), file=self._events, flush=True)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Let checkpoints live."""
        self.say("begin", state.global_step + 1)
        time.sleep(OPTIONS.pause)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Keep the weights before the save of this step, and so before rotation."""
        self.say("end", state.global_step)
        if OPTIONS.no_truth or OPTIONS.mode in ADAPTERS:
            return
        full = gather(self.trainer, OPTIONS.mode)
        if RANK == 0:
            tensors = {n: value.detach().cpu().contiguous().clone() for n, value in full.items()}
            save_file(tensors, OPTIONS.truth / f"model-{state.global_step}.safetensors")

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """Tell what a step's training came to."""
        if logs and "loss" in logs:
            norm = float(logs.get("grad_norm", 0.0))
            self.say("loss", state.global_step, loss=logs["loss"], norm=norm)

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Tell that this rank's part is written."""
        self.say("saved", state.global_step)


def sentence(line: int) -> str:
    """Return a line of the corpus."""
    chosen = (7 * line + 3 * word * word for word in range(12))
    return " ".join(WORDS[index % len(WORDS)] for index in chosen)


def trained() -> None:
    """From start to end, as users write it."""
    set_seed(1)
    arguments = {
        "output_dir": str(OPTIONS.out),
        "max_steps": OPTIONS.steps,
        "save_strategy": "steps",
        "save_steps": OPTIONS.save_steps,
        "save_total_limit": OPTIONS.limit,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "learning_rate": 1e-2,
        "seed": 7,
        "disable_tqdm": True,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "optim": "adamw_torch",
        **strategy(OPTIONS.mode),
    }
    witness = Witness()
    callbacks: list[Any] = [witness]
    if OPTIONS.hook:
        hook = importlib.import_module("ckptsync.hooks.hf")
        store, wait = os.environ.get("CKPTSYNC_STORE", ""), os.environ.get("CKPTSYNC_WAIT", "")
        callbacks.append(hook.CkptSyncCallback(store=store, wait=wait))
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS.base)
    if OPTIONS.mode in TRL:
        trainer = trl_trainer(arguments, tokenizer, callbacks)
    else:
        lines = [sentence(n) + "</s>" for n in range(40)]
        trainer = Trainer(
            model=model(),
            args=TrainingArguments(**arguments),
            train_dataset=[{"input_ids": tokenizer(line)["input_ids"][:24]} for line in lines],
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
    if OPTIONS.hidden:
        config = AutoConfig.from_pretrained(OPTIONS.base)
        config.hidden_size, config.intermediate_size = OPTIONS.hidden, 4 * OPTIONS.hidden
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(OPTIONS.base, dtype=torch.float32)
    if OPTIONS.mode not in ADAPTERS:
        return base
    peft = importlib.import_module("peft")

    def adapter() -> Any:
        return peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")

    if OPTIONS.mode != "named":
        return peft.get_peft_model(base, adapter())
    named = peft.get_peft_model(base, adapter(), adapter_name="policy")
    named.add_adapter("reference", adapter())
    return named


def trl_trainer(arguments: dict[str, Any], tokenizer: Any, callbacks: list[Any]) -> Any:
    """Return the mode's trainer, as TRL's documents write it."""
    import transformers.trainer
    import trl
    from datasets import Dataset

    lines = [sentence(n) for n in range(24)]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    more: dict[str, Any] = {"processing_class": tokenizer, "callbacks": callbacks}
    arguments |= {"bf16": False, "gradient_checkpointing": False}
    rows: list[dict[str, str]] = [{"text": line} for line in lines]
    kind, config, own = trl.SFTTrainer, trl.SFTConfig, {"max_length": 32}
    if OPTIONS.mode == "dpo":  # of an adapter: TRL copies it as `ref`
        kind, config, own = trl.DPOTrainer, trl.DPOConfig, {"max_length": 48}
        answers = zip(lines, lines[1:], lines[2:], strict=False)
        rows = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in answers]
    if OPTIONS.mode == "grpo":
        kind, config = trl.GRPOTrainer, trl.GRPOConfig
        own = {"num_generations": 2, "max_completion_length": 8}
        more["reward_funcs"] = reward
        rows = [{"prompt": line} for line in lines]
    if OPTIONS.mode == "best":
        more["eval_dataset"] = Dataset.from_list(rows[:4])
        arguments |= {"eval_strategy": "steps", "eval_steps": 1, "save_only_model": True}
        arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    if OPTIONS.mode == "hub":  # which takes everything, and keeps nothing
        arguments |= {"push_to_hub": True, "hub_model_id": "nobody/nothing", "hub_token": "none"}
        upload = SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda *_: None)
        hub = SimpleNamespace(
            create_repo=lambda name, **_: SimpleNamespace(repo_id=name),
            upload_folder=lambda **_: upload,
        )
        transformers.trainer.hf_api = lambda *_, **__: hub
    args, dataset = config(**arguments, **own), Dataset.from_list(rows)
    return kind(model=model(), args=args, train_dataset=dataset, **more)


def reward(completions: Any, **_: Any) -> list[float]:
    """Return how many letters each completion has."""
    return [float(len(set(text))) for text in completions]


if __name__ == "__main__":
    trained()
