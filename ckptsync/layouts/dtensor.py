"""DTensors in pickles (FSDP2, verl, FSDP1 on a mesh): the boxes that a rank holds, by mesh and placements and never by values.

The global shape is told; where a rank's local tensor belongs follows from its place in the mesh.  Source:
``torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py`` (before 2.5 in ``torch/distributed/_tensor``), torch 2.2 to 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import Build, Made, Name, made
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import mesh as meshes
from ckptsync.layouts.mesh import Mesh
from ckptsync.layouts.placements import Box, Placement, Replicate, Shard, boxes, held, is_even, local_shape
from ckptsync.layouts.wrapped import Piece, Share, Wrapped, attributes, refuse_strangers

_OLD = "torch.distributed._tensor"  # until 2.4
_NEW = "torch.distributed.tensor"
KINDS = frozenset({Name(_NEW, "DTensor"), Name(f"{_NEW}._api", "DTensor"), Name(f"{_OLD}.api", "DTensor")})
_PARTIAL = ("Partial", "_Partial", "_NormPartial", "_MaskPartial", "MaskPartial")

ALLOWED: dict[Name, Build] = {
    **meshes.ALLOWED,
    **dict.fromkeys(KINDS, made),
    **{Name(f"{_NEW}._dtensor_spec", name): made for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")},
    **{Name(f"{_OLD}.placement_types", name): made for name in ("DTensorSpec", "TensorMeta")},
    **{
        Name(f"{module}.placement_types", name): made
        for module in (_NEW, _OLD)
        for name in ("Shard", "_StridedShard", "Replicate", *_PARTIAL)
    },
}

_SPEC = ("mesh", "placements", "tensor_meta")
_KNOWN = frozenset({*_SPEC, "_hash", "shard_order", "use_strided_shard_as_shard_order"})


class Meshes:
    """The meshes of one file: a thousand tensors share one."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, Mesh]] = {}

    def read(self, value: Any) -> Mesh:
        """`ckptsync.layouts.mesh.mesh`, once."""
        if id(value) not in self._read:
            self._read[id(value)] = value, meshes.mesh(value)
        return self._read[id(value)][1]


def share(tensor: Wrapped, known: Meshes) -> Share:
    """What the writing rank has of ``tensor``.  Raises Corrupt if the local tensor has another shape than mesh and placements give."""
    spec, local = _inside(tensor)
    mesh = known.read(spec["mesh"])
    placements = tuple(_placement(p) for p in _listed(spec["placements"]))
    if len(placements) != len(mesh.shape):
        raise Corrupt(f"a DTensor with {len(placements)} placements on a mesh of {len(mesh.shape)} axes")
    _check_order(spec, tensor, mesh, placements)
    runs = held(tensor.shape, mesh.shape, mesh.coordinate, placements)
    if local.shape != local_shape(runs) and (local.numel or all(local_shape(runs))):
        raise Corrupt(f"a DTensor holds {local.shape} where mesh and placements give {local_shape(runs)} of {tensor.shape}")
    pieces = tuple(_piece(local, box) for box in boxes(runs))
    told = mesh.shape, placements
    return Share(tensor.dtype, tensor.shape, pieces, told, mesh.world, mesh.rank, len(mesh.ranks), mesh.ranks)


def _inside(tensor: Wrapped) -> tuple[dict[str, Any], Stored]:
    """Its specification and its local tensor; their dtypes and shapes must be what the tensor was made with."""
    state = tensor.state[1] if isinstance(tensor.state, tuple) and len(tensor.state) == 2 else tensor.state
    local = state.get("_local_tensor") if isinstance(state, dict) else None
    if isinstance(local, Wrapped):
        raise Unsupported(f"a DTensor whose local tensor is a {local.kind}", hint="only plain local tensors are read")
    if not isinstance(local, Stored) or not isinstance(state, dict):
        raise Corrupt("a DTensor without its local tensor")
    spec = attributes(state.get("_spec"), "DTensorSpec", _SPEC)
    refuse_strangers(spec, _KNOWN, "DTensorSpec")
    meta = spec["tensor_meta"]
    told = meta.args[0] if isinstance(meta, Made) and meta.args else None
    if told != tensor.shape or local.dtype != tensor.dtype:
        raise Corrupt(f"a DTensor of {tensor.dtype} {tensor.shape} that holds {local.dtype}, or says another shape elsewhere")
    return spec, local


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, (tuple, list)):
        raise Corrupt("a DTensor without placements")
    return value


def _placement(value: Any) -> Placement:
    kind = value.name.name if isinstance(value, Made) else ""
    if kind == "Replicate":
        return Replicate()
    if kind in _PARTIAL:
        raise Unsupported("a DTensor with a Partial placement: the ranks hold terms of a sum", hint="redistribute it before saving")
    state = attributes(value, "_StridedShard" if kind == "_StridedShard" else "Shard", ("dim",))
    refuse_strangers(state, ("dim", "split_factor"), kind)
    dim, factor = state["dim"], state.get("split_factor", 1)
    if type(dim) is not int or type(factor) is not int or (kind == "_StridedShard") != ("split_factor" in state):
        raise Corrupt(f"a {kind} that does not say which axis it cuts, and how")
    return Shard(dim, factor)


def _check_order(spec: dict[str, Any], tensor: Wrapped, mesh: Mesh, placements: Sequence[Placement]) -> None:
    """Only the order from left to right is read.  Older versions cut in another one, or do not tell: there, only what comes out even."""
    order, shards = spec.get("shard_order"), [p for p in placements if isinstance(p, Shard)]
    is_strided = any(p.factor != 1 for p in shards) or any(_is_strided(p) for p in spec["placements"])
    if is_strided and spec.get("use_strided_shard_as_shard_order") is False:
        raise Unsupported("a DTensor with a _StridedShard that is to be read as a Shard")
    for entry in _listed(order) if order is not None else ():
        axes = entry.args[1] if isinstance(entry, Made) and len(entry.args) == 2 else None
        if not isinstance(axes, tuple) or list(axes) != sorted(axes):
            raise Unsupported("a DTensor that is cut in another order than its mesh has", hint="redistribute it before saving")
    is_cut_twice = len({p.dim for p in shards}) < len(shards)
    if is_cut_twice and not is_strided and spec["placements"][0].name.module.startswith(_OLD):
        raise Unsupported("FSDP over tensor parallelism by a torch before 2.5, which does not record in which order it cut")
    is_new = "use_strided_shard_as_shard_order" in spec
    if is_strided and not is_new and not is_even(tensor.shape, mesh.shape, placements):
        raise Unsupported(
            "a _StridedShard of this version of torch that does not come out even", hint="save with torch 2.13 or later"
        )


def _is_strided(placement: Any) -> bool:
    return isinstance(placement, Made) and placement.name.name == "_StridedShard"


def _piece(local: Stored, box: Box) -> Piece:
    start = local.offset + sum(at * step for at, step in zip(box.local, local.strides, strict=True))
    return Piece(box.offsets, box.sizes, replace(local, offset=start, shape=box.sizes))
