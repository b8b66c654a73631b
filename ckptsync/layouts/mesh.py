"""``DeviceMesh`` as pickles hold it: which rank sits where.

torch 2.2 to 2.9 keep the ranks of the mesh (``mesh``, ``_flatten_mesh_list``), of a slice only the own one; 2.10 and later keep all ranks of the
root mesh (``_flatten_rank_map``) and a layout of sizes and strides in them.  Source: ``torch/distributed/{device_mesh,_mesh_layout}.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Build, Name, brief, made
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.wrapped import MOST_RANKS, attributes
from ckptsync.model import Shape

_MOST_AXES = 8
ALLOWED: dict[Name, Build] = {
    Name("torch.distributed.device_mesh", "DeviceMesh"): made,
    Name("torch.distributed._tensor.device_mesh", "DeviceMesh"): made,
    Name("torch.distributed._mesh_layout", "_MeshLayout"): made,
    Name("torch.distributed._mesh_layout", "_FlatLayout"): made,
}


@dataclass(frozen=True, slots=True)
class Mesh:
    """``ranks`` row by row in ``shape``; ``coordinate`` is the place of the rank that wrote it, ``world`` one more than the highest."""

    shape: Shape
    ranks: tuple[int, ...]
    coordinate: Shape
    world: int

    @property
    def rank(self) -> int:
        """The rank at ``coordinate``."""
        return self.ranks[_ravel(self.coordinate, self.shape)]


def mesh(value: Any) -> Mesh:
    """Read one; raises Corrupt where its parts do not agree, Unsupported for attributes of no known torch."""
    state = attributes(value, "DeviceMesh", ())
    coordinate = _naturals(state.get("_coordinate_on_dim"), "_coordinate_on_dim")
    if "_layout" in state and "_flatten_rank_map" in state:
        found = _by_layout(state, coordinate)
    elif "mesh" in state and "_flatten_mesh_list" in state:
        found = _by_list(state, coordinate)
    else:
        raise Unsupported("DeviceMesh has neither _layout nor mesh, as every known version of torch gives it")
    if found.rank != state.get("_rank", found.rank):
        raise Corrupt(f"DeviceMesh of rank {found.rank} says that its rank is {brief(state['_rank'])}")
    return found


def _by_list(state: dict[str, Any], coordinate: Shape) -> Mesh:
    tensor, ranks = state["mesh"], _ranks(state["_flatten_mesh_list"])
    if not isinstance(tensor, Stored) or tensor.numel != len(ranks):
        raise Corrupt(f"DeviceMesh of {len(ranks)} ranks whose mesh has another size")
    return _checked(tensor.shape, ranks, coordinate, max(ranks) + 1)


def _by_layout(state: dict[str, Any], coordinate: Shape) -> Mesh:
    """A slice of the root mesh starts where its own coordinate comes out at its own rank, or at zero if it is the whole."""
    every = _ranks(state["_flatten_rank_map"])
    axes = _axes(state["_layout"], len(every))
    places = [sum(steps) for steps in product(*axes)]
    shape = tuple(map(len, axes))
    base = 0
    if len(places) != len(every):
        if state.get("_rank") not in every:
            raise Unsupported("a DeviceMesh that is a slice of another and does not say whose", hint="give a mesh of all ranks")
        base = every.index(state["_rank"]) - places[_ravel(coordinate, shape)]
    if base < 0 or base + max(places) >= len(every):
        raise Corrupt("DeviceMesh has a layout that reaches out of its ranks")
    return _checked(shape, tuple(every[base + place] for place in places), coordinate, max(every) + 1)


def _checked(shape: Shape, ranks: tuple[int, ...], coordinate: Shape, world: int) -> Mesh:
    if not shape or len(shape) > _MOST_AXES or len(set(ranks)) != len(ranks) or prod(shape) != len(ranks):
        raise Corrupt(f"DeviceMesh of shape {shape} with {len(set(ranks))} different ranks")
    _ravel(coordinate, shape)
    return Mesh(shape, _once(ranks), coordinate, world)


@lru_cache(maxsize=64)
def _once(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """One object for all files: what every tensor of every rank says is compared with what the first one says."""
    return ranks


def _ravel(coordinate: Shape, shape: Shape) -> int:
    if len(coordinate) != len(shape) or any(at >= n for at, n in zip(coordinate, shape, strict=True)):
        raise Corrupt(f"DeviceMesh of shape {shape} with a rank at {coordinate}")
    place = 0
    for at, n in zip(coordinate, shape, strict=True):
        place = place * n + at
    return place


def _axes(layout: Any, most: int) -> list[list[int]]:
    """For every axis of the mesh, how far each of its places lies from the first."""
    state = attributes(layout, "_MeshLayout", ())
    if isinstance(state.get("axes"), (tuple, list)):
        flat = [attributes(axis, "_FlatLayout", ("shape", "stride")) for axis in state["axes"]]
        pairs = [(axis["shape"], axis["stride"]) for axis in flat]
    elif {"shape", "stride"} <= state.keys():
        sizes, steps = _several(state["shape"]), _several(state["stride"])
        if len(sizes) != len(steps):
            raise Corrupt("a mesh layout with more sizes than strides")
        pairs = list(zip(sizes, steps, strict=True))
    else:
        raise Unsupported("a mesh layout without axes or shape, as every known version of torch gives it")
    found = [_places(_leaves(sizes), _leaves(steps), most) for sizes, steps in pairs]
    if prod(map(len, found)) > most:
        raise Corrupt(f"a mesh layout of more places than there are ranks ({most})")
    return found


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _leaves(value: Any) -> Shape:
    """The numbers of a tuple of tuples, from left to right."""
    found: list[Any] = []
    waiting, looks = [value], 0
    while waiting:
        at, looks = waiting.pop(), looks + 1
        if isinstance(at, tuple) and len(at) <= _MOST_AXES:
            waiting.extend(reversed(at))
        else:
            found.append(at)
        if looks > _MOST_AXES**2:
            raise Corrupt("a mesh layout of too many sizes")
    return _naturals(found, "_layout")


def _places(sizes: Shape, strides: Shape, most: int) -> list[int]:
    if len(sizes) != len(strides) or prod(sizes) > most or not all(sizes):
        raise Corrupt(f"a mesh layout of sizes {sizes[:4]} and strides {strides[:4]} for {most} ranks")
    return [sum(at * step for at, step in zip(place, strides, strict=True)) for place in product(*map(range, sizes))]


def _ranks(value: Any) -> tuple[int, ...]:
    found = _naturals(value, "ranks")
    if not found or max(found) >= MOST_RANKS or len(set(found)) < len(found):
        raise Corrupt("DeviceMesh without ranks, with impossible ones, or with one twice")
    return found


def _naturals(value: Iterable[Any] | None, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > MOST_RANKS or any(type(n) is not int or n < 0 for n in value):
        raise Corrupt(f"DeviceMesh whose {what} is not made of natural numbers")
    return tuple(value)
