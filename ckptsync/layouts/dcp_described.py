"""What ``.metadata`` of a torch Distributed Checkpoint has by the million: tensors, their boxes, and the items that hold these.

Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats import torch_pickle
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.pickles import Made, Stated
from ckptsync.model import Shape

METADATA = ".metadata"
Key = tuple[str, Shape]
_OF_ITEM = ["relative_path", "offset", "length"]  # the attributes that torch 2.13 writes of an item without transforms
_OF_INDEX = ["fqn", "index", "offset"]


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

    @classmethod
    def several(cls, names: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[Any]:
        """The same checks, column by column."""
        if (
            names != _OF_ITEM
            or [set(map(type, column)) for column in columns] != [{str}, {int}, {int}]
            or min(map(min, columns[1:])) < 0
        ):
            return super().several(names, columns)
        made = []
        for file, start, size in zip(*columns, strict=True):
            one = cls()
            one.file, one.start, one.size, one.transforms = file, start, size, None
            made.append(one)
        return made


class Index(Stated):
    """Of which chunk of which tensor an item is: ``MetadataIndex``.  ``key`` is its name and offsets, () where it has none."""

    __slots__ = ("key",)
    is_key = True
    key: Key

    def take(self, items: list[Any]) -> None:
        """Its number among the chunks says nothing more."""
        if items[::2] == _OF_INDEX:
            _, fqn, _, _, _, offset = items
        else:
            fqn, offset = _attributes(items, ("fqn", "offset"))
        if type(fqn) is not str:
            raise Corrupt(f"{METADATA}: a MetadataIndex without a name")
        self.key = fqn, (_shape(offset) if offset else ())

    @classmethod
    def several(cls, names: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[Any]:
        """The same checks, column by column: an offset that comes again is one object."""
        if names != _OF_INDEX or set(map(type, columns[0])) != {str}:
            return super().several(names, columns)
        fqns, _, offsets = columns
        shapes = {id(offset): _shape(offset) if offset else () for offset in {id(offset): offset for offset in offsets}.values()}
        made = []
        for fqn, offset in zip(fqns, offsets, strict=True):
            one = cls()
            one.key = fqn, shapes[id(offset)]
            made.append(one)
        return made


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

    def count(self) -> int:
        """Boxes."""
        return len(self.boxes)

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
