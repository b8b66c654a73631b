"""Within a trainer: saves slow enough to be killed in their middle, and a word when each begins and
ends.

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

    def told(self, save: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., None]:
        """A save that says ``saving`` and ``written``, and is slow in between."""

        def saving(*args: Any, **kwargs: Any) -> None:
            say("saving")
            self._is_saving = True
            try:
                save(*args, **kwargs)
            finally:
                self._is_saving = False
            say("written")

        return saving

    def before_removing(
        self, remove: Callable[..., Any], say: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Rotation, which follows the last file of a save, and belongs to it no more."""

        def removing(*args: Any, **kwargs: Any) -> Any:
            say("written")
            return remove(*args, **kwargs)

        return removing

    def torch_save(self, save: Callable[..., None]) -> Callable[..., None]:
        """``torch.save``, whose bytes torch itself would write out of Python's reach."""

        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_saving:
                save(obj, f, *args, **kwargs)
            elif isinstance(f, (str, os.PathLike)):
                with Path(f).open("wb", buffering=0) as file:
                    save(obj, _Trickle(file, self._rest), *args, **kwargs)
            else:  # one of many tensors in a file of torch's distributed checkpoint
                save(obj, f, *args, **kwargs)
                f.flush()
                self._rest()

        return saved

    def safetensors_save(self, tensors: Any, filename: str, metadata: Any = None) -> None:
        """``save_file`` as safetensors 0.8 does it: a hidden name of six letters, and a rename."""
        from safetensors.torch import save

        data = save(tensors, metadata)
        hidden = Path(filename).with_name(
            ".tmp" + "".join(self._dice.choices(string.ascii_letters, k=6))
        )
        with open(
            hidden, "wb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            size = len(data) // _TRICKLES + 1
            for start in range(0, len(data), size):
                file.write(data[start : start + size])
                self._rest()
        hidden.rename(filename)

    def _rest(self) -> None:
        time.sleep(self._dice.uniform(0, 2 * self._pace / _TRICKLES))

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_saving and (
            event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & 3)
        ):
            time.sleep(self._dice.uniform(0, self._pace))


class _Trickle(io.RawIOBase):
    """A file that takes its time."""

    def __init__(self, file: io.FileIO, rest: Callable[[], None]) -> None:
        self._file, self._rest = file, rest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._rest()
        return self._file.write(data)


def slow_down(trainer: Any, pace: float, say: Callable[[str, int], None]) -> None:
    """Of Hugging Face's Trainer: every checkpoint, and its rotation."""
    import torch
    import transformers.modeling_utils
    import transformers.trainer

    slow = Slow(pace)

    def told(event: str) -> None:
        say(event, trainer.state.global_step)

    torch.save = slow.torch_save(torch.save)
    transformers.modeling_utils.safe_save_file = slow.safetensors_save
    transformers.trainer.rotate_checkpoints = slow.before_removing(
        transformers.trainer.rotate_checkpoints, told
    )
    trainer._save_checkpoint = slow.told(trainer._save_checkpoint, told)
