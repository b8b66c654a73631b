"""A trainer of one process: its events come as those of Trainer do, it saves each step and keeps
one checkpoint, and leaves a final model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

STEPS = 3
FILES = ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")


class Flow(TrainerCallback):  # type: ignore[misc]  # the stand-in is found where this runs
    """Trainer has one of its own, too."""


DEFAULT_CALLBACKS: list[Any] = [Flow]


class CallbackHandler:
    """As Trainer's."""

    def __init__(
        self, callbacks: Any, model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any
    ) -> None:
        self.kwargs = {"model": model, "processing_class": processing_class}
        self.kwargs |= {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """After all that are there."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)


class Trainer:
    """As far as a callback can tell."""

    def __init__(self, output_dir: str, callbacks: Any = ()) -> None:
        self.folder = Path(output_dir)
        self.args = SimpleNamespace(
            output_dir=output_dir,
            process_index=0,
            world_size=1,
            should_save=True,
            save_only_model=False,
        )
        self.control = SimpleNamespace(should_training_stop=False)
        self.callback_handler = CallbackHandler(
            [*DEFAULT_CALLBACKS, *callbacks], None, None, None, None
        )

    def add_callback(self, callback: Any) -> None:
        """After all that are there."""
        self.callback_handler.add_callback(callback)

    def train(self) -> None:
        """Each event to each callback."""
        self.state = SimpleNamespace(global_step=0, is_hyper_param_search=False)
        self.event("on_train_begin")
        self.event("on_epoch_begin")
        for step in range(1, STEPS + 1):
            self.event("on_step_begin")
            self.event("on_pre_optimizer_step")
            self.state.global_step, self.control.should_training_stop = step, step == STEPS
            self.event("on_step_end")
            self.save(step)
            self.event("on_save")
        for name in ("on_epoch_end", "on_log", "on_train_end"):
            self.event(name)

    def event(self, name: str) -> None:
        """What Trainer's handler does."""
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(
                    self.args, self.state, self.control, **self.callback_handler.kwargs
                )

    def save(self, step: int) -> None:
        """A checkpoint, and rotation."""
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        for name in FILES:
            (folder / name).write_text(f"{name} {step}")
        shutil.rmtree(self.folder / f"checkpoint-{step - 1}", ignore_errors=True)

    def save_model(self) -> None:
        """Beside the checkpoints."""
        for name in ("model.safetensors", "config.json"):
            (self.folder / name).write_text(f"final {name}")
