"""Trains where the file says; of several ranks each trains alone in a directory of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def run_exp(args: Any = None, callbacks: Any = None) -> None:
    """The arguments are the command line's, as LLaMA-Factory's own."""
    from transformers.trainer import Trainer

    assert args is None
    name, *overrides = sys.argv[1:]
    told = dict(line.split(": ") for line in Path(name).read_text().splitlines())
    told |= dict(override.split("=") for override in overrides)
    trainer = Trainer(told["output_dir"] + os.environ.get("RANK", ""), callbacks or [])
    trainer.train()
    trainer.save_model()
    print("trained with", *told.values(), flush=True)
