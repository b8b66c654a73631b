"""Real DeepSpeed checkpoints in memory, and ways to change what one of their pickles says."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from tests.support.files_in_memory import MemoryFiles, tree
from tests.support.torch_bytes import saved
from tests.support.vector import vector

TAG = "global_step2"
Change = Callable[[dict[str, Any]], None]


def held(name: str) -> MemoryFiles:
    """Return the files of a vector."""
    return tree(*vector(name).sources)


def changed(files: MemoryFiles, path: str, change: Change) -> MemoryFiles:
    """Return the files with one of them loaded by torch, changed by ``change``, and saved again.

    Not for those that need DeepSpeed to be loaded.
    """
    content = torch.load(io.BytesIO(files.content[path]), weights_only=True)
    change(content)
    return MemoryFiles({**files.content, path: saved(content)})


def without(files: MemoryFiles, *paths: str) -> MemoryFiles:
    """Return the files but these."""
    return MemoryFiles({name: data for name, data in files.content.items() if name not in paths})
