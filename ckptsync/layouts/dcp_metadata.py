"""What a torch Distributed Checkpoint says of itself: ``.metadata``, a pickle.

For every tensor its shape, the boxes (chunks) it was cut into, and for every box the file, offset and length of an item.
Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.

Older torch and Megatron-Core mention further names.  torch 2.1 and 2.2 took ``TensorProperties`` from the sharded tensors
(``torch/distributed/checkpoint/metadata.py`` of v2.2).  Megatron-Core keeps every rank's plan of the save beside the metadata
(``megatron/core/dist_checkpointing/strategies/{torch,state_dict_saver}.py``, 0.12 to 0.16), in classes of its own in some versions.
None of them says where a tensor lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle, zstd_items
from ckptsync.formats.pickles import ALIKE, MAX_BYTES, Build, Made, Name, brief, loads, made
from ckptsync.layouts.dcp_described import METADATA, Box, Described, Index, Item, Key
from ckptsync.layouts.names import join
from ckptsync.model import Files, Shape, read_whole
from ckptsync.paths import checked_path

_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

_WHOLE = ("Metadata", "MCoreMetadata")  # the classes that the whole may be of
_OF_OTHERS = (
    *(Name(_SHARDED, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(Name(f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    Name(f"{_DCP}.filesystem", "_StoragePrefix"),
    *(Name(_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
)
_NAMES = (
    *(
        Name(f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "StorageMeta",
        )
    ),
    Name("torch.serialization", "_get_layout"),
    Name("pathlib", "PosixPath"),
    Name("pathlib._local", "PosixPath"),  # Python 3.13's name for the same
)
_ALLOWED: Mapping[Name, Build] = {
    **torch_pickle.ALLOWED,
    **dict.fromkeys((*_NAMES, *_OF_OTHERS), made),
    Name(f"{_DCP}.metadata", "MetadataIndex"): Index,
    Name(f"{_DCP}.metadata", "ChunkStorageMetadata"): Box,
    Name(f"{_DCP}.metadata", "TensorStorageMetadata"): Described,
    Name(f"{_DCP}.filesystem", "_StorageInfo"): Item,
}
_WORDS = {str, int}  # of a path in the state dict
_FIELDS: Mapping[str, Mapping[str, type[Any]]] = {  # what is read of each, and what it must be
    "Metadata": {"state_dict_metadata": dict, "storage_data": dict},
}


class Chunk(NamedTuple):
    """A box of a tensor and the item that holds it, None for an empty box that lies nowhere."""

    offsets: Shape
    sizes: Shape
    item: Item | None


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor as ``.metadata`` describes it; ``path`` is its place in the nested state dict."""

    path: tuple[str, ...]
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """``.metadata``, read and not to be changed: its fields, and every item of a chunk or blob, its file joined to the directory."""

    fields: Mapping[str, Any]
    items: Mapping[Key, Item]


def metadata(files: Files, root: str) -> Metadata:
    """What ``.metadata`` in ``root`` says; raises Incomplete on a node without it."""
    name = join(root, METADATA)
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not there", hint="it is written by rank 0 after all shards: add the directory of the node that ran rank 0"
        )
    data = read_whole(files, name, MAX_BYTES)
    try:
        return parsed(data, root)
    except (Corrupt, Unsupported) as e:
        raise type(e)(f"{name}: {e}", hint=e.hint) from e


@lru_cache(maxsize=1)  # it is asked for what it demands and then for what it holds; of a large model it has 100 MB
def parsed(data: bytes, root: str) -> Metadata:
    """What the bytes of one ``.metadata`` in ``root`` say."""
    value, size = loads(data, _ALLOWED)
    if size != len(data):
        raise Corrupt(f"pickle: ends at byte {size}, the file at {len(data)}")
    fields = _fields(value, "Metadata")
    boxes = sum(len(one.boxes) for one in fields["state_dict_metadata"].values() if type(one) is Described)
    if boxes > len(data):
        raise Corrupt(
            f"{boxes} chunks in {len(data)} bytes", hint="a tensor is mentioned under many names: no checkpoint does that"
        )
    return Metadata(fields, _items(fields["storage_data"], root))


def _items(storage: dict[Any, Any], root: str) -> dict[Key, Item]:
    """``(name, offsets)`` of a chunk → its item."""
    found: dict[Key, Item] = {}
    files: dict[str, str] = {}
    if len(set(map(id, storage.values()))) != len(storage):
        raise Corrupt(f"{METADATA}: two chunks in one item")
    alike = Counter(hash(index.key) for index in storage if type(index) is Index)
    if max(alike.values(), default=0) > ALIKE:
        raise Corrupt(
            f"{METADATA}: more than {ALIKE} chunks whose offsets have one hash", hint="it was made to keep its reader busy"
        )
    for index, item in storage.items():
        if type(index) is not Index or type(item) is not Item:
            raise Corrupt(f"{METADATA}: something else where an item is due")
        if item.transforms:
            zstd_items.check_transforms(item.transforms)
        file = files.get(item.file)
        if file is None:
            file = files[item.file] = join(root, checked_path(item.file))
        item.file = file
        found[index.key] = item
    return found


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of a pickled dataclass."""
    kinds = _WHOLE if kind == "Metadata" else (kind,)
    state = value.state if isinstance(value, Made) and value.name.name in kinds else None
    if not isinstance(state, dict) or not all(isinstance(state.get(field), t) for field, t in _FIELDS[kind].items()):
        raise Corrupt(f"{METADATA}: no {kind} where one is due, or one without its fields")
    return state


@lru_cache(maxsize=1)
def chunked(metadata: Metadata) -> tuple[Chunked, ...]:
    """Every tensor of the state dict, weights or not."""
    return tuple(_chunked(metadata))


def _chunked(metadata: Metadata) -> Iterator[Chunked]:
    located, paths = metadata.items, _paths(metadata.fields)
    for fqn, described in metadata.fields["state_dict_metadata"].items():
        if type(described) is not Described:
            continue  # a torch.save blob: no weight
        path = paths.get(fqn) if paths else (fqn,)
        if not isinstance(path, (tuple, list)) or not path or not set(map(type, path)) <= _WORDS:
            raise Corrupt(f"{METADATA}: {brief(fqn)} has no path in planner_data")
        # ``_nested_dict.flatten_state_dict`` makes the name of the path; nothing else tells of a flipped bit in either
        words = tuple(map(str, path))
        if ".".join(words) != fqn:
            raise Corrupt(f"{METADATA}: {brief(fqn)} is {brief(path)} in planner_data", hint="it is damaged: fetch it again")
        chunks = tuple(
            [Chunk(box.offsets, box.sizes, located.get((fqn, box.offsets)) or _item(fqn, box, located)) for box in described.boxes]
        )
        yield Chunked(words, described.dtype, described.shape, chunks)


def _item(fqn: str, box: Box, items: Mapping[Key, Item]) -> Item | None:
    """Of a box whose own item is not there."""
    found = None if any(box.offsets) else items.get((fqn, ()))
    if found is None and 0 not in box.sizes:
        raise Corrupt(f"{METADATA}: {fqn} has a chunk at {box.offsets} that lies in no file")
    return found


def _paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Name → path in the nested state dict, of all names; empty where the planner did not flatten it."""
    if "planner_data" not in fields:
        raise Corrupt(f"{METADATA}: no planner_data", hint="it is damaged: fetch it again")
    paths = fields["planner_data"]
    return paths if isinstance(paths, dict) else {}
