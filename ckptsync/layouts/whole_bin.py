"""Whole models that ``torch.save`` writes.

They are ``pytorch_model.bin``, numbered files with an index, or accelerate's
``pytorch_model_fsdp.bin``.

A root is the name without ``.bin``: ``pytorch_model``, ``model/pytorch_model_fsdp_1``. Sources:
``save_pretrained(safe_serialization=False)`` of transformers 4, ``save_fsdp_model`` of accelerate
(FULL_STATE_DICT).
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
    """Return what the names of models begin with, in the first directory that has some."""
    return tuple(
        sorted(join(at, stem) for at in home(names, _stems) for stem in _stems(inside(names, at)))
    )


def _stems(names: Iterable[str]) -> set[str]:
    matches = (_SINGLE.fullmatch(name) or _NUMBERED.fullmatch(name) for name in names)
    return {match[1] for match in matches if match}


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the files of the model, and the index where there is one."""
    return model_files(files, root, _END)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return every tensor of every file; an index must name exactly these."""
    return model_tensors(files, root, _END, file_tensors)


def file_tensors(files: Files, name: str) -> tuple[Tensor, ...]:
    """Return the tensors of one state dict; names that view the same elements are tied."""
    with name_in_errors(name):
        value, container = torch_save.load(files, Extent(name, 0, files.sizes()[name]))
        return state_tensors(files, container, _state(value))


def state_tensors(
    files: Files, container: torch_save.Container, state: Mapping[Any, Any]
) -> tuple[Tensor, ...]:
    """Return the tensors of a state dict that lies in ``container``."""
    found, owners = [], dict[StoredTensor, str]()
    for key, stored in named_tensors(state):
        copy = Copy(stored.dtype, stored.shape, (torch_save.part(files, container, stored),))
        tensor = Tensor(key, stored.dtype, stored.shape, (copy,))
        owner = owners.setdefault(stored, key) if stored.numel else key
        found.append(tensor if owner == key else replace(tensor, tied=owner))
    return without_extra_states(tuple(found), state)


def _state(value: Any) -> Mapping[Any, Any]:
    """Return the state dict itself, or the one in it under a name that trainers use."""
    if not isinstance(value, dict):
        raise Unsupported(
            f"a {type(value).__name__}, a state dict expected", hint="save model.state_dict()"
        )
    nested = {
        key: held
        for key, held in value.items()
        if isinstance(held, dict) and not is_extra_state(key) and _has_tensors(held)
    }
    if not nested:
        return value
    loose = any(isinstance(held, ANY_TENSOR) for held in value.values())
    if loose or len(nested) > 1 or not nested.keys() <= set(_WRAPPERS):
        raise Unsupported(
            f"tensors in several dictionaries ({brief(next(iter(nested)))} among them): nothing"
            " says which is the model"
        )
    return next(iter(nested.values()))


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    """Return whether tensors lie in it at any depth; each dictionary is looked at once."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        at = waiting.pop()
        if isinstance(at, ANY_TENSOR):
            return True
        if isinstance(at, (dict, list, tuple)) and id(at) not in seen:
            seen.add(id(at))
            waiting.extend(at.values() if isinstance(at, dict) else at)
    return False
