"""Tensors of a distributed checkpoint whose items are packed, every one of them or some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptsync.errors import Corrupt
from ckptsync.formats import packed_item, torch_pickle
from ckptsync.formats.unpacking import Unpacked, opened
from ckptsync.layouts.dcp_described import METADATA
from ckptsync.layouts.dcp_metadata import Chunk, Chunked
from ckptsync.model import Copy, Extent, Files, Part, Tensor


def are_packed(found: Sequence[tuple[str, Chunked]]) -> bool:
    """Whether any of the tensors' items went through a transform."""
    return any(chunk.item and chunk.item.transforms for _, told in found for chunk in told.chunks)


def tensors(files: Files, found: Sequence[tuple[str, Chunked]]) -> Iterator[Tensor]:
    """The same as of items that are not packed, their extents in the unpacked streams."""
    unpacked = opened(files)
    for name, told in found:
        parts = tuple(_part(unpacked, name, told.dtype, chunk) for chunk in told.chunks if 0 not in chunk.sizes)
        yield Tensor(name, told.dtype, told.shape, (Copy(told.dtype, told.shape, parts),))


def _part(files: Unpacked, name: str, dtype: str, chunk: Chunk) -> Part:
    if chunk.item is None:
        raise Corrupt(f"{METADATA}: {name} has a chunk at {chunk.offsets} that lies in no file")
    item = Extent(chunk.item.file, chunk.item.start, chunk.item.size)
    if chunk.item.transforms:
        stored, part = packed_item.load(files, item)
    else:
        stored, archive = torch_pickle.load_tensor(files, item)
        part = torch_pickle.part(files, archive, stored)
    if (stored.dtype, stored.shape) != (dtype, chunk.sizes):
        raise Corrupt(f"{item.file}: the item at {item.start} is not the {dtype} chunk of {name} of size {chunk.sizes}")
    return replace(part, offsets=chunk.offsets)
