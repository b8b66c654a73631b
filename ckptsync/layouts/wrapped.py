"""Tensors that are wrapped: what ``_rebuild_wrapper_subclass`` is given, and what a rank has of such a tensor.

Source: ``torch/_utils.py`` (``_rebuild_wrapper_subclass``), ``torch/_tensor.py`` (``_rebuild_from_type_v2``), torch 2.2 to 2.13.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.pickles import Made, Name, brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.model import Shape

SUBCLASS = Name("torch._utils", "_rebuild_wrapper_subclass")
FROM_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A tensor of a wrapper class ``kind``, with the global dtype and shape that it was made with, and its state."""

    kind: Name
    dtype: str
    shape: Shape
    state: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the tensor that a rank holds, and the stored elements."""

    offsets: Shape
    sizes: Shape
    stored: Stored


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of one tensor.

    ``told``: what all ranks must say alike.  ``world`` and ``rank``: how many ranks there are at least, and which one wrote this;
    ``group``: how many of them hold the tensor together, ``peers`` which ones, where it says so.
    """

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]
    told: object
    world: int
    rank: int
    group: int
    peers: tuple[int, ...] = ()


def rebuilt(name: Name, args: tuple[Any, ...]) -> Any:
    """The constructor for ``_rebuild_from_type_v2(func, type, args, state)``: a `Wrapped`, or what an unwrapped tensor is."""
    func, kind, inner, state = args
    if func != SUBCLASS:
        return torch_pickle.TENSORS[FROM_TYPE](name, args)
    if not isinstance(kind, Name) or not isinstance(inner, tuple) or len(inner) < 6:
        raise Corrupt("pickle: a wrapped tensor without class, dtype and shape")
    layout = inner[5]
    if not isinstance(layout, Made) or layout.args != ("torch.strided",):
        raise Unsupported(f"pickle: a {kind} that is not strided", hint="only dense tensors are read")
    return Wrapped(kind, torch_pickle.dtype_of(inner[1]), shape_of(inner[2]), state)


def shape_of(value: Any) -> Shape:
    """A shape or offset out of a pickle; raises Corrupt."""
    if not isinstance(value, (tuple, list)) or len(value) > MOST_AXES or any(type(n) is not int or n < 0 for n in value):
        raise Corrupt("pickle: a shape or offset that is not made of natural numbers")
    return tuple(value)


def attributes(value: Any, kind: str, needed: Collection[str]) -> dict[str, Any]:
    """The attributes of a pickled object of class ``kind``; raises Corrupt without one of ``needed``."""
    state = value.state if isinstance(value, Made) and value.name.name == kind else None
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]  # of a class with slots
    if not isinstance(state, dict) or not set(needed) <= state.keys():
        raise Corrupt(f"pickle: no {kind} where one is due, or one without {', '.join(needed)}")
    return state


def refuse_strangers(state: dict[str, Any], known: Collection[str], kind: str) -> None:
    """An attribute that no known torch gives may change what the others mean."""
    strange = sorted(brief(key) for key in state if key not in known)
    if strange:
        raise Unsupported(f"{kind} has an attribute {strange[0]}, which no known version of torch gives it")
