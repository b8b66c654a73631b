"""torch Distributed Checkpoint (DCP) as accelerate, HF Trainer, torchtitan, Lightning, Megatron-Core and torch itself write it.

``.metadata`` is a pickle that says, for every tensor, its shape, the boxes (chunks) it was cut into, and for every box the file, offset
and length of an item, which is a whole ``torch.save`` archive.  Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_save, zstd_items
from ckptsync.formats.zstd_items import Unpacked, unpacked
from ckptsync.layouts import dcp_items, dcp_local, dcp_names
from ckptsync.layouts.dcp_described import METADATA, Item
from ckptsync.layouts.dcp_items import Found
from ckptsync.layouts.dcp_metadata import Chunk, Chunked, chunked
from ckptsync.model import Copy, Extent, Files, Part, Tensor, read

NAME = "dcp"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Directories that hold a DCP of weights or of optimizer states: shards or their ``.metadata``."""
    found = {name.rpartition("/")[0] for name in names if _is_ours(name.rpartition("/")[2])}
    return tuple(sorted(found))


def holds_weights(root: str) -> bool:
    """``optimizer_0`` is the optimizer's (accelerate's and Trainer's name for it), and so is ``optim`` (NeMo Automodel's)."""
    own = root.rpartition("/")[2]
    return own != "optim" and not own.startswith("optimizer")


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Every file that the metadata refers to, with its exact size: torch writes items back to back.

    Raises Incomplete if this is a node without it, Unsupported if tensors are no items of their own.
    """
    place = _place(files, root)
    needed: dict[str, int | None] = {name: files.sizes().get(name) for name in dcp_local.describing(files.sizes(), place.folder)}
    for item in dcp_local.described(files, place.folder, place.world).items:
        needed[item.file] = max(needed.get(item.file) or 0, item.start + item.size)
    _refuse_safetensors(files, needed)
    return needed


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """The weights, under the names that the model itself has, every chunk located and checked against its item.

    ``root`` may end in ``#section``, which takes one part of the state dict, or ``#world=N``, the number of ranks.
    """
    place = _place(files, root)
    told = dcp_local.described(files, place.folder, place.world)
    named = dcp_names.weights(chunked(told.metadata), told.metadata.fields, place.section, place.folder or ".")
    if not named:
        there = ", ".join(sorted({one.path[0] for one in chunked(told.metadata)}))
        raise Unsupported(
            f"{place.folder or '.'}: a distributed checkpoint without model tensors",
            hint=f"--source 'dcp:{place.folder or '.'}#SECTION' takes what is meant, of: {there:.500}" if there else "",
        )
    found = tuple(_packed_tensors(files, named) if _are_packed(named) else _tensors(files, named))
    remarks = (told.remark, dcp_names.remark(chunked(told.metadata), named, place.folder or "."))
    return (replace(found[0], remark="; ".join(filter(None, remarks))), *found[1:]) if any(remarks) else found


@dataclass(frozen=True, slots=True)
class _Place:
    """A root, taken apart."""

    folder: str
    section: str | None = None
    world: int | None = None


def _place(files: Files, root: str) -> _Place:
    folder, mark, said = root.rpartition("#")
    if not mark or any(name.rpartition("/")[0] == root for name in files.sizes()):
        return _Place(root)
    folder = "" if folder == "." else folder
    if (number := said.removeprefix("world=")) != said and number.isdecimal() and 0 < len(number) < 8:
        return _Place(folder, world=int(number))
    return _Place(folder, section=said)


def _refuse_safetensors(files: Files, needed: Mapping[str, int | None]) -> None:
    """``FileSystemWriter(serialization_format=SAFETENSORS)`` keeps items for blobs, and puts all tensors of a file in one block at its end.

    The items say where a tensor would have been, so that the file has another size than they need.  Source: ``_write_files_from_queue``.
    """
    for name, size in needed.items():
        there = files.sizes().get(name)
        if size and there is not None and there != size and _begins_like_safetensors(files, name, there):
            raise Unsupported(
                f"{name}: its tensors are one block of safetensors, not items (SerializationFormat.SAFETENSORS)",
                hint="save with SerializationFormat.TORCH_SAVE, or with HuggingFaceStorageWriter",
            )


def _begins_like_safetensors(files: Files, name: str, size: int) -> bool:
    if size < 10:
        return False
    start = read(files, Extent(name, 0, 10))
    return start[8:] == b'{"' and int.from_bytes(start[:8], "little") <= size - 8


def _is_ours(base: str) -> bool:
    return base == METADATA or dcp_local.is_own(base) or (base.startswith("__") and base.endswith(".distcp"))


def _tensors(files: Files, found: Sequence[tuple[str, Chunked]]) -> Iterator[Tensor]:
    items = [chunk.item or _nowhere(name, chunk) for name, told in found for chunk in told.chunks if 0 not in chunk.sizes]
    kinds = zip(items, dcp_items.find(files, items), strict=True)
    for name, told in found:
        parts = tuple([_part(name, told.dtype, chunk, *next(kinds)) for chunk in told.chunks if 0 not in chunk.sizes])
        yield Tensor(name, told.dtype, told.shape, (Copy(told.dtype, told.shape, parts),))


def _nowhere(name: str, chunk: Chunk) -> Item:
    raise Corrupt(f"{METADATA}: {name} has a chunk at {chunk.offsets} that lies in no file")


def _part(name: str, dtype: str, chunk: Chunk, item: Item, found: Found) -> Part:
    stored = found[0].stored
    if stored.dtype != dtype or stored.shape != chunk.sizes:
        raise Corrupt(f"{item.file}: the item at {item.start} is not the {dtype} chunk of {name} of size {chunk.sizes}")
    return dcp_items.part(item, found, chunk.offsets)


def _are_packed(found: Sequence[tuple[str, Chunked]]) -> bool:
    """Whether any of the tensors' items went through a transform."""
    return any(chunk.item and chunk.item.transforms for _, told in found for chunk in told.chunks)


def _packed_tensors(files: Files, found: Sequence[tuple[str, Chunked]]) -> Iterator[Tensor]:
    """The same as of items that are not packed, their extents in the unpacked streams."""
    files = unpacked(files)
    for name, told in found:
        parts = tuple(_packed_part(unpacked(files), name, told.dtype, chunk) for chunk in told.chunks if 0 not in chunk.sizes)
        yield Tensor(name, told.dtype, told.shape, (Copy(told.dtype, told.shape, parts),))


def _packed_part(files: Unpacked, name: str, dtype: str, chunk: Chunk) -> Part:
    told = chunk.item or _nowhere(name, chunk)
    item = Extent(told.file, told.start, told.size)
    if told.transforms:
        stored, part = zstd_items.load_tensor(files, item)
    else:
        stored, archive = torch_save.load_tensor(files, item)
        part = torch_save.part(files, archive, stored)
    if (stored.dtype, stored.shape) != (dtype, chunk.sizes):
        raise Corrupt(f"{item.file}: the item at {item.start} is not the {dtype} chunk of {name} of size {chunk.sizes}")
    return replace(part, offsets=chunk.offsets)
