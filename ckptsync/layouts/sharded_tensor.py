"""ShardedTensors in pickles (FSDP1): a list of all shards of a tensor, and those that the rank holds.

Source: ``torch/distributed/_shard/sharded_tensor/api.py`` (``__getstate__``), ``metadata.py``, ``shard.py``, ``torch/distributed/_shard/metadata.py``.
"""

from __future__ import annotations

from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.pickles import Build, Name, made
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.wrapped import MOST_RANKS, Piece, Share, Wrapped, attributes, shape_of
from ckptsync.model import Shape

_SHARDED = "torch.distributed._shard"
KIND = Name(f"{_SHARDED}.sharded_tensor.api", "ShardedTensor")


def _getattr(_: Name, args: tuple[Any, ...]) -> Name:
    """Protocol 2 reaches a nested class by ``getattr``; only this one, and nothing is looked up.

    The outer class stands for it: nothing else is made of that without arguments.
    """
    if args != (KIND, "ProcessGroupState"):
        raise Corrupt("pickle: getattr of something else than ShardedTensor.ProcessGroupState")
    return args[0]


ALLOWED: dict[Name, Build] = {
    KIND: made,
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

_Place = tuple[Shape, Shape]


def share(tensor: Wrapped) -> Share:
    """What the writing rank has of ``tensor``.  Raises Corrupt for a shard that the list has not, or not of its size."""
    if not isinstance(tensor.state, tuple) or len(tensor.state) != 5:
        raise Corrupt("a ShardedTensor without its five fields")
    shards, metadata, group = tensor.state[:3]
    told = attributes(metadata, "ShardedTensorMetadata", ("shards_metadata", "size"))
    every = tuple(sorted(_place(shard) for shard in _listed(told["shards_metadata"])))
    if shape_of(told["size"]) != tensor.shape:
        raise Corrupt(f"a ShardedTensor of {tensor.shape} that says another shape elsewhere")
    world, rank, count = _group(group)
    pieces = tuple(_piece(shard, tensor.dtype) for shard in _listed(shards))
    known = set(every)
    strange = [p.offsets for p in pieces if (p.offsets, p.sizes) not in known]
    if strange:
        raise Corrupt(f"a ShardedTensor has a shard at {strange[0]} that its list has not")
    return Share(tensor.dtype, tensor.shape, pieces, (world, every), world, rank, count)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_RANKS:
        raise Corrupt("a ShardedTensor without a list of shards")
    return value


def _place(shard: Any) -> _Place:
    fields = attributes(shard, "ShardMetadata", ("shard_offsets", "shard_sizes"))
    return shape_of(fields["shard_offsets"]), shape_of(fields["shard_sizes"])


def _piece(shard: Any, dtype: str) -> Piece:
    fields = attributes(shard, "Shard", ("tensor", "metadata"))
    (offsets, sizes), stored = _place(fields["metadata"]), fields["tensor"]
    if not isinstance(stored, Stored) or (stored.shape, stored.dtype) != (sizes, dtype):
        raise Corrupt(f"a ShardedTensor of {dtype} whose shard at {offsets} is not a tensor of {sizes}")
    return Piece(offsets, sizes, stored)


def _group(value: Any) -> tuple[int, int, int]:
    """How many ranks there are, which one wrote this, and how many share the tensor."""
    keys = ("global_world_size", "global_rank", "local_world_size")
    state = attributes(value, KIND.name, keys)
    world, rank, count = (state[key] for key in keys)
    if any(type(n) is not int for n in (world, rank, count)) or not 0 <= rank < world < MOST_RANKS or not 0 < count <= world:
        raise Corrupt("a ShardedTensor whose process group is impossible")
    return world, rank, count
