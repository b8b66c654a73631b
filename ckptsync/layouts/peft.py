"""PEFT adapters: ``adapter_model.safetensors`` (or ``.bin``) and ``adapter_config.json``.

Each directory with weights of an adapter is a root: ``save_pretrained`` writes the adapter called
``default`` into the directory itself, and each other into a directory of its name. Older versions
of PEFT write ``adapter_model.bin``.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptsync.formats import safetensors
from ckptsync.layouts import whole_bin
from ckptsync.layouts.file_names import HOMES, inside, join
from ckptsync.tensors import Files, Tensor

WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"
CONFIG = "adapter_config.json"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories of the adapters in the first of `HOMES` that has any; () if none has.

    The home itself comes first, if weights lie in it, then those directly below, sorted.
    """
    folders = {
        name.rpartition("/")[0]
        for name in names
        if name.rpartition("/")[2] in (WEIGHTS, OLD_WEIGHTS)
    }
    for home in HOMES:
        below = sorted(f for f in folders.difference(HOMES) if f.rpartition("/")[0] == home)
        if adapters := (*folders.intersection((home,)), *below):
            return adapters
    return ()


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the files of weights and configuration with their sizes, None for a missing one."""
    return {
        join(root, name): files.sizes().get(join(root, name))
        for name in (_weights(files, root), CONFIG)
    }


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return the adapter's tensors under peft's own names; the configuration is not read.

    Raise Corrupt or Unsupported for wrong weights, KeyError for missing ones (see `demands`).
    """
    name = join(root, _weights(files, root))
    return (
        safetensors.tensors(files, name)
        if name.endswith(WEIGHTS)
        else whole_bin.file_tensors(files, name)
    )


def _weights(files: Files, root: str) -> str:
    """Return the name of the weights: that of older versions if only it exists."""
    files_by_name = inside(files.sizes(), root)
    return OLD_WEIGHTS if OLD_WEIGHTS in files_by_name and WEIGHTS not in files_by_name else WEIGHTS
