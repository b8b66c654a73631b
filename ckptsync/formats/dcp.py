"""torch Distributed Checkpoint (DCP) as FSDP1 and FSDP2 write it through accelerate, HF Trainer and torch itself.

``.metadata`` is a pickle that says, for every tensor, its shape, the boxes (chunks) it was cut into, and for every box the file, offset
and length of an item, which is a whole ``torch.save`` archive.  Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.inert import MAX_BYTES, Build, Made, Name, brief, loads, made
from ckptsync.formats.joining import join
from ckptsync.model import Copy, Extent, Files, Part, Shape, Tensor, read_whole
from ckptsync.paths import checked_path

NAME = "dcp"
METADATA = ".metadata"
_OPTIMIZERS = ("optimizer", "optim")  # what accelerate and torch's own examples call the rest of a state dict

_DCP = "torch.distributed.checkpoint"
_NAMES = (
    *(
        Name(f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "StorageMeta",
        )
    ),
    Name(f"{_DCP}.filesystem", "_StorageInfo"),
    Name("torch.serialization", "_get_layout"),
    Name("pathlib", "PosixPath"),
    Name("pathlib._local", "PosixPath"),  # Python 3.13's name for the same
)
_ALLOWED: Mapping[Name, Build] = {**torch_pickle.ALLOWED, **dict.fromkeys(_NAMES, made)}


_FIELDS: Mapping[str, Mapping[str, type[Any]]] = {  # what is read of each, and what it must be
    "Metadata": {"state_dict_metadata": dict, "storage_data": dict},
    "MetadataIndex": {"fqn": str},
    "_StorageInfo": {"relative_path": str, "offset": int, "length": int},
    "TensorStorageMetadata": {"properties": Made, "size": tuple, "chunks": list},
    "ChunkStorageMetadata": {"offsets": tuple, "sizes": tuple},
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the item that holds it."""

    offsets: Shape
    sizes: Shape
    item: Extent


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor as ``.metadata`` describes it; ``path`` is its place in the nested state dict."""

    path: tuple[str, ...]
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Directories that hold a DCP of weights or of optimizer states: shards or their ``.metadata``."""
    found = {name.rpartition("/")[0] for name in names if _is_ours(name.rpartition("/")[2])}
    return tuple(sorted(found))


def holds_weights(root: str) -> bool:
    """``optimizer_0`` is the optimizer's (accelerate's and Trainer's name for it)."""
    return not root.rpartition("/")[2].startswith("optimizer")


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Every file that ``.metadata`` refers to, with its exact size: torch writes items back to back.

    Raises Incomplete if this is a node without ``.metadata``.
    """
    name = join(root, METADATA)
    needed: dict[str, int | None] = {name: files.sizes().get(name)}
    for item in _items(_metadata(files, root), root).values():
        needed[item.file] = max(needed.get(item.file) or 0, item.start + item.size)
    return needed


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """The weights, under the names that the model itself has, every chunk located and checked against its item."""
    found = tuple(_weights(_chunked(_metadata(files, root), root)))
    if not found:
        raise Unsupported(f"{root or '.'}: a distributed checkpoint without model tensors")
    return tuple(_tensor(files, name, chunked) for name, chunked in found)


def _is_ours(base: str) -> bool:
    return base == METADATA or (base.startswith("__") and base.endswith(".distcp"))


def _metadata(files: Files, root: str) -> dict[str, Any]:
    name = join(root, METADATA)
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not there", hint="it is written by rank 0 after all shards: add the directory of the node that ran rank 0"
        )
    data = read_whole(files, name, MAX_BYTES)
    try:
        value = _parsed(data)
    except (Corrupt, Unsupported) as e:
        raise type(e)(f"{name}: {e}", hint=e.hint) from e
    return _fields(value, "Metadata")


@lru_cache(maxsize=1)  # it is asked for what it demands and then for what it holds; of a large model it has 100 MB
def _parsed(data: bytes) -> Any:
    """What is pickled, not to be changed."""
    value, size = loads(data, _ALLOWED)
    if size != len(data):
        raise Corrupt(f"pickle: ends at byte {size}, the file at {len(data)}")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of a pickled dataclass."""
    state = value.state if isinstance(value, Made) and value.name.name == kind else None
    if not isinstance(state, dict) or not all(isinstance(state.get(field), t) for field, t in _FIELDS[kind].items()):
        raise Corrupt(f"{METADATA}: no {kind} where one is due, or one without its fields")
    return state


def _shape(value: Any) -> Shape:
    if not isinstance(value, (tuple, list)) or len(value) > MOST_AXES or any(type(n) is not int or n < 0 for n in value):
        raise Corrupt(f"{METADATA}: a shape or offset that is not made of natural numbers")
    return tuple(value)


Key = tuple[str, Shape]


def _items(metadata: dict[str, Any], root: str) -> dict[Key, Extent]:
    """``(name, offsets)`` of a chunk → its item."""
    found: dict[Key, Extent] = {}
    for index, info in metadata["storage_data"].items():
        where, what = _fields(info, "_StorageInfo"), _fields(index, "MetadataIndex")
        if where.get("transform_descriptors"):
            raise Unsupported(
                f"{METADATA}: items are transformed ({brief(where['transform_descriptors'])})", hint="write them without extensions"
            )
        file = join(root, checked_path(where["relative_path"]))
        found[what["fqn"], _shape(what.get("offset") or ())] = Extent(file, *_shape((where["offset"], where["length"])))
    return found


def _chunked(metadata: dict[str, Any], root: str) -> Iterator[Chunked]:
    items = _items(metadata, root)
    paths = metadata.get("planner_data")
    for fqn, described in metadata["state_dict_metadata"].items():
        if not isinstance(described, Made) or described.name.name != "TensorStorageMetadata":
            continue  # a torch.save blob: no weight
        fields = _fields(described, "TensorStorageMetadata")
        shape = _shape(fields["size"])
        chunks = tuple(_chunk(fqn, _fields(c, "ChunkStorageMetadata"), shape, items) for c in fields["chunks"])
        path = paths.get(fqn, (fqn,)) if isinstance(paths, dict) else (fqn,)
        if not isinstance(path, (tuple, list)) or not path or not all(type(p) in (str, int) for p in path):
            raise Corrupt(f"{METADATA}: {brief(fqn)} has no path in planner_data")
        yield Chunked(tuple(map(str, path)), _dtype(fields["properties"]), shape, chunks)


def _chunk(fqn: str, fields: dict[str, Any], shape: Shape, items: Mapping[Key, Extent]) -> Chunk:
    offsets, sizes = _shape(fields["offsets"]), _shape(fields["sizes"])
    item = items.get((fqn, offsets)) or (items.get((fqn, ())) if not any(offsets) else None)
    if item is None and 0 not in sizes:
        raise Corrupt(f"{METADATA}: {fqn} has a chunk at {offsets} that lies in no file")
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise Corrupt(f"{METADATA}: {fqn} of shape {shape} has a chunk at {offsets} of size {sizes}")
    return Chunk(offsets, sizes, item or Extent("", 0, 0))


def _dtype(properties: Any) -> str:
    """``TensorProperties`` pickles as ``(dtype, layout, requires_grad, memory format, pin_memory)``."""
    if not isinstance(properties, Made) or not isinstance(properties.state, tuple):
        raise Corrupt(f"{METADATA}: a tensor without properties")
    return torch_pickle.dtype_of(properties.state[0])


def _weights(found: Iterator[Chunked]) -> Iterator[tuple[str, Chunked]]:
    """Names without the wrappers that the caller put around the state dict: ``{"model": state_dict}``, torch's ``{"app": AppState}``.

    A wrapper is the first of the path, never a prefix of the name: a model's own names may begin with "model." too.
    """
    everything = [(c.path, c) for c in found]
    wrapper = _wrapper(everything)
    if wrapper in _OPTIMIZERS:
        return
    inner = [(path[1:], c) for path, c in everything if path[0] == wrapper] if wrapper else everything
    if wrapper not in (None, "model") and _wrapper(inner) == "model":
        inner = [(path[1:], c) for path, c in inner if path[0] == "model"]
    yield from ((".".join(path), c) for path, c in inner)


def _wrapper(found: Collection[tuple[tuple[str, ...], Chunked]]) -> str | None:
    heads = {path[0] for path, _ in found if len(path) > 1}
    if any(len(path) == 1 for path, _ in found):
        return None
    return "model" if "model" in heads else heads.pop() if len(heads) == 1 else None


def _tensor(files: Files, name: str, chunked: Chunked) -> Tensor:
    parts = tuple(_part(files, name, chunked.dtype, chunk) for chunk in chunked.chunks if 0 not in chunk.sizes)
    return Tensor(name, chunked.dtype, chunked.shape, (Copy(chunked.dtype, chunked.shape, parts),))


def _part(files: Files, name: str, dtype: str, chunk: Chunk) -> Part:
    stored, archive = torch_pickle.load_tensor(files, chunk.item)
    if (stored.dtype, stored.shape) != (dtype, chunk.sizes):
        raise Corrupt(f"{chunk.item.file}: the item at {chunk.item.start} is not the {dtype} chunk of {name} of size {chunk.sizes}")
    part = torch_pickle.part(files, archive, stored)
    return replace(part, offsets=chunk.offsets)
