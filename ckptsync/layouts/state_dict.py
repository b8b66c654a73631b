"""A module's state dict: which of its entries are weights, and what of it is left out.

Beside tensors a script may put numbers and text, and a module what ``get_extra_state`` returns,
under ``_extra_state``: TransformerEngine's scales, a tensor of pickled bytes, a stream of bytes or
None. It is no weight, and `from_pretrained` knows nothing of it. Source:
``torch/nn/modules/module.py`` (``_EXTRA_STATE_KEY_SUFFIX``). Megatron-Core adds the shard's number
behind a slash.
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
    """Return whether an entry is a module's extra state."""
    return type(key) is str and _KEY in key and _EXTRA.fullmatch(key) is not None


def named_tensors(state: Mapping[Any, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a state dict, all of which must be plain (see `entries`)."""
    for key, value in entries(state):
        with name_in_errors(key):
            tensor = plain_tensor(value)
        if tensor is not None:
            yield key, tensor


def entries(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a state dict, of whatever kind.

    Raises Unsupported for a tensor without a name, and for an object that is no tensor.
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
    tensors: tuple[Tensor, ...], others: Iterable[Any] = ()
) -> tuple[Tensor, ...]:
    """Return the tensors without extra states; a remark names those, and those among ``others``."""
    left = dict.fromkeys([t.name for t in tensors if _KEY in t.name and is_extra_state(t.name)])
    left |= dict.fromkeys(filter(is_extra_state, others))
    if not left:
        return tensors
    kept = [tensor for tensor in tensors if tensor.name not in left]
    if not kept:
        return ()
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    remark = f"{brief(next(iter(left)))}{more} left out: the extra state of a module is no weight"
    said = "; ".join(filter(None, (kept[0].remark, remark)))
    return (replace(kept[0], remark=said), *kept[1:])
