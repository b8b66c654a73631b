"""A real training by TRL on a CPU.

    python trl_training.py MODE --out DIR --truth DIR --base DIR [--steps N] [--limit N]
    [--pause SECONDS] [--store URL]

It runs in a Python that has TRL, and knows nothing of the rest of this project but its hook.
"""

import argparse
import importlib
import time
from types import SimpleNamespace
from typing import Any

import torch
import transformers.trainer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.campaigns.witness import sentence, training_parser

MODES = ("sft", "dpo", "grpo", "named", "best", "hub")


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = training_parser(__doc__, MODES)
    parser.add_argument("--store", help="to which ckptsync's hook sends; without it there is none")
    return parser.parse_args()


class Pause(TrainerCallback):
    """Lets checkpoints live."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait before each step."""
        time.sleep(self._seconds)


def trainer(asked: argparse.Namespace) -> Any:
    """Return the mode's trainer, as TRL's documents write it."""
    shared: dict[str, Any] = {
        "output_dir": str(asked.out),
        "max_steps": asked.steps,
        "save_steps": 1,
        "save_total_limit": asked.limit,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "learning_rate": 1e-2,
        "seed": 7,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(asked.base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    given: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [Pause(asked.pause)]}
    if asked.store:
        hook = importlib.import_module("ckptsync.hooks.hf")
        given["callbacks"].append(hook.CkptSyncCallback(store=asked.store, wait="2m"))
    model: Any = AutoModelForCausalLM.from_pretrained(asked.base, dtype=torch.float32)
    lines = [sentence(n) for n in range(24)]
    if asked.mode == "dpo":  # of an adapter: TRL copies it as `ref`
        rows = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in _triples(lines)]
        model = get_peft_model(model, _lora())
        arguments = DPOConfig(**shared, max_length=48)
        return DPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), **given)
    if asked.mode == "grpo":
        arguments = GRPOConfig(**shared, num_generations=2, max_completion_length=8)
        rows = [{"prompt": line} for line in lines]
        return GRPOTrainer(
            model,
            reward_funcs=_reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            **given,
        )
    if asked.mode == "named":
        model = get_peft_model(model, _lora(), adapter_name="policy")
        model.add_adapter("reference", _lora())
    if asked.mode == "best":
        given["eval_dataset"] = Dataset.from_list([{"text": line} for line in lines[:4]])
        shared |= {"eval_strategy": "steps", "eval_steps": 1, "save_only_model": True}
        shared |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    if asked.mode == "hub":
        shared |= {"push_to_hub": True, "hub_model_id": "nobody/nothing", "hub_token": "none"}
        transformers.trainer.hf_api = lambda *_, **__: Offline()
    rows = [{"text": line} for line in lines]
    arguments = SFTConfig(**shared, max_length=32)
    return SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), **given)


class Offline:
    """Stands for the Hub: it takes everything, and keeps nothing."""

    def create_repo(self, name: str, **_: Any) -> Any:
        """Return the repository's URL."""
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, **_: Any) -> Any:
        """Return an upload that is done."""
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda *_: None)


def _lora() -> LoraConfig:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


def _reward(completions: Any, **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def _triples(lines: list[str]) -> list[tuple[str, str, str]]:
    return list(zip(lines, lines[1:], lines[2:], strict=False))


def main() -> None:
    """Train from start to end, as users write it."""
    asked = options()
    set_seed(1)
    made = trainer(asked)
    made.train()
    made.save_model()


if __name__ == "__main__":
    main()
