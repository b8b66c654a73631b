"""Read the metadata of a torch Distributed Checkpoint: ``.metadata``, or one file of each rank.

It has, for every tensor, its shape and the boxes (chunks) that it was cut into; and for every box
the file, offset and length of an item. Tensors, boxes and items exist by the million, so the
machine that reads pickles makes them directly (`Stated`). Source:
``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.

With ``dcp.save(…, use_collectives=False)`` no rank knows of another: each writes ``__0.metadata``,
``__1.metadata``, … with its own boxes, and no file says how many ranks there were
(``_get_metadata_path``).

Older torch and Megatron-Core mention further names. torch 2.1 and 2.2 took ``TensorProperties``
from the sharded tensors (``torch/distributed/checkpoint/metadata.py`` of v2.2). Megatron-Core keeps
every rank's plan of the save beside the metadata
(``megatron/core/dist_checkpointing/strategies/{torch,state_dict_saver}.py``, 0.12 to 0.16), in
classes of its own in some versions. None of them says where a tensor lies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ckptsync.errors import Corrupt, Incomplete, Unsupported, name_in_errors
from ckptsync.formats import torch_pickle
from ckptsync.formats.pickles import (
    ALIKE,
    MAX_BYTES,
    Build,
    Name,
    PickledObject,
    Stated,
    all_made,
    brief,
    loads,
)
from ckptsync.formats.torch_pickle import shape_of
from ckptsync.layouts.file_names import (
    METADATA,
    inside,
    is_of_one_rank,
    join,
    metadata_files,
)
from ckptsync.safe_names import checked_path
from ckptsync.tensors import Files, Shape, read_whole

Key = tuple[str, Shape]
# the attributes that torch 2.13 writes of an item without transforms
_OF_ITEM = ["relative_path", "offset", "length"]
_OF_INDEX = ["fqn", "index", "offset"]


class StorageItem(Stated):
    """Where an item, one chunk or blob, lies, and its ``transforms``: torch's ``_StorageInfo``."""

    __slots__ = ("file", "size", "start", "transforms")
    file: str
    start: int
    size: int
    transforms: Any

    def take(self, items: list[Any]) -> None:
        """Set file, start, size and transforms (None if there are none).

        ``file`` is relative to the checkpoint's directory until `_items` joins them. Raise Corrupt
        without a file, or if start or size is no natural number.
        """
        self.transforms = None
        if items[::2] == _OF_ITEM:
            _, self.file, _, self.start, _, self.size = items
        else:
            names = ("relative_path", "offset", "length", "transform_descriptors")
            self.file, self.start, self.size, self.transforms = _attributes(items, names)
        if (
            type(self.file) is not str
            or type(self.start) is not int
            or type(self.size) is not int
            or self.start < 0
            or self.size < 0
        ):
            raise Corrupt(f"{METADATA}: an item without a file, an offset and a length")


class StorageIndex(Stated):
    """The chunk that an item holds, by name and offsets (or ()): torch's ``MetadataIndex``."""

    __slots__ = ("key",)
    key: Key

    def take(self, items: list[Any]) -> None:
        """Set the key from name and offset (() if None); raise Corrupt for a wrong type."""
        if items[::2] == _OF_INDEX:
            _, fqn, _, _, _, offset = items
        else:
            fqn, offset = _attributes(items, ("fqn", "offset"))
        if type(fqn) is not str:
            raise Corrupt(f"{METADATA}: a MetadataIndex without a name")
        self.key = fqn, (shape_of(offset) if offset else ())


class ChunkBox(Stated):
    """A box of a tensor: torch's ``ChunkStorageMetadata``."""

    __slots__ = ("offsets", "sizes")
    offsets: Shape
    sizes: Shape

    def take(self, items: list[Any]) -> None:
        """Set the offsets and sizes; raise Corrupt if they are no shapes."""
        if items[::2] == ["offsets", "sizes"]:
            _, offsets, _, sizes = items
        else:
            offsets, sizes = _attributes(items, ("offsets", "sizes"))
        self.offsets, self.sizes = shape_of(offsets), shape_of(sizes)


class TensorMetadata(Stated):
    """A tensor's properties, shape and boxes: torch's ``TensorStorageMetadata``."""

    __slots__ = ("boxes", "properties", "shape")
    boxes: tuple[ChunkBox, ...]
    properties: PickledObject
    shape: Shape

    def take(self, items: list[Any]) -> None:
        """Set properties, shape and boxes.

        Raise Corrupt if one is missing, or if a box has not as many axes as the tensor.
        """
        properties, size, chunks = _attributes(items, ("properties", "size", "chunks"))
        if (
            type(properties) is not PickledObject
            or type(chunks) is not list
            or any(type(chunk) is not ChunkBox for chunk in chunks)
        ):
            raise Corrupt(f"{METADATA}: a tensor without properties, size and chunks")
        self.properties, self.shape, self.boxes = properties, shape_of(size), tuple(chunks)
        for box in self.boxes:
            if len(box.offsets) != len(self.shape) or len(box.sizes) != len(self.shape):
                raise Corrupt(
                    f"{METADATA}: a tensor of shape {self.shape} has a chunk at {box.offsets} of"
                    f" size {box.sizes}"
                )

    def count(self) -> int:
        """Return the number of boxes."""
        return len(self.boxes)

    def with_boxes(self, boxes: Iterable[ChunkBox]) -> TensorMetadata:
        """Return a new tensor with these boxes, and the same properties and shape."""
        copy = TensorMetadata()
        copy.properties, copy.shape, copy.boxes = self.properties, self.shape, tuple(boxes)
        return copy

    @property
    def dtype(self) -> str:
        """The dtype: the first of the properties that ``TensorProperties`` pickles.

        It is torch's name if safetensors has none, since an optimizer's tensor may have such a
        dtype. Raises Corrupt without properties, Unsupported for an unknown dtype.
        """
        if type(self.properties.state) is not tuple or not self.properties.state:
            raise Corrupt(f"{METADATA}: a tensor without properties")
        return torch_pickle.any_dtype_of(self.properties.state[0])


def _attributes(items: list[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of ``names``, None for a missing one, from names and values in turn.

    Raise Corrupt if a name is no text.
    """
    if not all(type(key) is str for key in items[::2]):
        raise Corrupt(f"{METADATA}: an attribute whose name is no text")
    return tuple(map(dict(zip(items[::2], items[1::2], strict=True)).get, names))


_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: Mapping[Name, Build] = {
    **torch_pickle.ALLOWED,
    **all_made(
        {
            f"{_DCP}.metadata": (
                *("Metadata", "BytesStorageMetadata", "TensorProperties"),
                *("_MEM_FORMAT_ENCODING", "StorageMeta"),
            ),
            f"{_DCP}.planner": (
                *("SavePlan", "WriteItem", "WriteItemType"),
                *("TensorWriteData", "BytesIOWriteData"),
            ),
            f"{_DCP}.filesystem": ("_StoragePrefix",),
            _SHARDED: ("TensorProperties", "MEM_FORMAT_ENCODING"),
            _MEGATRON: ("MCoreMetadata", "MCoreSavePlan"),
            "pathlib": ("PosixPath",),
            "pathlib._local": ("PosixPath",),  # Python 3.13's name for the same
        }
    ),
    Name(f"{_DCP}.metadata", "MetadataIndex"): StorageIndex,
    Name(f"{_DCP}.metadata", "ChunkStorageMetadata"): ChunkBox,
    Name(f"{_DCP}.metadata", "TensorStorageMetadata"): TensorMetadata,
    Name(f"{_DCP}.filesystem", "_StorageInfo"): StorageItem,
}
_OF_EVERY_RANK = re.compile(r"(rng_state_|random_states_)([0-9]{1,9})(\.pth|\.pkl)")


class Chunk(NamedTuple):
    """A box of a tensor, and the item that holds it: None for an empty box."""

    offsets: Shape
    sizes: Shape
    item: StorageItem | None


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor as the metadata describes it; ``path`` is its place in the nested state dict."""

    path: tuple[str, ...]
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """The metadata of a checkpoint; do not change it, since it is cached.

    ``fields``: those of the pickled class. ``items``: the item of each chunk and blob. ``stored``:
    the items of all ranks, also those of replicas, which are not in ``items``. ``remark`` is a
    warning for the user.
    """

    fields: Mapping[str, Any]
    items: Mapping[Key, StorageItem]
    stored: Sequence[StorageItem]
    remark: str = ""


def read_metadata(files: Files, root: str, world: int | None = None) -> Metadata:
    """Return the metadata of the checkpoint in ``root``: ``.metadata``, or all ranks', joined.

    ``world``: the number of ranks if the caller knows it; not used with ``.metadata``. If random
    states give the number instead, a remark says so. Raise Incomplete without metadata, or as
    `_check_ranks`; Corrupt for damage, or if ranks disagree; Unsupported for unknown names, or if
    both kinds of metadata are here.
    """
    names = metadata_files(files.sizes(), root)
    name = join(root, METADATA)
    if not names:
        raise Incomplete(
            f"{name}: not found",
            hint=(
                "it is written by rank 0 after all shards: add the directory of the node that ran"
                " rank 0"
            ),
        )
    if names[0] == name:
        if any(map(is_of_one_rank, inside(files.sizes(), root))):
            raise Unsupported(
                f"{name}: beside metadata of single ranks: two saves in one directory",
                hint="delete the files of the older save",
            )
        return _parse_once(read_whole(files, name, MAX_BYTES), root, name)
    _check_ranks(files.sizes(), root, names, world)
    joined = _join_ranks(tuple(read_whole(files, name, MAX_BYTES) for name in names), names, root)
    return replace(
        joined,
        remark=(
            ""
            if world
            else f"world size {len(names)} is inferred from random-state files only; if you know"
            f" that it is right: --source 'dcp:{root or '.'}#world={len(names)}'"
        ),
    )


def _parse(data: bytes, root: str, name: str) -> Metadata:
    """Return the metadata in one file of ``root``; raises as `_metadata`, with ``name``."""
    with name_in_errors(name):
        return _metadata(data, root)


# read for the demands, and again for the tensors; a large model has 100 MB of metadata
_parse_once = lru_cache(maxsize=1)(_parse)


def _metadata(data: bytes, root: str) -> Metadata:
    """Return the metadata that a pickle holds.

    Raise Corrupt if it is damaged, is something else, is followed by other bytes, or has more boxes
    than bytes; Unsupported for unknown names. Items are not compared with tensors: see `chunked`.
    """
    value, size = loads(data, _ALLOWED)
    if size != len(data):
        raise Corrupt(f"pickle: ends at byte {size}, the file at {len(data)}")
    fields = (
        value.state
        if isinstance(value, PickledObject) and value.name.name in ("Metadata", "MCoreMetadata")
        else None
    )
    if not isinstance(fields, dict) or any(
        type(fields.get(key)) is not dict for key in ("state_dict_metadata", "storage_data")
    ):
        raise Corrupt(f"{METADATA}: no Metadata where one is due, or one without its fields")
    boxes = sum(
        len(described.boxes)
        for described in fields["state_dict_metadata"].values()
        if type(described) is TensorMetadata
    )
    if boxes > len(data):
        raise Corrupt(
            f"{boxes} chunks in {len(data)} bytes",
            hint="a tensor is mentioned under many names: no checkpoint does that",
        )
    items = _items(fields["storage_data"], root)
    return Metadata(fields, items, tuple(items.values()))


def _items(storage: dict[Any, Any], root: str) -> dict[Key, StorageItem]:
    """Change each item's file to its path in the checkpoint, and return the items by their keys.

    Raise Corrupt for anything else, two chunks in one item, an unsafe path, and more than `ALIKE`
    keys of one hash.
    """
    by_key: dict[Key, StorageItem] = {}
    files: dict[str, str] = {}
    if len(set(map(id, storage.values()))) != len(storage):
        raise Corrupt(f"{METADATA}: two chunks in one item")
    hashes = Counter(hash(index.key) for index in storage if type(index) is StorageIndex)
    if max(hashes.values(), default=0) > ALIKE:
        raise Corrupt(
            f"{METADATA}: more than {ALIKE} chunks whose offsets have one hash",
            hint="the file may be malicious: it would keep a reader busy for very long",
        )
    for index, item in storage.items():
        if type(index) is not StorageIndex or type(item) is not StorageItem:
            raise Corrupt(f"{METADATA}: something else where an item is due")
        if item.transforms and (
            type(item.transforms) not in (tuple, list) or set(map(type, item.transforms)) != {str}
        ):
            raise Corrupt(f"{METADATA}: transforms of an item that are no list of names")
        file = files.get(item.file)
        if file is None:
            file = files[item.file] = join(root, checked_path(item.file))
        item.file = file
        by_key[index.key] = item
    return by_key


@lru_cache(maxsize=1)
def chunked(metadata: Metadata) -> tuple[ChunkedTensor, ...]:
    """Return every tensor of the state dict, without blobs; the last result is cached.

    Raise Corrupt without ``planner_data``, or if names, paths, boxes and items disagree;
    Unsupported for an unknown dtype.
    """
    if "planner_data" not in metadata.fields:
        raise Corrupt(f"{METADATA}: no planner_data", hint="it is damaged: fetch it again")
    paths = metadata.fields["planner_data"]
    tensors = []
    for fqn, described in metadata.fields["state_dict_metadata"].items():
        if type(described) is not TensorMetadata:
            continue  # a torch.save blob: no weight
        # empty where the planner did not flatten
        path = paths.get(fqn) if isinstance(paths, dict) and paths else (fqn,)
        if (
            not isinstance(path, (tuple, list))
            or not path
            or not set(map(type, path)) <= {str, int}
        ):
            raise Corrupt(f"{METADATA}: {brief(fqn)} has no path in planner_data")
        # ``flatten_state_dict`` of ``_nested_dict.py`` makes the name from the path; only their
        # comparison shows a flipped bit in one of them
        words = tuple(map(str, path))
        if ".".join(words) != fqn:
            raise Corrupt(
                f"{METADATA}: {brief(fqn)} is {brief(path)} in planner_data",
                hint="it is damaged: fetch it again",
            )
        items = metadata.items
        chunks = tuple(
            [
                Chunk(
                    box.offsets,
                    box.sizes,
                    items.get((fqn, box.offsets)) or _other_item(fqn, box, items),
                )
                for box in described.boxes
            ]
        )
        tensors.append(ChunkedTensor(words, described.dtype, described.shape, chunks))
    return tuple(tensors)


def _other_item(fqn: str, box: ChunkBox, items: Mapping[Key, StorageItem]) -> StorageItem | None:
    """Return the item of a whole tensor, which needs no offsets; None for an empty box.

    Raise Corrupt if the box is in no file.
    """
    item = None if any(box.offsets) else items.get((fqn, ()))
    if item is None and 0 not in box.sizes:
        raise Corrupt(f"{METADATA}: {fqn} has a chunk at {box.offsets} that lies in no file")
    return item


# Metadata of single ranks


def _check_ranks(
    sizes: Collection[str], root: str, names: Sequence[str], world: int | None
) -> None:
    """Raise Incomplete unless ``names``, in order, are of every rank, Corrupt for a higher rank.

    The number of ranks is ``world``, or follows from the highest random state beside the shards or
    in the directory above; if neither is known, raise Incomplete: nothing else shows that a tensor
    of a missing rank alone is missing.
    """
    ranks = [int(name.rpartition("__")[2].removesuffix(METADATA)) for name in names]
    if world is None:
        places = {root, root.rpartition("/")[0]}
        matches = [
            m
            for name in sizes
            if name.rpartition("/")[0] in places
            and (m := _OF_EVERY_RANK.fullmatch(name.rpartition("/")[2]))
        ]
        world = max((int(m[2]) + 1 for m in matches), default=None)
    if world is None:
        listed = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 2 else " and ".join(map(str, ranks))
        raise Incomplete(
            f"{root or '.'}: metadata of ranks {listed}, but the world size is unknown",
            hint=(
                f"if these are all: --source 'dcp:{root or '.'}#world={len(ranks)}'; random states"
                " of every rank beside it say so too"
            ),
        )
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        raise Incomplete(
            f"{join(root, f'__{missing[0]}.metadata')}: not found, of {world} ranks",
            hint="give the other nodes' directories too",
        )
    if ranks[-1] >= world:
        raise Corrupt(
            f"{root or '.'}: metadata of rank {ranks[-1]}, of {world} ranks",
            hint="look for shards of an older, larger save",
        )


@lru_cache(maxsize=1)
def _join_ranks(data: tuple[bytes, ...], names: tuple[str, ...], root: str) -> Metadata:
    """Return all ranks' metadata as one, with the first rank's item of a replica; it is cached.

    ``data``: the content of each of ``names``. ``storage_data`` in ``fields`` is empty. Raise
    Corrupt if ranks disagree on a path, or as `_join_tensor`; else as `_metadata`.
    """
    parts = [_parse(content, root, name) for content, name in zip(data, names, strict=True)]
    items: dict[Key, StorageItem] = {}
    described: dict[str, list[Any]] = {}
    paths: dict[Any, Any] = {}
    for part in parts:
        for key, item in part.items.items():
            items.setdefault(key, item)
        for name, entry in part.fields["state_dict_metadata"].items():
            described.setdefault(name, []).append(entry)
        paths_by_name = part.fields.get("planner_data")
        for name, path in paths_by_name.items() if isinstance(paths_by_name, dict) else ():
            if paths.setdefault(name, path) != path:
                raise Corrupt(
                    f"{brief(name)}: ranks disagree on its path",
                    hint="check that the ranks are of one save",
                )
    fields = {
        "state_dict_metadata": {name: _join_tensor(name, each) for name, each in described.items()},
        "planner_data": paths,
        "storage_data": {},
    }
    return Metadata(fields, items, tuple(item for part in parts for item in part.stored))


def _join_tensor(name: str, described: Sequence[Any]) -> Any:
    """Return one tensor with the boxes of all ranks, each once, and no empty ones.

    The first of ``described`` is returned as it is if it is alone, or if none is a tensor (blobs).
    Raise Corrupt if only some are, or if they differ in shape, dtype or the size of a box.
    """
    tensors = [entry for entry in described if type(entry) is TensorMetadata]
    if not tensors or len(described) == 1:
        return described[0]  # a blob that each rank has of its own
    if len(tensors) != len(described) or len({(t.shape, t.dtype) for t in tensors}) > 1:
        raise Corrupt(
            f"{brief(name)}: ranks disagree on its shape or dtype",
            hint="check that the ranks are of one save",
        )
    boxes: dict[Shape, ChunkBox] = {}
    for box in (box for tensor in tensors for box in tensor.boxes if 0 not in box.sizes):
        if boxes.setdefault(box.offsets, box).sizes != box.sizes:
            raise Corrupt(
                f"{brief(name)}: ranks disagree on the box at {box.offsets}",
                hint="check that the ranks are of one save",
            )
    return tensors[0].with_boxes(boxes.values())
