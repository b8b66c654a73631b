"""A real training by TRL on a CPU, which keeps what every save ought to hold.

    python trl_training.py MODE --out DIR --truth DIR --base DIR [--steps N] [--limit N]
    [--pause SECONDS] [--store URL]

It runs in a Python that has TRL, and knows nothing of the rest of this project but its hook.  In
``--truth``: ``checkpoint-N/`` and, in the end, ``final/`` as the trainer had written them, copied
before rotation takes them; ``held/N/``: the weights that the trainer held at that save,
``model.safetensors`` or one ``NAME.safetensors`` for each adapter.
"""

import argparse
import importlib
import shutil
import time
from types import SimpleNamespace
from typing import Any

import torch
import transformers.trainer
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.campaigns.witness import sentence, training_parser

MODES = ("sft", "dpo", "grpo", "named", "best", "hub")


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = training_parser(__doc__, MODES)
    parser.add_argument("--store", help="to which ckptsync's hook sends; without it there is none")
    return parser.parse_args()


class Witness(TrainerCallback):
    """Keeps the truth: weights at each save, and its files at the next event of the training."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked, self._saved = asked, 0

    def on_save(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        """Keep the weights that the trainer holds."""
        self._saved = state.global_step
        folder = self._asked.truth / "held" / str(self._saved)
        folder.mkdir(parents=True)
        for name, weights in _held(model).items():
            own = {key: value.detach().contiguous().clone() for key, value in weights.items()}
            save_file(own, folder / f"{name}.safetensors")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Keep the save's files, and let them live."""
        self.keep()
        time.sleep(self._asked.pause)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Keep the save's files: the last event before the best model is loaded, and rotation."""
        self.keep()

    def keep(self) -> None:
        """Copy the files of the last save, if that is still to be done."""
        name = f"checkpoint-{self._saved}"
        if self._saved and not (self._asked.truth / name).exists():
            shutil.copytree(self._asked.out / name, self._asked.truth / name)


def _held(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    if isinstance(model, PeftModel):
        return {
            name: get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config
        }
    return {"model": model.state_dict()}


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
    given: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [Witness(asked)]}
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
    final = asked.truth / "final"
    final.mkdir()
    for path in asked.out.iterdir():
        if path.is_file():
            shutil.copy2(path, final)
        elif not path.name.startswith(("checkpoint-", "_")) and list(path.glob("adapter_*")):
            shutil.copytree(path, final / path.name)
    print("trained", flush=True)


if __name__ == "__main__":
    main()
