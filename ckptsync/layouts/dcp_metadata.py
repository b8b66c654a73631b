"""What a torch Distributed Checkpoint says of itself: ``.metadata``, a pickle.

For every tensor its shape, the boxes (chunks) it was cut into, and for every box the file, offset and length of an item.
Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import packed, torch_pickle
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.inert import MAX_BYTES, Build, Made, Name, Stated, brief, loads, made
from ckptsync.formats.joining import join
from ckptsync.layouts import dcp_dialects
from ckptsync.model import Files, Shape, read_whole
from ckptsync.paths import checked_path

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
Key = tuple[str, Shape]


class Item(Stated):
    """Where an item lies, which is one chunk or one blob: ``_StorageInfo``.  ``transforms`` were applied to its bytes, in this order."""

    __slots__ = ("file", "size", "start", "transforms")
    file: str
    start: int
    size: int
    transforms: Any

    def take(self, items: list[Any]) -> None:
        """``file`` is relative to the directory until `metadata` joins them."""
        self.transforms = None
        if items[::2] == ["relative_path", "offset", "length"]:  # what torch 2.13 writes of an item without transforms
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


class Index(Stated):
    """Of which chunk of which tensor an item is: ``MetadataIndex``.  ``key`` is its name and offsets, () where it has none."""

    __slots__ = ("key",)
    key: Key

    def take(self, items: list[Any]) -> None:
        """Its number among the chunks says nothing more."""
        if items[::2] == ["fqn", "index", "offset"]:
            _, fqn, _, _, _, offset = items
        else:
            fqn, offset = _attributes(items, ("fqn", "offset"))
        if type(fqn) is not str:
            raise Corrupt(f"{METADATA}: a MetadataIndex without a name")
        self.key = fqn, (_shape(offset) if offset else ())


class Box(Stated):
    """A box of a tensor: ``ChunkStorageMetadata``."""

    __slots__ = ("offsets", "sizes")
    offsets: Shape
    sizes: Shape

    def take(self, items: list[Any]) -> None:
        """As many offsets as sizes."""
        if items[::2] == ["offsets", "sizes"]:
            _, offsets, _, sizes = items
        else:
            offsets, sizes = _attributes(items, ("offsets", "sizes"))
        self.offsets, self.sizes = _shape(offsets), _shape(sizes)


class Described(Stated):
    """A tensor, ``TensorStorageMetadata``: its properties, its shape and the boxes that it was cut into."""

    __slots__ = ("boxes", "properties", "shape")
    alike = (b"aub", b"eub")  # a list of one or more boxes is the last
    boxes: tuple[Box, ...]
    properties: Made
    shape: Shape

    def take(self, items: list[Any]) -> None:
        """Boxes have as many axes as the tensor."""
        properties, size, chunks = _attributes(items, ("properties", "size", "chunks"))
        if type(properties) is not Made or type(chunks) is not list or any(type(chunk) is not Box for chunk in chunks):
            raise Corrupt(f"{METADATA}: a tensor without properties, size and chunks")
        self.properties, self.shape, self.boxes = properties, _shape(size), tuple(chunks)
        for box in self.boxes:
            if len(box.offsets) != len(self.shape) or len(box.sizes) != len(self.shape):
                raise Corrupt(f"{METADATA}: a tensor of shape {self.shape} has a chunk at {box.offsets} of size {box.sizes}")

    def with_boxes(self, boxes: Iterable[Box]) -> Described:
        """The same tensor, cut into these."""
        found = Described()
        found.properties, found.shape, found.boxes = self.properties, self.shape, tuple(boxes)
        return found

    @property
    def dtype(self) -> str:
        """``TensorProperties`` pickles as ``(dtype, layout, requires_grad, memory format, pin_memory)``; raises Unsupported."""
        if type(self.properties.state) is not tuple or not self.properties.state:
            raise Corrupt(f"{METADATA}: a tensor without properties")
        return torch_pickle.dtype_of(self.properties.state[0])


def _attributes(items: list[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """The values of those names, None where there is none, of attributes in any order."""
    if not all(type(key) is str for key in items[::2]):
        raise Corrupt(f"{METADATA}: an attribute whose name is no text")
    return tuple(map(dict(zip(items[::2], items[1::2], strict=True)).get, names))


def _shape(value: Any) -> Shape:
    if type(value) is not tuple or len(value) > MOST_AXES:
        raise Corrupt(f"{METADATA}: a shape or offset that is not made of natural numbers")
    for n in value:
        if type(n) is not int or n < 0:
            raise Corrupt(f"{METADATA}: a shape or offset that is not made of natural numbers")
    return value


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
    **dict.fromkeys((*_NAMES, *dcp_dialects.NAMES), made),
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
    return Metadata(fields, _items(fields["storage_data"], root))


def _items(storage: dict[Any, Any], root: str) -> dict[Key, Item]:
    """``(name, offsets)`` of a chunk → its item."""
    found: dict[Key, Item] = {}
    files: dict[str, str] = {}
    if len(set(map(id, storage.values()))) != len(storage):
        raise Corrupt(f"{METADATA}: two chunks in one item")
    for index, item in storage.items():
        if type(index) is not Index or type(item) is not Item:
            raise Corrupt(f"{METADATA}: something else where an item is due")
        if item.transforms:
            packed.check(item.transforms)
        file = files.get(item.file)
        if file is None:
            file = files[item.file] = join(root, checked_path(item.file))
        item.file = file
        found[index.key] = item
    return found


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of a pickled dataclass."""
    kinds = dcp_dialects.METADATA if kind == "Metadata" else (kind,)
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
        chunks = tuple([Chunk(box.offsets, box.sizes, _item(fqn, box, located)) for box in described.boxes])
        yield Chunked(words, described.dtype, described.shape, chunks)


def _item(fqn: str, box: Box, items: Mapping[Key, Item]) -> Item | None:
    found = items.get((fqn, box.offsets))
    if found is None and not any(box.offsets):
        found = items.get((fqn, ()))
    if found is None and 0 not in box.sizes:
        raise Corrupt(f"{METADATA}: {fqn} has a chunk at {box.offsets} that lies in no file")
    return found


def _paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Name → path in the nested state dict, of all names; empty where the planner did not flatten it."""
    if "planner_data" not in fields:
        raise Corrupt(f"{METADATA}: no planner_data", hint="it is damaged: fetch it again")
    paths = fields["planner_data"]
    return paths if isinstance(paths, dict) else {}
