"""Whole models that ``torch.save`` writes: ``pytorch_model.bin`` and the like.

They are one file, numbered files with an index, or accelerate's ``pytorch_model_fsdp.bin``. A root
is the name without ``.bin``: ``pytorch_model``, ``model/pytorch_model_fsdp_1``. Other layouts read
state dicts with `state_tensors`.

Sources: ``save_pretrained(safe_serialization=False)`` of transformers 4, ``save_fsdp_model`` of
accelerate 1.15 (FULL_STATE_DICT).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptsync.errors import Unsupported, name_in_errors
from ckptsync.formats import torch_save
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import ANY_TENSOR, StoredTensor
from ckptsync.layouts.file_names import home, inside, join
from ckptsync.layouts.state_dict import is_extra_state, named_tensors, without_extra_states
from ckptsync.layouts.whole_safetensors import model_files, model_tensors
from ckptsync.tensors import Copy, Extent, Files, Tensor

_END = ".bin"
_SINGLE = re.compile(r"(pytorch_model|pytorch_model_fsdp(?:_[0-9]+)?)\.bin(?:\.index\.json)?")
_NUMBERED = re.compile(r"(pytorch_model)-[0-9]{5}-of-[0-9]{5}\.bin")
_WRAPPERS = ("model", "state_dict", "module", "model_state_dict")


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the paths, without end, of the models in the first of `HOMES` with any; () if none."""
    return tuple(
        sorted(
            join(folder, stem)
            for folder in home(names, _stems)
            for stem in _stems(inside(names, folder))
        )
    )


def _stems(names: Iterable[str]) -> set[str]:
    """Return, of the names that are a model's files, what precedes the number and ``.bin``."""
    matches = (_SINGLE.fullmatch(name) or _NUMBERED.fullmatch(name) for name in names)
    return {match[1] for match in matches if match}


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the model's files, and the index if there is one. Raise Corrupt for a wrong index."""
    return model_files(files, root, _END)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return every tensor of every file; raise as `model_tensors`.

    Raise Corrupt, too, if a file is damaged; Unsupported for other content.
    """
    return model_tensors(files, root, _END, file_tensors)


def file_tensors(files: Files, name: str) -> tuple[Tensor, ...]:
    """Return the tensors of the state dict in one file; raise as `state_tensors`.

    Raise Corrupt, too, if the file is damaged, Unsupported if it is not clear which dictionary is
    the model's, and KeyError if there is no such file.
    """
    with name_in_errors(name):
        value, container = torch_save.load(files, Extent(name, 0, files.sizes()[name]))
        return state_tensors(files, container, _state(value))


def state_tensors(
    files: Files, container: torch_save.Container, state: Mapping[Any, Any]
) -> tuple[Tensor, ...]:
    """Return the tensors of a state dict that lies in ``container``; () if it has none.

    A name that views the same elements as an earlier one is tied to that. Extra states are left
    out, with a remark on the first tensor. Raise Unsupported for tensors that are not plain, or lie
    under keys that are no names; Corrupt for wrong records.
    """
    tensors, owners = [], dict[StoredTensor, str]()
    for key, stored in named_tensors(state):
        copy = Copy(stored.dtype, stored.shape, (torch_save.part(files, container, stored),))
        tensor = Tensor(key, stored.dtype, stored.shape, (copy,))
        owner = owners.setdefault(stored, key) if stored.numel else key
        tensors.append(tensor if owner == key else replace(tensor, tied=owner))
    return without_extra_states(tuple(tensors), state)


def _state(value: Any) -> Mapping[Any, Any]:
    """Return ``value`` if no dictionary in it has tensors, else the one that has.

    Raise Unsupported if ``value`` is no dictionary, if several have tensors, or tensors lie beside
    the one, or if its key is not among `_WRAPPERS`.
    """
    if not isinstance(value, dict):
        raise Unsupported(
            f"a {type(value).__name__}, a state dict expected", hint="save model.state_dict()"
        )
    nested = {
        key: inner
        for key, inner in value.items()
        if isinstance(inner, dict) and not is_extra_state(key) and _has_tensors(inner)
    }
    if not nested:
        return value
    loose = any(isinstance(inner, ANY_TENSOR) for inner in value.values())
    if loose or len(nested) > 1 or not nested.keys() <= set(_WRAPPERS):
        raise Unsupported(
            f"tensors in several dictionaries ({brief(next(iter(nested)))} among them): nothing"
            " says which is the model"
        )
    return next(iter(nested.values()))


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    """Return whether tensors lie in a dictionary at any depth; each container is searched once."""
    pending: list[Any] = [value]
    visited: set[int] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, ANY_TENSOR):
            return True
        if isinstance(item, (dict, list, tuple)) and id(item) not in visited:
            visited.add(id(item))
            pending.extend(item.values() if isinstance(item, dict) else item)
    return False
