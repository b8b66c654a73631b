"""Sharded tensors in pickles: find the boxes that one rank holds of a DTensor or a ShardedTensor.

Both are wrapper classes of torch (`Wrapped`). A ShardedTensor (FSDP1) lists all shards of the
tensor and those of the rank. A DTensor (FSDP2, verl, FSDP1 on a mesh) has the global shape; where a
rank's local tensor belongs follows from its place in the mesh and from the placements, never from
values.

In reading order: what a rank has (`RankShards`), ShardedTensors (`sharded_share`), which indexes a
rank holds (`local_runs`, `boxes`), the mesh (`read_mesh`), DTensors (`dtensor_share`). Sources,
torch 2.2 to 2.13: ``torch/distributed/_shard/sharded_tensor/api.py`` (``__getstate__``),
``metadata.py``, ``shard.py``, ``torch/distributed/_shard/metadata.py``;
``torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py`` (before 2.5 in
``torch/distributed/_tensor``), ``torch/distributed/{device_mesh,_mesh_layout}.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.pickles import Build, Name, PickledObject, all_made, brief, made
from ckptsync.formats.torch_pickle import StoredTensor, Wrapped, plain_tensor
from ckptsync.layouts.file_names import MOST_RANKS
from ckptsync.tensors import Shape

_SHARDED = "torch.distributed._shard"
SHARDED_TENSOR = Name(f"{_SHARDED}.sharded_tensor.api", "ShardedTensor")
_OLD = "torch.distributed._tensor"  # until 2.4
_NEW = "torch.distributed.tensor"
DTENSORS = frozenset(
    {Name(_NEW, "DTensor"), Name(f"{_NEW}._api", "DTensor"), Name(f"{_OLD}.api", "DTensor")}
)
_PARTIAL = ("Partial", "_Partial", "_NormPartial", "_MaskPartial", "MaskPartial")
_PLACEMENTS = ("Shard", "_StridedShard", "Replicate", *_PARTIAL)
_SPEC = ("mesh", "placements", "tensor_meta")
_KNOWN = frozenset({*_SPEC, "_hash", "shard_order", "use_strided_shard_as_shard_order"})
_MOST_MESH_AXES = 8
_MOST_RUNS = 1 << 16  # of one tensor on one rank: real ones have a handful


@dataclass(frozen=True, slots=True)
class RankShards:
    """What one rank has of one tensor: ``pieces`` are boxes, by offsets and stored elements.

    ``cut`` says how the tensor is cut, and must be the same in all ranks. ``world``: a lower limit
    of the number of ranks. ``rank``: the one that wrote this. ``group``: how many ranks hold the
    tensor together; ``peers``: which ones, if known.
    """

    dtype: str
    shape: Shape
    pieces: tuple[tuple[Shape, StoredTensor], ...]
    cut: object
    world: int
    rank: int
    group: int
    peers: tuple[int, ...] = ()


def shape_of(value: Any) -> Shape:
    """Return a shape or offset, a tuple or a list, as a tuple; raise Corrupt if it is none."""
    return torch_pickle.shape_of(tuple(value) if type(value) is list else value)


def attributes(value: Any, kind: str, needed: Collection[str]) -> dict[str, Any]:
    """Return the attributes of a pickled object of a class named ``kind``, of any module.

    Raise Corrupt for anything else, or without ``needed``.
    """
    state = value.state if isinstance(value, PickledObject) and value.name.name == kind else None
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]  # of a class with slots
    if not isinstance(state, dict) or not set(needed) <= state.keys():
        raise Corrupt(f"pickle: no {kind} where one is due, or one without {', '.join(needed)}")
    return state


def refuse_strangers(state: dict[str, Any], known_attributes: Collection[str], kind: str) -> None:
    """Raise Unsupported for an attribute not in ``known_attributes``: it may change the others."""
    strange = sorted(brief(key) for key in state if key not in known_attributes)
    if strange:
        raise Unsupported(
            f"{kind} has an attribute {strange[0]}, which no known version of torch gives it"
        )


# ShardedTensors


def sharded_share(tensor: Wrapped) -> RankShards:
    """Return what the writing rank has of a ShardedTensor.

    Raise Corrupt if its own shards are not in its list of all shards, or if its fields are wrong.
    """
    if not isinstance(tensor.state, tuple) or len(tensor.state) != 5:
        raise Corrupt("a ShardedTensor without its five fields")
    shards, metadata, group = tensor.state[:3]
    fields = attributes(metadata, "ShardedTensorMetadata", ("shards_metadata", "size"))
    if shape_of(fields["size"]) != tensor.shape:
        raise Corrupt(f"a ShardedTensor of {tensor.shape} that says another shape elsewhere")
    every = tuple(sorted(_box(shard) for shard in _listed(fields["shards_metadata"], "shards")))
    world, rank, count = _group(group)
    pieces = tuple(_piece(shard, tensor.dtype) for shard in _listed(shards, "shards"))
    all_boxes = set(every)
    strange = [offsets for offsets, stored in pieces if (offsets, stored.shape) not in all_boxes]
    if strange:
        raise Corrupt(
            f"a ShardedTensor has a shard at {strange[0]} that is not in its list of all shards"
        )
    return RankShards(tensor.dtype, tensor.shape, pieces, (world, every), world, rank, count)


def _listed(value: Any, name: str, *other_types: type[Any]) -> Sequence[Any]:
    """Return ``value`` if it is a list, or of ``other_types``, of at most `MOST_RANKS` items.

    Raise Corrupt if not, with ``name``.
    """
    if type(value) not in (list, *other_types) or len(value) > MOST_RANKS:
        raise Corrupt(f"a sharded tensor without a list of {name}")
    listed: Sequence[Any] = value
    return listed


def _box(shard: Any) -> tuple[Shape, Shape]:
    """Return offsets and sizes of a shard; raise Corrupt without them."""
    fields = attributes(shard, "ShardMetadata", ("shard_offsets", "shard_sizes"))
    return shape_of(fields["shard_offsets"]), shape_of(fields["shard_sizes"])


def _piece(shard: Any, dtype: str) -> tuple[Shape, StoredTensor]:
    """Return a shard's offsets and elements; Corrupt for wrong ones, Unsupported if not plain."""
    fields = attributes(shard, "Shard", ("tensor", "metadata"))
    (offsets, sizes), stored = _box(fields["metadata"]), fields["tensor"]
    stored = plain_tensor(stored)
    if stored is None or (stored.shape, stored.dtype) != (sizes, dtype):
        raise Corrupt(
            f"a ShardedTensor of {dtype} whose shard at {offsets} is not a tensor of {sizes}"
        )
    return offsets, stored


def _group(value: Any) -> tuple[int, int, int]:
    """Return the world size, the rank that wrote this, and how many ranks share the tensor.

    Raise Corrupt if these numbers are impossible.
    """
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
    """Return `SHARDED_TENSOR`'s name, which stands for its nested class ``ProcessGroupState``.

    Protocol 2 reaches a nested class by ``getattr``. Nothing is looked up; raise Corrupt for any
    other arguments.
    """
    if args != (SHARDED_TENSOR, "ProcessGroupState"):
        raise Corrupt("pickle: getattr of something else than ShardedTensor.ProcessGroupState")
    outer: Name = args[0]
    return outer


# Which indexes a rank holds

Run = tuple[int, int]  # first index of an axis, how many


@dataclass(frozen=True, slots=True)
class Shard:
    """A cut of axis ``dim``, within each of ``factor`` chunks of it; 1 is the plain cut."""

    dim: int
    factor: int = 1


Placement = Shard | None  # None: the same on every rank along a mesh axis


def local_runs(
    shape: Shape, mesh: Shape, coordinate: Shape, placements: Sequence[Placement]
) -> tuple[tuple[Run, ...], ...]:
    """Return, for every axis, the runs of indexes that the rank at ``coordinate`` holds.

    Runs are in the rank's order. Placements act from left to right, each on the result of those
    before it: ``Shard`` cuts as ``torch.chunk``, ``_StridedShard`` cuts each of ``split_factor``
    chunks, and joins the results. Raise Corrupt for an axis that the tensor lacks, Unsupported for
    an impossible factor. Source: ``_compute_local_shape_and_global_offset`` of
    ``torch/distributed/tensor/_utils.py`` and ``_StridedShard._split_tensor`` of
    ``placement_types.py``, torch 2.13.
    """
    axes: list[list[Run]] = [[(0, n)] if n else [] for n in shape]
    for parts, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement:
            if not 0 <= placement.dim < len(shape):
                raise Corrupt(f"a placement cuts axis {placement.dim} of a tensor of {len(shape)}")
            axes[placement.dim] = list(_cut(axes[placement.dim], parts, index, placement.factor))
    return tuple(map(tuple, axes))


def _cut(runs: Sequence[Run], parts: int, index: int, factor: int) -> Iterator[Run]:
    """Yield the runs of chunk ``index`` of ``parts`` of each of ``factor`` chunks of ``runs``.

    Chunks are those of `torch.chunk`; empty ones yield nothing. Raise Unsupported for an impossible
    factor or index.
    """
    if not 0 < factor <= _MOST_RUNS or not 0 <= index < parts:
        raise Unsupported(
            f"a placement with a split factor of {factor}, at place {index} of {parts}"
        )
    size = sum(count for _, count in runs)
    each = -(-size // factor)
    for start in range(0, size, each) if size else ():
        end = min(start + each, size)
        piece = -(-(end - start) // parts)
        low, high = min(start + index * piece, end), min(start + (index + 1) * piece, end)
        before = 0
        for first, count in runs:  # elements ``low`` to ``high`` of the joined runs
            begin, behind = max(low, before), min(high, before + count)
            if begin < behind:
                yield first + begin - before, behind - begin
            before += count


def local_shape(runs: Sequence[Sequence[Run]]) -> Shape:
    """Return the shape of the tensor that these runs make on the rank."""
    return tuple(sum(count for _, count in axis) for axis in runs)


def boxes(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Shape, Shape, Shape]]:
    """Yield the boxes that runs make: offsets, sizes, and offsets in the rank's local tensor.

    Yield nothing if an axis has no runs. Raise Unsupported for more than `_MOST_RUNS`.
    """
    if prod(map(len, runs)) > _MOST_RUNS:
        raise Unsupported(
            f"a rank holds {prod(map(len, runs))} separate pieces of a tensor, at most {_MOST_RUNS}"
            " are read"
        )
    placed = []
    for axis in runs:
        local_offset, each = 0, []
        for start, count in axis:
            each.append((start, count, local_offset))
            local_offset += count
        placed.append(each)
    for chosen in product(*placed):
        yield tuple(c[0] for c in chosen), tuple(c[1] for c in chosen), tuple(c[2] for c in chosen)


def is_even(shape: Shape, mesh: Shape, placements: Sequence[Placement]) -> bool:
    """Return whether all cuts of each axis come out even, so that their order does not matter."""
    cuts: dict[int, int] = {}
    for parts, placement in zip(mesh, placements, strict=True):
        if placement:
            cuts[placement.dim] = cuts.get(placement.dim, 1) * parts
    return all(shape[dim] % parts == 0 for dim, parts in cuts.items() if dim < len(shape))


# The mesh


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh: its ``ranks``, row by row in ``shape``.

    ``coordinate``: of the rank that wrote it. ``world``: the highest rank + 1.
    """

    shape: Shape
    ranks: tuple[int, ...]
    coordinate: Shape
    world: int

    @property
    def rank(self) -> int:
        """The rank at ``coordinate``."""
        return self.ranks[_ravel(self.coordinate, self.shape)]


def read_mesh(value: Any) -> Mesh:
    """Return a pickled ``DeviceMesh``.

    torch 2.2 to 2.9 keep the ranks of the mesh (``mesh``, ``_flatten_mesh_list``), of a slice only
    its own ones; 2.10 and later keep all ranks of the root mesh (``_flatten_rank_map``) and a
    layout of sizes and strides in them; that is preferred. Raise Corrupt if its parts do not agree,
    Unsupported without either pair, or as `_by_layout`.
    """
    state = attributes(value, "DeviceMesh", ())
    coordinate = _naturals(state.get("_coordinate_on_dim"), "_coordinate_on_dim")
    if "_layout" in state and "_flatten_rank_map" in state:
        mesh = _by_layout(state, coordinate)
    elif "mesh" in state and "_flatten_mesh_list" in state:
        tensor, ranks = state["mesh"], _ranks(state["_flatten_mesh_list"])
        if not isinstance(tensor, StoredTensor) or tensor.numel != len(ranks):
            raise Corrupt(f"DeviceMesh of {len(ranks)} ranks whose mesh has another size")
        mesh = _checked(tensor.shape, ranks, coordinate, max(ranks) + 1)
    else:
        raise Unsupported(
            "DeviceMesh has neither _layout nor mesh, as every known version of torch gives it"
        )
    if mesh.rank != state.get("_rank", mesh.rank):
        raise Corrupt(
            f"DeviceMesh of rank {mesh.rank} says that its rank is {brief(state['_rank'])}"
        )
    return mesh


def _by_layout(state: dict[str, Any], coordinate: Shape) -> Mesh:
    """Return the mesh of a layout; a slice of the root mesh starts where ``_rank`` has its place.

    Raise Corrupt if the layout reaches out of the ranks or ``coordinate`` out of the mesh;
    Unsupported for a slice without ``_rank``, or as `_axes`.
    """
    every = _ranks(state["_flatten_rank_map"])
    axes = _axes(state["_layout"], len(every))
    places = [sum(steps) for steps in product(*axes)]
    shape = tuple(map(len, axes))
    base = 0
    if len(places) != len(every):
        if state.get("_rank") not in every:
            raise Unsupported(
                "a DeviceMesh that is a slice of another and does not say whose",
                hint="give a mesh of all ranks",
            )
        base = every.index(state["_rank"]) - places[_ravel(coordinate, shape)]
    if base < 0 or base + max(places) >= len(every):
        raise Corrupt("DeviceMesh has a layout that reaches out of its ranks")
    return _checked(
        shape, tuple(every[base + place] for place in places), coordinate, max(every) + 1
    )


def _checked(shape: Shape, ranks: tuple[int, ...], coordinate: Shape, world: int) -> Mesh:
    """Return the mesh; raise Corrupt if shape, ranks and coordinate do not fit, or ranks repeat."""
    if (
        not shape
        or len(shape) > _MOST_MESH_AXES
        or len(set(ranks)) != len(ranks)
        or prod(shape) != len(ranks)
    ):
        raise Corrupt(f"DeviceMesh of shape {shape} with {len(set(ranks))} different ranks")
    _ravel(coordinate, shape)
    return Mesh(shape, _once(ranks), coordinate, world)


@lru_cache(maxsize=64)
def _once(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return one object for equal ranks, so that comparing those of every tensor is fast."""
    return ranks


def _ravel(coordinate: Shape, shape: Shape) -> int:
    """Return the row-major index of a coordinate; raise Corrupt if it is outside of the shape."""
    if len(coordinate) != len(shape) or any(
        index >= n for index, n in zip(coordinate, shape, strict=True)
    ):
        raise Corrupt(f"DeviceMesh of shape {shape} with a rank at {coordinate}")
    place = 0
    for index, n in zip(coordinate, shape, strict=True):
        place = place * n + index
    return place


def _axes(layout: Any, most: int) -> list[list[int]]:
    """Return, for every axis of the mesh, the distances of its places from the first.

    Raise Corrupt if there are more places than ranks, Unsupported for a layout of no known torch.
    """
    state = attributes(layout, "_MeshLayout", ())
    if isinstance(state.get("axes"), (tuple, list)):
        flat = [attributes(axis, "_FlatLayout", ("shape", "stride")) for axis in state["axes"]]
        pairs = [(axis["shape"], axis["stride"]) for axis in flat]
    elif {"shape", "stride"} <= state.keys():
        sizes, steps = (
            value if isinstance(value, tuple) else (value,)
            for value in (state["shape"], state["stride"])
        )
        if len(sizes) != len(steps):
            raise Corrupt("a mesh layout with more sizes than strides")
        pairs = list(zip(sizes, steps, strict=True))
    else:
        raise Unsupported(
            "a mesh layout without axes or shape, as every known version of torch gives it"
        )
    axes = [_places(_leaves(sizes), _leaves(steps), most) for sizes, steps in pairs]
    if prod(map(len, axes)) > most:
        raise Corrupt(f"a mesh layout of more places than there are ranks ({most})")
    return axes


def _leaves(value: Any) -> Shape:
    """Return the numbers in nested tuples, left to right; raise Corrupt for too many, or others."""
    numbers: list[Any] = []
    pending, steps = [value], 0
    while pending:
        item, steps = pending.pop(), steps + 1
        if isinstance(item, tuple) and len(item) <= _MOST_MESH_AXES:
            pending.extend(reversed(item))
        else:
            numbers.append(item)
        if steps > _MOST_MESH_AXES**2:
            raise Corrupt("a mesh layout of too many sizes")
    return _naturals(numbers, "_layout")


def _places(sizes: Shape, strides: Shape, most: int) -> list[int]:
    """Return the distance of every place from the first, row by row.

    Raise Corrupt for more than ``most``, a size of 0, or not a stride for each size.
    """
    if len(sizes) != len(strides) or prod(sizes) > most or not all(sizes):
        raise Corrupt(
            f"a mesh layout of sizes {sizes[:4]} and strides {strides[:4]} for {most} ranks"
        )
    return [
        sum(index * step for index, step in zip(place, strides, strict=True))
        for place in product(*map(range, sizes))
    ]


def _ranks(value: Any) -> tuple[int, ...]:
    """Return ranks as a tuple; raise Corrupt for none, impossible or repeated ones."""
    ranks = _naturals(value, "ranks")
    if not ranks or max(ranks) >= MOST_RANKS or len(set(ranks)) < len(ranks):
        raise Corrupt("DeviceMesh without ranks, with impossible ones, or with one twice")
    return ranks


def _naturals(value: Any, name: str) -> tuple[int, ...]:
    """Return a tuple of natural numbers; raise Corrupt for anything else, with its ``name``."""
    if (
        not isinstance(value, (tuple, list))
        or len(value) > MOST_RANKS
        or any(type(n) is not int or n < 0 for n in value)
    ):
        raise Corrupt(f"DeviceMesh whose {name} is not made of natural numbers")
    return tuple(value)


# DTensors

Meshes = dict[int, tuple[Any, Mesh]]
"""The meshes of one file by the identity of the pickled value, and that value: a thousand tensors
share one.
"""


def dtensor_share(tensor: Wrapped, meshes: Meshes) -> RankShards:
    """Return what the writing rank has of a DTensor, and add its mesh to ``meshes``.

    Raise Corrupt if mesh, placements and local tensor do not fit, Unsupported for placements that
    cannot be joined, or whose order of cuts is unknown.
    """
    spec, local = _inside(tensor)
    if id(spec["mesh"]) not in meshes:
        meshes[id(spec["mesh"])] = spec["mesh"], read_mesh(spec["mesh"])
    mesh = meshes[id(spec["mesh"])][1]
    placements = tuple(_placement(p) for p in _listed(spec["placements"], "placements", tuple))
    if len(placements) != len(mesh.shape):
        raise Corrupt(
            f"a DTensor with {len(placements)} placements on a mesh of {len(mesh.shape)} axes"
        )
    _check_order(spec, tensor, mesh, placements)
    runs = local_runs(tensor.shape, mesh.shape, mesh.coordinate, placements)
    if local.shape != local_shape(runs) and (local.numel or all(local_shape(runs))):
        raise Corrupt(
            f"a DTensor holds {local.shape} where mesh and placements give {local_shape(runs)} of"
            f" {tensor.shape}"
        )
    pieces = []
    for offsets, sizes, inner in boxes(runs):
        start = local.offset + sum(
            offset * step for offset, step in zip(inner, local.strides, strict=True)
        )
        pieces.append((offsets, replace(local, offset=start, shape=sizes)))
    cut, group = (mesh.shape, placements), len(mesh.ranks)
    dtype, shape = tensor.dtype, tensor.shape
    return RankShards(dtype, shape, tuple(pieces), cut, mesh.world, mesh.rank, group, mesh.ranks)


def _inside(tensor: Wrapped) -> tuple[dict[str, Any], StoredTensor]:
    """Return specification and local tensor of a DTensor.

    Raise Corrupt if their dtype or shape differ from its own, Unsupported for unknown attributes.
    """
    state = (
        tensor.state[1]
        if isinstance(tensor.state, tuple) and len(tensor.state) == 2
        else tensor.state
    )
    local = state.get("_local_tensor") if isinstance(state, dict) else None
    local = plain_tensor(local)
    if local is None or not isinstance(state, dict):
        raise Corrupt("a DTensor without its local tensor")
    spec = attributes(state.get("_spec"), "DTensorSpec", _SPEC)
    refuse_strangers(spec, _KNOWN, "DTensorSpec")
    meta = spec["tensor_meta"]
    shape = meta.args[0] if isinstance(meta, PickledObject) and meta.args else None
    if shape != tensor.shape or local.dtype != tensor.dtype:
        raise Corrupt(
            f"a DTensor of {tensor.dtype} {tensor.shape} that holds {local.dtype}, or says another"
            " shape elsewhere"
        )
    return spec, local


def _placement(value: Any) -> Placement:
    """Return a pickled placement.

    It is None for Replicate. Raise Unsupported for a Partial one or unknown attributes, Corrupt for
    another class, or one that does not say which axis it cuts.
    """
    kind = value.name.name if isinstance(value, PickledObject) else ""
    if kind == "Replicate":
        return None
    if kind in _PARTIAL:
        raise Unsupported(
            "a DTensor with a Partial placement: the ranks hold terms of a sum",
            hint="redistribute it before saving",
        )
    state = attributes(value, "_StridedShard" if kind == "_StridedShard" else "Shard", ("dim",))
    refuse_strangers(state, ("dim", "split_factor"), kind)
    dim, factor = state["dim"], state.get("split_factor", 1)
    if (
        type(dim) is not int
        or type(factor) is not int
        or (kind == "_StridedShard") != ("split_factor" in state)
    ):
        raise Corrupt(f"a {kind} that does not say which axis it cuts, and how")
    return Shard(dim, factor)


def _check_order(
    spec: dict[str, Any], tensor: Wrapped, mesh: Mesh, placements: Sequence[Placement]
) -> None:
    """Raise Unsupported for cuts that are not from left to right, or may not be.

    So may be two cuts of one axis by torch before 2.5, and a ``_StridedShard`` before torch records
    ``use_strided_shard_as_shard_order``, unless all cuts come out even; that field must not be
    False.
    """
    order, shards = spec.get("shard_order"), [p for p in placements if p]
    is_strided = any(
        isinstance(p, PickledObject) and p.name.name == "_StridedShard" for p in spec["placements"]
    )
    if is_strided and spec.get("use_strided_shard_as_shard_order") is False:
        raise Unsupported("a DTensor with a _StridedShard that is to be read as a Shard")
    for entry in _listed(order, "cuts", tuple) if order is not None else ():
        axes = entry.args[1] if isinstance(entry, PickledObject) and len(entry.args) == 2 else None
        if not isinstance(axes, tuple) or list(axes) != sorted(axes):
            raise Unsupported(
                "a DTensor that is cut in another order than its mesh has",
                hint="redistribute it before saving",
            )
    is_cut_twice = len({p.dim for p in shards}) < len(shards)
    if is_cut_twice and not is_strided and spec["placements"][0].name.module.startswith(_OLD):
        raise Unsupported(
            "FSDP over tensor parallelism by a torch before 2.5, which does not record in which"
            " order it cut"
        )
    is_new = "use_strided_shard_as_shard_order" in spec
    if is_strided and not is_new and not is_even(tensor.shape, mesh.shape, placements):
        raise Unsupported(
            "a _StridedShard of this version of torch that does not come out even",
            hint="save with torch 2.13 or later",
        )


ALLOWED: Mapping[Name, Build] = torch_pickle.Names(
    {
        **torch_pickle.ALLOWED,
        **all_made(
            {
                f"{_SHARDED}.sharded_tensor.shard": ("Shard",),
                f"{_SHARDED}.sharded_tensor.metadata": (
                    *("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING"),
                ),
                f"{_SHARDED}.metadata": ("ShardMetadata",),
                f"{_SHARDED}.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
                f"{_SHARDED}.sharding_spec.api": ("EnumerableShardingSpec",),
                "torch.distributed.remote_device": ("_remote_device",),
                f"{_NEW}._dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
                f"{_NEW}.placement_types": _PLACEMENTS,
                f"{_OLD}.placement_types": ("DTensorSpec", "TensorMeta", *_PLACEMENTS),
                "torch.distributed.device_mesh": ("DeviceMesh",),
                "torch.distributed._tensor.device_mesh": ("DeviceMesh",),
                "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
            }
        ),
        **dict.fromkeys((SHARDED_TENSOR, *DTENSORS), made),
        Name("__builtin__", "getattr"): _getattr,
        Name("builtins", "getattr"): _getattr,
    }
)
"""What a rank's file may name: tensors, sharded or not."""
