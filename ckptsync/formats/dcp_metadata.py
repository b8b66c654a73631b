"""What a torch Distributed Checkpoint says of itself: ``.metadata``, a pickle.

For every tensor its shape, the boxes (chunks) it was cut into, and for every box the file, offset and length of an item.
Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.inert import MAX_BYTES, Build, Made, Name, brief, loads, made
from ckptsync.formats.joining import join
from ckptsync.model import Extent, Files, Shape, read_whole
from ckptsync.paths import checked_path

METADATA = ".metadata"

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


def metadata(files: Files, root: str) -> dict[str, Any]:
    """The fields of the ``Metadata`` in ``root``; raises Incomplete on a node without it."""
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


def items(metadata: dict[str, Any], root: str) -> dict[Key, Extent]:
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


def chunked(metadata: dict[str, Any], root: str) -> Iterator[Chunked]:
    """Every tensor of the state dict, weights or not."""
    located = items(metadata, root)
    paths = _paths(metadata)
    for fqn, described in metadata["state_dict_metadata"].items():
        if not isinstance(described, Made) or described.name.name != "TensorStorageMetadata":
            continue  # a torch.save blob: no weight
        fields = _fields(described, "TensorStorageMetadata")
        shape = _shape(fields["size"])
        chunks = tuple(_chunk(fqn, _fields(c, "ChunkStorageMetadata"), shape, located) for c in fields["chunks"])
        path = paths.get(fqn) if paths else (fqn,)
        if not isinstance(path, (tuple, list)) or not path or not all(type(p) in (str, int) for p in path):
            raise Corrupt(f"{METADATA}: {brief(fqn)} has no path in planner_data")
        # ``_nested_dict.flatten_state_dict`` makes the name of the path; nothing else tells of a flipped bit in either
        if ".".join(map(str, path)) != fqn:
            raise Corrupt(f"{METADATA}: {brief(fqn)} is {brief(path)} in planner_data", hint="it is damaged: fetch it again")
        yield Chunked(tuple(map(str, path)), _dtype(fields["properties"]), shape, chunks)


def _paths(metadata: dict[str, Any]) -> dict[str, Any]:
    """Name → path in the nested state dict, of all names; empty where the planner did not flatten it."""
    if "planner_data" not in metadata:
        raise Corrupt(f"{METADATA}: no planner_data", hint="it is damaged: fetch it again")
    paths = metadata["planner_data"]
    return paths if isinstance(paths, dict) else {}


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
