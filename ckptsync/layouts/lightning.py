"""Lightning's checkpoint of one file, ``epoch=0-step=10.ckpt``: find the model's state dict in it.

``torch.save`` wrote the file: the model's state dict beside the training's states. A root is the
file's name. Hyperparameters, callbacks and data modules may hold objects of any class; they are
read as plain values, as everything in a pickle, and not used.

Sources: ``dump_checkpoint`` of ``lightning/pytorch/trainer/connectors/checkpoint_connector.py`` 2.6
(``state_dict``), ``Fabric.save`` of ``lightning/fabric/fabric.py``, whose keys are the script's
own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported, name_in_errors
from ckptsync.formats import torch_save, torch_zip
from ckptsync.formats.pickles import AnyClass, brief
from ckptsync.formats.torch_pickle import ALLOWED, ANY_TENSOR
from ckptsync.layouts.file_names import inside
from ckptsync.layouts.whole_bin import state_tensors
from ckptsync.tensors import Extent, Files, Tensor

_END = ".ckpt"
_STATE = "state_dict"
_OF_FABRIC = ("model", "module", "model_state_dict")
_OPTIMIZER = re.compile("optimizers?(_states?)?|optim")  # Fabric's keys are the script's own
_ALLOWED = AnyClass(ALLOWED)


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the ``*.ckpt`` files in the checkpoint's own directory, sorted."""
    return tuple(sorted(name for name in inside(names, "") if name.endswith(_END) and name != _END))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the file with its size, if it has the end that torch writes.

    Raise Incomplete if it has not, or is missing: it is being written, or torch did not write it,
    and beside shards it is the script's own.
    """
    extent = _where(files, root)
    try:
        is_whole = torch_save.has_end(files, extent, _ALLOWED)
    except Unsupported:
        is_whole = False
    if not is_whole:
        raise Incomplete(
            f"{root}: has no end as torch.save writes it",
            hint="it is being written, is truncated, or is none of torch's",
        )
    return {root: extent.size}


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return the model's tensors, under the names that the LightningModule gives them.

    A remark on the first names other dictionaries of tensors with some of the same names. Raise
    Unsupported if it is not clear which are the model, Incomplete for a missing file, Corrupt for a
    damaged one.
    """
    value, container = _load(files, _where(files, root))
    state = _state(value, root)
    with name_in_errors(root):
        weights = state_tensors(files, container, state)
    other_keys = [
        str(key)
        for key, inner in value.items()
        if isinstance(inner, dict) and inner is not state and inner.keys() & state.keys()
        if _holds_tensors(inner)
    ]
    if not other_keys or not weights:
        return weights
    remark = f"{', '.join(map(brief, other_keys))}: other values of the weights, which are left out"
    remarks = "; ".join(filter(None, (weights[0].remark, remark)))
    return (replace(weights[0], remark=remarks), *weights[1:])


def has_optimizer(files: Files, root: str) -> bool:
    """Return whether an optimizer's state lies beside the model's: ``optimizer_states``.

    False for ``save_weights_only``, and for a file that is damaged or not supported. It loads the
    file; raise Incomplete if it is missing.
    """
    try:
        value, _ = _load(files, _where(files, root))
    except (Unsupported, Corrupt):
        return False
    keys = [key for key in value if isinstance(key, str)] if isinstance(value, dict) else []
    return any(map(_OPTIMIZER.fullmatch, keys))


def _where(files: Files, root: str) -> Extent:
    """Return the extent of the file; raise Incomplete if it is missing."""
    if root not in files.sizes():
        raise Incomplete(f"{root}: not found")
    return Extent(root, 0, files.sizes()[root])


def _load(files: Files, extent: Extent) -> tuple[Any, torch_save.Container]:
    """Return the value and the container; raise Corrupt if the file is damaged.

    An archive's pickle that cannot be read but matches its CRC32 is not damaged: raise Unsupported.
    """
    try:
        return torch_save.load(files, extent, _ALLOWED)
    except Corrupt as e:
        if torch_save.is_legacy(files, extent):
            raise
        archive = torch_zip.open_archive(files, extent)
        # raises Corrupt where the pickle is not the one that was written
        torch_zip.pickle_of(files, archive)
        if not archive.summed:
            raise
        raise Unsupported(
            f"{extent.file}: {e}",
            hint="the pickle is intact (its CRC32 matches), but ckptsync does not support its"
            " content: save a plain state dict",
        ) from e


def _state(value: Any, root: str) -> Mapping[Any, Any]:
    """Return the state dict: under Lightning's own key, else Fabric's, else the value itself.

    It must have tensors. Raise Unsupported if none has, or several of Fabric's keys and not
    Lightning's.
    """
    if isinstance(value, dict):
        keys = [
            key
            for key in (_STATE, *_OF_FABRIC)
            if isinstance(value.get(key), dict) and _holds_tensors(value[key])
        ]
        if keys[:1] == [_STATE] or len(keys) == 1:
            state: Mapping[Any, Any] = value[keys[0]]
            return state
        if not keys and _holds_tensors(value):
            return value
    raise Unsupported(
        f"{root}: nothing in it says which tensors are the model",
        hint=f"Lightning's lie under {_STATE!r}",
    )


def _holds_tensors(value: Mapping[Any, Any]) -> bool:
    """Return whether a value of the dictionary is a tensor."""
    return any(isinstance(item, ANY_TENSOR) for item in value.values())
