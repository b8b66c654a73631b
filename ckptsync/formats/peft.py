"""PEFT adapters: ``adapter_model.safetensors`` beside ``adapter_config.json``."""

from __future__ import annotations

from collections.abc import Collection

from ckptsync.formats import safetensors
from ckptsync.formats.joining import inside, join
from ckptsync.model import Files, Tensor

NAME = "peft"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """The checkpoint's own directory, if it holds an adapter."""
    return ("",) if WEIGHTS in inside(names, "") else ()


def holds_weights(root: str) -> bool:
    """Always."""
    return root == ""


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Both files: weights without their configuration cannot be loaded."""
    return {join(root, name): files.sizes().get(join(root, name)) for name in (WEIGHTS, CONFIG)}


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """The adapter's tensors under peft's own names."""
    return safetensors.tensors(files, join(root, WEIGHTS))
