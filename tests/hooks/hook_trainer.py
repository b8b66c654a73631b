"""Hugging Face's Trainer with the hook, on a model of a few thousand weights.

A program for `torchrun`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptsync.hooks.hf import CkptSyncCallback


class Timed(CkptSyncCallback):
    """Measures what each event costs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.took: dict[str, list[float]] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_"):
            return found

        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            found(*args, **kwargs)
            self.took.setdefault(name, []).append(time.perf_counter() - start)

        return timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-hook", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(64)]
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    quiet = {
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "logging_steps": 1,
        "ddp_find_unused_parameters": False,
    }
    args = TrainingArguments(
        output_dir=asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=2,
        **saving,
        **quiet,
    )
    hook = Timed()
    trainer = Trainer(
        model=model, args=args, train_dataset=rows, callbacks=[] if asked.no_hook else [hook]
    )
    trainer.train()
    trainer.save_model()
    for name, seconds in sorted(hook.took.items()):
        print(f"{name}: fastest {min(seconds) * 1e3:.3f} ms, slowest {max(seconds) * 1e3:.3f} ms")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
