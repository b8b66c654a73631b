"""Decide which entries of a module's state dict are weights.

Beside tensors a script may store numbers and text. A module stores what ``get_extra_state`` returns
under ``_extra_state``: TransformerEngine's scales, a tensor of pickled bytes, a stream of bytes or
None. It is no weight, and `from_pretrained` does not read it; a remark says that it is left out.
Source: ``torch/nn/modules/module.py`` (``_EXTRA_STATE_KEY_SUFFIX``), torch 2.13. Megatron-Core adds
the shard's number after a slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptsync.errors import Unsupported, name_in_errors
from ckptsync.formats.pickles import PickledObject, brief
from ckptsync.formats.torch_pickle import ANY_TENSOR, StoredTensor, plain_tensor
from ckptsync.tensors import Tensor

_KEY = "_extra_state"
_EXTRA = re.compile(rf"(.*\.)?{_KEY}(/.*)?", re.DOTALL)


def is_extra_state(key: Any) -> bool:
    """Return whether the key of an entry is that of a module's extra state."""
    return type(key) is str and _KEY in key and _EXTRA.fullmatch(key) is not None


def named_tensors(state: Mapping[Any, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield name and tensor of each entry that is a plain tensor.

    Raise Unsupported for a tensor of another kind, and as `entries`.
    """
    for key, value in entries(state):
        with name_in_errors(key):
            tensor = plain_tensor(value)
        if tensor is not None:
            yield key, tensor


def entries(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each entry that is a tensor of any kind, except extra states.

    An extra state that is a plain tensor is yielded. Raise Unsupported for a tensor without a name,
    and for an object that is no tensor.
    """
    for key, value in state.items():
        if is_extra_state(key) and not isinstance(value, StoredTensor):
            continue
        if isinstance(value, PickledObject):
            raise Unsupported(
                f"{brief(key)} is a {value.name}, a tensor expected",
                hint="save whole, plain tensors",
            )
        if isinstance(value, ANY_TENSOR):
            if type(key) is not str:
                raise Unsupported(
                    "tensors under keys that are no names",
                    hint="a state dict is expected: an optimizer's has numbers",
                )
            yield key, value


def without_extra_states(
    tensors: tuple[Tensor, ...], keys: Iterable[Any] = ()
) -> tuple[Tensor, ...]:
    """Return the tensors without extra states; () if there are no others.

    ``keys``: further keys of entries. If any of both is an extra state, the first returned tensor
    gets a remark that names the first of them, beside its own remark.
    """
    extra_states = dict.fromkeys(
        [t.name for t in tensors if _KEY in t.name and is_extra_state(t.name)]
    )
    extra_states |= dict.fromkeys(filter(is_extra_state, keys))
    if not extra_states:
        return tensors
    weights = [tensor for tensor in tensors if tensor.name not in extra_states]
    if not weights:
        return ()
    more = f" and {len(extra_states) - 1} more" if len(extra_states) > 1 else ""
    first = brief(next(iter(extra_states)))
    remark = f"{first}{more} left out: the extra state of a module is no weight"
    remarks = "; ".join(filter(None, (weights[0].remark, remark)))
    return (replace(weights[0], remark=remarks), *weights[1:])
