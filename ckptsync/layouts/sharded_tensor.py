"""Sharded tensors in pickles: what ``_rebuild_wrapper_subclass`` makes, and one rank's part.

A `Wrapped` is a DTensor (see `dtensor`) or a ShardedTensor of FSDP1, which holds a list of all
shards of the tensor and those of the rank. Source: ``torch/_utils.py``
(``_rebuild_wrapper_subclass``), ``torch/_tensor.py`` (``_rebuild_from_type_v2``), torch 2.2 to
2.13; ``torch/distributed/_shard/sharded_tensor/api.py`` (``__getstate__``), ``metadata.py``,
``shard.py``, ``torch/distributed/_shard/metadata.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.pickles import Build, Name, PickledObject, brief, made
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts.file_names import MOST_RANKS
from ckptsync.tensors import Shape

SUBCLASS = Name("torch._utils", "_rebuild_wrapper_subclass")
FROM_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")
_SHARDED = "torch.distributed._shard"
SHARDED_TENSOR = Name(f"{_SHARDED}.sharded_tensor.api", "ShardedTensor")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A tensor of a wrapper class ``kind``: its global dtype and shape, and its state."""

    kind: Name
    dtype: str
    shape: Shape
    state: Any


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of the tensor that a rank holds, and the stored elements."""

    offsets: Shape
    sizes: Shape
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class RankShards:
    """What one rank has of one tensor.

    ``cut`` says how the tensor is cut, and must be the same in all ranks. ``world`` and ``rank``:
    how many ranks there are at least, and which one wrote this. ``group``: how many of them hold
    the tensor together, ``peers``: which ones, where it is known.
    """

    dtype: str
    shape: Shape
    pieces: tuple[LocalShard, ...]
    cut: object
    world: int
    rank: int
    group: int
    peers: tuple[int, ...] = ()


def rebuilt(name: Name, args: tuple[Any, ...]) -> Any:
    """Return a `Wrapped`, or what a tensor that is not wrapped is.

    Stands for ``_rebuild_from_type_v2(func, type, args, state)``.
    """
    func, kind, inner, state = args
    if func != SUBCLASS:
        return torch_pickle.TENSORS[FROM_TYPE](name, args)
    if not isinstance(kind, Name) or not isinstance(inner, tuple) or len(inner) < 6:
        raise Corrupt("pickle: a wrapped tensor without class, dtype and shape")
    layout = inner[5]
    if not isinstance(layout, PickledObject) or layout.args != ("torch.strided",):
        raise Unsupported(
            f"pickle: a {kind} that is not strided", hint="only dense tensors are read"
        )
    return Wrapped(kind, torch_pickle.dtype_of(inner[1]), shape_of(inner[2]), state)


def shape_of(value: Any) -> Shape:
    """Return a shape or offset, which these classes keep as a tuple or as a list."""
    return torch_pickle.shape_of(tuple(value) if type(value) is list else value)


def attributes(value: Any, kind: str, needed: Collection[str]) -> dict[str, Any]:
    """Return the attributes of a pickled object of class ``kind``.

    Raises Corrupt without one of ``needed``.
    """
    state = value.state if isinstance(value, PickledObject) and value.name.name == kind else None
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]  # of a class with slots
    if not isinstance(state, dict) or not set(needed) <= state.keys():
        raise Corrupt(f"pickle: no {kind} where one is due, or one without {', '.join(needed)}")
    return state


def refuse_strangers(state: dict[str, Any], known: Collection[str], kind: str) -> None:
    """Raise Unsupported for an attribute that no known torch gives.

    It may change what the others mean.
    """
    strange = sorted(brief(key) for key in state if key not in known)
    if strange:
        raise Unsupported(
            f"{kind} has an attribute {strange[0]}, which no known version of torch gives it"
        )


def sharded_share(tensor: Wrapped) -> RankShards:
    """Return what the writing rank has of a ShardedTensor.

    Raises Corrupt for a shard that the list of all shards does not have, or not of its size.
    """
    if not isinstance(tensor.state, tuple) or len(tensor.state) != 5:
        raise Corrupt("a ShardedTensor without its five fields")
    shards, metadata, group = tensor.state[:3]
    fields = attributes(metadata, "ShardedTensorMetadata", ("shards_metadata", "size"))
    if shape_of(fields["size"]) != tensor.shape:
        raise Corrupt(f"a ShardedTensor of {tensor.shape} that says another shape elsewhere")
    every = tuple(sorted(_box(shard) for shard in _listed(fields["shards_metadata"])))
    world, rank, count = _group(group)
    pieces = tuple(_piece(shard, tensor.dtype) for shard in _listed(shards))
    known = set(every)
    strange = [p.offsets for p in pieces if (p.offsets, p.sizes) not in known]
    if strange:
        raise Corrupt(
            f"a ShardedTensor has a shard at {strange[0]} that is not in its list of all shards"
        )
    return RankShards(tensor.dtype, tensor.shape, pieces, (world, every), world, rank, count)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_RANKS:
        raise Corrupt("a ShardedTensor without a list of shards")
    return value


def _box(shard: Any) -> tuple[Shape, Shape]:
    fields = attributes(shard, "ShardMetadata", ("shard_offsets", "shard_sizes"))
    return shape_of(fields["shard_offsets"]), shape_of(fields["shard_sizes"])


def _piece(shard: Any, dtype: str) -> LocalShard:
    fields = attributes(shard, "Shard", ("tensor", "metadata"))
    (offsets, sizes), stored = _box(fields["metadata"]), fields["tensor"]
    if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (sizes, dtype):
        raise Corrupt(
            f"a ShardedTensor of {dtype} whose shard at {offsets} is not a tensor of {sizes}"
        )
    return LocalShard(offsets, sizes, stored)


def _group(value: Any) -> tuple[int, int, int]:
    """Return how many ranks there are, which one wrote this, and how many share the tensor."""
    keys = ("global_world_size", "global_rank", "local_world_size")
    state = attributes(value, SHARDED_TENSOR.name, keys)
    world, rank, count = (state[key] for key in keys)
    if (
        any(type(n) is not int for n in (world, rank, count))
        or not 0 <= rank < world < MOST_RANKS
        or not 0 < count <= world
    ):
        raise Corrupt("a ShardedTensor whose process group is impossible")
    return world, rank, count


def _getattr(_: Name, args: tuple[Any, ...]) -> Name:
    """Return the class that stands for the nested class ``ProcessGroupState``.

    Protocol 2 reaches a nested class by ``getattr``. Only this one is allowed, and nothing is
    looked up. The outer class stands for it: nothing else is made of that without arguments.
    """
    if args != (SHARDED_TENSOR, "ProcessGroupState"):
        raise Corrupt("pickle: getattr of something else than ShardedTensor.ProcessGroupState")
    outer: Name = args[0]
    return outer


ALLOWED: Mapping[Name, Build] = {
    FROM_TYPE: rebuilt,
    SUBCLASS: made,
    SHARDED_TENSOR: made,
    Name("__builtin__", "getattr"): _getattr,
    Name("builtins", "getattr"): _getattr,
    Name(f"{_SHARDED}.sharded_tensor.shard", "Shard"): made,
    Name(f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata"): made,
    Name(f"{_SHARDED}.sharded_tensor.metadata", "TensorProperties"): made,
    Name(f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): made,
    Name(f"{_SHARDED}.metadata", "ShardMetadata"): made,
    Name(f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"): made,
    Name(f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec"): made,
    Name("torch.distributed.remote_device", "_remote_device"): made,
}
