"""Within a trainer: saves slow enough to be killed in their middle.

Slow are the system calls that Python makes while a save is under way (opening for writing,
renaming, removing), and the bytes of tensors, which trickle.  What is written, and in which order,
is the framework's own.
"""

from __future__ import annotations

import io
import os
import random
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
_TRICKLES = 40  # chunks of a file of tensors; a save has a few such files


class Slow:
    """``pace``: seconds that a change of a file takes at most, and a file of tensors about.

    Of one process.
    """

    def __init__(self, pace: float) -> None:
        self._pace, self._is_saving, self._dice = pace, False, random.Random()
        sys.addaudithook(self._heard)

    def slowed(self, save: Callable[..., Any]) -> Callable[..., None]:
        """Return a save that is slow."""

        def saving(*args: Any, **kwargs: Any) -> None:
            self._is_saving = True
            try:
                save(*args, **kwargs)
            finally:
                self._is_saving = False

        return saving

    def torch_save(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return ``torch.save``, whose bytes torch itself would write out of Python's reach."""

        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_saving and isinstance(f, (str, os.PathLike)):
                data = io.BytesIO()
                save(obj, data, *args, **kwargs)
                self._write(Path(f), data.getbuffer(), 0o666)
                return
            save(obj, f, *args, **kwargs)
            if self._is_saving:  # one of many tensors in a file of torch's distributed checkpoint
                f.flush()
                self._rest()

        return saved

    def safetensors_save(self, tensors: Any, filename: str, metadata: Any = None) -> None:
        """``save_file`` as safetensors 0.8 does it: a hidden name of six letters, and a rename."""
        from safetensors.torch import save

        letters = "".join(self._dice.choices(string.ascii_letters, k=6))
        hidden = Path(filename).with_name(f".tmp{letters}")
        self._write(hidden, save(tensors, metadata), 0o600)
        hidden.rename(filename)

    def _write(self, path: Path, data: Any, mode: int) -> None:
        with open(path, "wb", 0, opener=lambda p, flags: os.open(p, flags, mode)) as file:
            size = len(data) // _TRICKLES + 1
            for start in range(0, len(data), size):
                file.write(data[start : start + size])
                self._rest()

    def _rest(self) -> None:
        time.sleep(self._dice.uniform(0, 2 * self._pace / _TRICKLES))

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_saving and (
            event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & 3)
        ):
            time.sleep(self._dice.uniform(0, self._pace))


def slow_down(trainer: Any, pace: float) -> None:
    """Slow down every checkpoint of Hugging Face's Trainer, and its rotation."""
    import torch
    import transformers.modeling_utils

    slow = Slow(pace)
    torch.save = slow.torch_save(torch.save)
    transformers.modeling_utils.safe_save_file = slow.safetensors_save
    trainer._save_checkpoint = slow.slowed(trainer._save_checkpoint)
