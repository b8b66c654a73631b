"""PEFT adapters: ``adapter_model.safetensors`` (or ``.bin``) and ``adapter_config.json``.

Older versions of PEFT write ``adapter_model.bin``.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptsync.formats import safetensors
from ckptsync.layouts import whole_bin
from ckptsync.layouts.file_names import home, inside, join
from ckptsync.tensors import Files, Tensor

WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"
CONFIG = "adapter_config.json"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the checkpoint's own directory if it holds an adapter, else one in it that does."""
    return home(names, {WEIGHTS, OLD_WEIGHTS}.intersection)


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return both files: weights without their configuration cannot be loaded."""
    return {
        join(root, name): files.sizes().get(join(root, name))
        for name in (_weights(files, root), CONFIG)
    }


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return the adapter's tensors under peft's own names."""
    name = join(root, _weights(files, root))
    return (
        safetensors.tensors(files, name)
        if name.endswith(WEIGHTS)
        else whole_bin.file_tensors(files, name)
    )


def _weights(files: Files, root: str) -> str:
    own = inside(files.sizes(), root)
    return OLD_WEIGHTS if OLD_WEIGHTS in own and WEIGHTS not in own else WEIGHTS
