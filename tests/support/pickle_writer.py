"""Pickled objects by hand: what `torch.save` would have written, changed at will."""

from __future__ import annotations

from math import prod
from typing import Any

from ckptsync.formats.pickles import Name, PickledObject
from ckptsync.formats.torch_pickle import Storage, StoredTensor, Wrapped
from ckptsync.tensors import Shape, row_major

NEW, OLD = "torch.distributed.tensor", "torch.distributed._tensor"


def made(module: str, name: str, state: Any = None, args: tuple[Any, ...] = ()) -> PickledObject:
    return PickledObject(Name(module, name), args, state)


def stored(shape: Shape, dtype: str = "F32", numel: int | None = None) -> StoredTensor:
    storage = Storage(dtype, "0", prod(shape) if numel is None else numel)
    return StoredTensor(dtype, storage, 0, shape, row_major(shape))


def mesh(shape: Shape, rank: int, ranks: tuple[int, ...] = (), **changes: Any) -> PickledObject:
    """Return a device mesh as torch 2.13 pickles it; of all ranks without ``ranks``."""
    every = ranks or tuple(range(prod(shape)))
    index = every.index(rank)
    coordinate: list[int] = []
    for n in reversed(shape):
        index, location = divmod(index, n)
        coordinate.insert(0, location)
    layout = "torch.distributed._mesh_layout"
    axes = tuple(
        made(layout, "_FlatLayout", {"shape": (n,), "stride": (s,)})
        for n, s in zip(shape, row_major(shape), strict=True)
    )
    state = {
        "_layout": made(layout, "_MeshLayout", {"axes": axes}),
        "_flatten_rank_map": every,
        "_rank": rank,
        "_coordinate_on_dim": tuple(coordinate),
    }
    return made("torch.distributed.device_mesh", "DeviceMesh", state | changes)


def older_mesh(
    shape: Shape, coordinate: list[int], ranks: tuple[int, ...], **changes: Any
) -> PickledObject:
    """Return a device mesh as torch 2.6 pickles it."""
    state = {
        "mesh": stored(shape, "I32"),
        "_flatten_mesh_list": ranks,
        "_coordinate_on_dim": coordinate,
    }
    return made("torch.distributed.device_mesh", "DeviceMesh", state | changes)


def shard(dim: int, module: str = NEW) -> PickledObject:
    return made(f"{module}.placement_types", "Shard", {"dim": dim})


def strided(dim: int, factor: int) -> PickledObject:
    return made(f"{NEW}.placement_types", "_StridedShard", {"dim": dim, "split_factor": factor})


def replicate(name: str = "Replicate") -> PickledObject:
    return made(f"{NEW}.placement_types", name)


def dtensor(
    shape: Shape,
    local: Any,
    on: PickledObject,
    placements: tuple[PickledObject, ...],
    *,
    meta: Shape | None = None,
    **spec: Any,
) -> Wrapped:
    tensor_meta = made(f"{NEW}._dtensor_spec", "TensorMeta", None, (meta or shape, (), None))
    state = {"mesh": on, "placements": placements, "tensor_meta": tensor_meta, "_hash": 1} | spec
    return Wrapped(
        Name(NEW, "DTensor"),
        "F32",
        shape,
        (None, {"_local_tensor": local, "_spec": made("", "DTensorSpec", state)}),
    )
