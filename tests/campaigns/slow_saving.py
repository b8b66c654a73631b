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
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
_TRICKLES = 40  # chunks of a file of tensors; a save has a few such files


def slow_down(trainer: Any, pace: float) -> None:
    """Slow down every checkpoint of Hugging Face's Trainer, and its rotation.

    ``pace``: seconds that a change of a file takes at most, and a file of tensors about.
    """
    import torch
    import transformers.modeling_utils
    from safetensors.torch import save

    save_checkpoint, torch_save, dice = trainer._save_checkpoint, torch.save, random.Random()
    is_saving = False

    def rest(share: float) -> None:
        time.sleep(dice.uniform(0, share * pace))

    def slow_checkpoint(*args: Any, **kwargs: Any) -> None:
        nonlocal is_saving
        is_saving = True
        try:
            save_checkpoint(*args, **kwargs)
        finally:
            is_saving = False

    def write(path: Path, data: Any, mode: int) -> None:
        with open(path, "wb", 0, opener=lambda p, flags: os.open(p, flags, mode)) as file:
            size = len(data) // _TRICKLES + 1
            for start in range(0, len(data), size):
                file.write(data[start : start + size])
                rest(2 / _TRICKLES)

    def slow_torch_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Write from Python: torch itself would write out of Python's reach."""
        if is_saving and isinstance(f, (str, os.PathLike)):
            data = io.BytesIO()
            torch_save(obj, data, *args, **kwargs)
            write(Path(f), data.getbuffer(), 0o666)
            return
        torch_save(obj, f, *args, **kwargs)
        if is_saving:  # one of many tensors in a file of torch's distributed checkpoint
            f.flush()
            rest(2 / _TRICKLES)

    def slow_save_file(tensors: Any, filename: str, metadata: Any = None) -> None:
        """Save as safetensors 0.8 does it: a hidden name of six letters, and a rename."""
        letters = "".join(dice.choices(string.ascii_letters, k=6))
        hidden = Path(filename).with_name(f".tmp{letters}")
        write(hidden, save(tensors, metadata), 0o600)
        hidden.rename(filename)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(args[2], int) and args[2] & 3
        if is_saving and (event in _CHANGES or is_write):
            rest(1)

    sys.addaudithook(audit)
    torch.save = slow_torch_save
    transformers.modeling_utils.safe_save_file = slow_save_file
    trainer._save_checkpoint = slow_checkpoint
