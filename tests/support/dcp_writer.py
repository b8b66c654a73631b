"""Distributed checkpoints written without torch: a ``.metadata`` that says anything, and items to
go with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptsync.layouts import dcp
from ckptsync.tensors import Shape, Tensor
from tests.support.files_in_memory import (
    Call,
    Global,
    MemoryFiles,
    StorageId,
    tensor_call,
    torch_pickle,
    torch_zip_file,
)
from tests.support.files_in_memory import _Pickler as Pickler

_DCP = "torch.distributed.checkpoint"


class Built:
    """Pickles as an object of a class, made with ``args``, then given ``state``."""

    def __init__(self, module: str, name: str, state: object, *args: object) -> None:
        self.call, self.state = Call(Global(f"{_DCP}.{module}", name), *args), state

    def with_state(self, state: object) -> Built:
        """Return a copy with another state."""
        copy = type(self)("", "", state)
        copy.call = self.call
        return copy


def _save_built(pickler: Any, obj: Built) -> None:
    pickler.save(obj.call)
    pickler.save(obj.state)
    pickler.write(b"b")


Pickler.dispatch |= {Built: _save_built}


@dataclass(frozen=True)
class Chunk:
    """A box and where its item lies."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int
    transforms: tuple[str, ...] = ()


def packed() -> dict[str, bytes]:
    """Return a checkpoint whose only item torch's ZStandard extension has packed."""
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 9, ("stream.zstd/1",))
    shard = b"(\xb5/\xfd" + bytes(5)
    return {".metadata": metadata({"w": ("float32", (4,), (chunk,))}), "__0_0.distcp": shard}


def metadata(
    tensors: Mapping[str, tuple[str, Shape, Sequence[Chunk]]],
    paths: Mapping[str, tuple[object, ...]] | None = None,
    blobs: Sequence[str] = (),
) -> bytes:
    """Return a ``.metadata`` as torch 2.13 pickles it, with the planner's ``paths``.

    ``tensors``: name → (torch dtype, shape, chunks). ``blobs``: names of items that are no tensors.
    """
    return torch_pickle(described(tensors, paths, blobs))


def described(
    tensors: Mapping[str, tuple[str, Shape, Sequence[Chunk]]],
    paths: Mapping[str, tuple[object, ...]] | None = None,
    blobs: Sequence[str] = (),
) -> Built:
    """Return what `metadata` returns, before it is pickled."""
    records: dict[str, object] = {name: _tensor(*tensor) for name, tensor in tensors.items()}
    records |= {name: Built("metadata", "BytesStorageMetadata", {}) for name in blobs}
    places: dict[object, object] = {}
    for name, (_, _, chunks) in tensors.items():
        for n, chunk in enumerate(chunks):
            index = {"fqn": name, "offset": chunk.offsets, "index": n}
            places[_Key("metadata", "MetadataIndex", index)] = _place(chunk)
    content = {
        "state_dict_metadata": records,
        "planner_data": paths,
        "storage_data": places,
        "version": "1.0.0",
    }
    return Built("metadata", "Metadata", content)


class _Key(Built):
    """A key of a dictionary."""


Pickler.dispatch |= {_Key: _save_built}


def _place(chunk: Chunk) -> Built:
    state: dict[str, object] = {"relative_path": chunk.file, "offset": chunk.start}
    state["length"] = chunk.length
    if chunk.transforms:
        state["transform_descriptors"] = chunk.transforms
    return Built("filesystem", "_StorageInfo", state)


def _tensor(dtype: str, shape: Shape, chunks: Sequence[Chunk]) -> Built:
    properties = Built("metadata", "TensorProperties", (Global("torch", dtype), 0, False, 0, False))
    boxes = [
        Built("metadata", "ChunkStorageMetadata", {"offsets": c.offsets, "sizes": c.sizes})
        for c in chunks
    ]
    state = {"properties": properties, "size": shape, "chunks": boxes}
    return Built("metadata", "TensorStorageMetadata", state)


def item(data: bytes, shape: Shape, strides: Shape | None = None) -> bytes:
    """Return what ``torch.save`` writes of one float32 tensor; row-major without ``strides``."""
    plain = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    call = tensor_call(StorageId("FloatStorage", "0", len(data) // 4), 0, shape, strides or plain)
    return torch_zip_file(
        {"data.pkl": torch_pickle(call), "byteorder": b"little", "data/0": data, "version": b"3\n"}
    )


def checkpoint(
    root: str,
    tensors: Mapping[str, tuple[Shape, Mapping[Shape, tuple[Shape, bytes]]]],
    **options: Any,
) -> dict[str, bytes]:
    """Return the files of float32 tensors below ``root``, each box in the file of its number.

    ``tensors``: name → (shape, offsets → (sizes, data)). ``options``: those of `metadata`.
    """
    files: dict[str, bytes] = {}
    described_tensors = {}
    for name, (shape, boxes) in tensors.items():
        chunks = []
        for rank, (offsets, (sizes, data)) in enumerate(boxes.items()):
            content, file = item(data, sizes), f"__{rank}_0.distcp"
            before = files.get(file, b"")
            files[file] = before + content
            chunks.append(Chunk(offsets, sizes, file, len(before), len(content)))
        described_tensors[name] = ("float32", shape, tuple(chunks))
    files[".metadata"] = metadata(described_tensors, **options)
    return {f"{root}/{name}" if root else name: data for name, data in files.items()}


DATA = bytes(range(16))
WHOLE: dict[Shape, tuple[Shape, bytes]] = {(0,): ((4,), DATA)}


def one(name: str = "w", root: str = "", **options: Any) -> MemoryFiles:
    """Return a checkpoint with one tensor in one file."""
    return MemoryFiles(checkpoint(root, {name: ((4,), WHOLE)}, **options))


def found(files: MemoryFiles, root: str = "") -> dict[str, Tensor]:
    """Return the tensors that the layout finds, by name."""
    return {t.name: t for t in dcp.tensors(files, root)}


def fields_of(name: str, sizes: Shape) -> dict[str, object]:
    """Return the fields of a ``.metadata`` with one tensor, of which no item is stored."""
    box = Built("metadata", "ChunkStorageMetadata", {"offsets": (0,), "sizes": sizes})
    properties = Built("metadata", "TensorProperties", (Global("torch", "float32"),))
    state = {"properties": properties, "size": sizes, "chunks": [box]}
    tensor = Built("metadata", "TensorStorageMetadata", state)
    return {"state_dict_metadata": {name: tensor}, "planner_data": None, "storage_data": {}}
