"""The plan: output files, each a header and an ordered list of tensors with the stored copy to take.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, PRECISION, is_castable
from ckptsync.formats.safetensors import encode_header
from ckptsync.merge import tile
from ckptsync.model import Copy, Shape, Tensor

DType = Literal["auto", "keep", "bf16", "fp16", "fp32"]
DTYPES: tuple[DType, ...] = get_args(DType)
_ASKED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
FORMAT = 1  # of the output: part of what its bytes are a function of


@dataclass(frozen=True, slots=True)
class Options:
    """``dtype``: ``auto`` is the model's own, tensor by tensor; ``keep`` the most precise copy stored; or one of the three.

    ``max_shard_size`` in bytes of tensors in one file; ``source`` as `ckptsync.layouts.table.Source` spells it.
    ``allow_code``: take code that lies in the checkpoint, too (see `ckptsync.merge.output.is_code`).
    """

    dtype: DType = "auto"
    max_shard_size: int = 5_000_000_000
    source: str | None = None
    allow_code: bool = False


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file: ``start`` counts from the file's first byte, ``size`` in bytes of ``dtype``."""

    name: str
    dtype: str
    shape: Shape
    start: int
    size: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class FilePlan:
    """An output file: header, then the tensors' bytes in order, without holes."""

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(t.size for t in self.tensors)


def plan(tensors: Sequence[Tensor], options: Options, stem: str = "model") -> tuple[FilePlan, ...]:
    """Cut the model into files named as ``save_pretrained`` names them.  Raises Corrupt if any tensor is not whole."""
    names = {t.name for t in tensors}
    if len(names) != len(tensors) or not all(map(_is_usable, names)):
        raise Corrupt("two tensors of one name, or a tensor without a usable one")
    chosen = [(t, _checked(t, choose(t, options.dtype)), target(t, options.dtype)) for t in tensors]
    groups = list(_groups(chosen, options.max_shard_size))
    return tuple(_file(_name(stem, i, len(groups)), group) for i, group in enumerate(groups, 1))


def _is_usable(name: str) -> bool:
    """A safetensors header is UTF-8, where halves of a surrogate pair (which JSON and pickles can spell) have no place."""
    if name in ("", "__metadata__"):
        return False
    return name.isascii() or not any("\ud800" <= c <= "\udfff" for c in name)


def target(tensor: Tensor, dtype: DType) -> str:
    """The element type that this tensor is written in."""
    own = tensor.dtype if is_castable(tensor.dtype) else choose(tensor, dtype).dtype
    if dtype == "auto" or not is_castable(own):
        return own
    return choose(tensor, dtype).dtype if dtype == "keep" else _ASKED[dtype]


def choose(tensor: Tensor, dtype: DType) -> Copy:
    """The stored copy to read: one that needs no cast, else the most precise; of equals the first.

    Raises Incomplete if that one's file is not here: a less precise one is never taken in its place.
    """
    if not tensor.copies:
        raise Corrupt(f"{tensor.name}: no copy is stored")
    if len(tensor.copies) == 1 and not tensor.copies[0].absent:
        return tensor.copies[0]
    best = max(tensor.copies, key=lambda c: (PRECISION.get(c.dtype, 0), not c.absent))  # the first of equals
    if dtype != "keep" and is_castable(best.dtype):
        wanted = tensor.dtype if dtype == "auto" else _ASKED[dtype]
        best = next((c for c in reversed(tensor.copies) if c.dtype == wanted and not c.absent), best)
    if best.absent:
        raise Incomplete(
            f"{best.absent}: not there; it holds the {best.dtype} copy of {tensor.name}",
            hint="give the directory of the node that wrote it, or take the model's own copy with --dtype auto",
        )
    return best


def check_dtype(dtype: str) -> DType:
    """``dtype`` itself if it is one that can be asked for; raises Unsupported."""
    for known in DTYPES:
        if dtype == known:
            return known
    raise Unsupported(f"dtype {dtype!r}", hint=f"one of: {', '.join(DTYPES)}")


Chosen = tuple[Tensor, Copy, str]


def _checked(tensor: Tensor, copy: Copy) -> Copy:
    tile.check(tensor, copy)
    return copy


def _size(shape: Shape, dtype: str) -> int:
    return prod(shape) * ITEMSIZE[dtype]


def _groups(chosen: Sequence[Chosen], most: int) -> Iterator[list[Chosen]]:
    """As huggingface_hub splits a state dict: a new file when the next tensor would not fit; but always in order."""
    group: list[Chosen] = []
    held = 0
    for tensor, copy, dtype in chosen:
        size = _size(tensor.shape, dtype)
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append((tensor, copy, dtype))
        held += size
    if group:
        yield group


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def _file(name: str, group: Sequence[Chosen]) -> FilePlan:
    header = encode_header((tensor.name, dtype, tensor.shape) for tensor, _, dtype in group)
    at, planned = len(header), []
    for tensor, copy, dtype in group:
        size = _size(tensor.shape, dtype)
        planned.append(PlannedTensor(tensor.name, dtype, tensor.shape, at, size, copy))
        at += size
    return FilePlan(name, header, tuple(planned))
