"""torch Distributed Checkpoint (DCP) as FSDP1 and FSDP2 write it through accelerate, HF Trainer and torch itself.

``.metadata`` is a pickle that says, for every tensor, its shape, the boxes (chunks) it was cut into, and for every box the file, offset
and length of an item, which is a whole ``torch.save`` archive.  Source: ``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.dcp_metadata import METADATA, Chunk, Chunked, chunked, metadata
from ckptsync.formats.joining import join
from ckptsync.model import Copy, Extent, Files, Part, Tensor

NAME = "dcp"
_OPTIMIZERS = ("optimizer", "optim")  # what accelerate and torch's own examples call the rest of a state dict


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Directories that hold a DCP of weights or of optimizer states: shards or their ``.metadata``."""
    found = {name.rpartition("/")[0] for name in names if _is_ours(name.rpartition("/")[2])}
    return tuple(sorted(found))


def holds_weights(root: str) -> bool:
    """``optimizer_0`` is the optimizer's (accelerate's and Trainer's name for it), and so is ``optim`` (NeMo Automodel's)."""
    own = root.rpartition("/")[2]
    return own != "optim" and not own.startswith("optimizer")


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Every file that ``.metadata`` refers to, with its exact size: torch writes items back to back.

    Raises Incomplete if this is a node without ``.metadata``.
    """
    name = join(root, METADATA)
    needed: dict[str, int | None] = {name: files.sizes().get(name)}
    for item in metadata(files, root).items.values():
        needed[item.file] = max(needed.get(item.file) or 0, item.start + item.size)
    return needed


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """The weights, under the names that the model itself has, every chunk located and checked against its item."""
    found = tuple(_weights(chunked(metadata(files, root))))
    if not found:
        raise Unsupported(f"{root or '.'}: a distributed checkpoint without model tensors")
    return tuple(_tensor(files, name, told) for name, told in found)


def _is_ours(base: str) -> bool:
    return base == METADATA or (base.startswith("__") and base.endswith(".distcp"))


def _weights(found: Iterable[Chunked]) -> Iterator[tuple[str, Chunked]]:
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


def _tensor(files: Files, name: str, told: Chunked) -> Tensor:
    parts = tuple(_part(files, name, told.dtype, chunk) for chunk in told.chunks if 0 not in chunk.sizes)
    return Tensor(name, told.dtype, told.shape, (Copy(told.dtype, told.shape, parts),))


def _part(files: Files, name: str, dtype: str, chunk: Chunk) -> Part:
    if chunk.item is None:
        raise Corrupt(f"{METADATA}: {name} has a chunk at {chunk.offsets} that lies in no file")
    item = Extent(chunk.item.file, chunk.item.start, chunk.item.size)
    stored, archive = torch_pickle.load_tensor(files, item)
    if (stored.dtype, stored.shape) != (dtype, chunk.sizes):
        raise Corrupt(f"{item.file}: the item at {item.start} is not the {dtype} chunk of {name} of size {chunk.sizes}")
    part = torch_pickle.part(files, archive, stored)
    return replace(part, offsets=chunk.offsets)
