"""Pickles that ``torch.save`` writes: tensors become `Stored`, everything else plain values.

Names observed in files of torch 2.13 and read in ``torch/_utils.py``, ``torch/storage.py`` and ``torch/_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_legacy, torch_zip
from ckptsync.formats.dtypes import FROM_TORCH, ITEMSIZE, MOST_AXES, STORAGES, from_torch
from ckptsync.formats.pickles import Build, Made, Name, loads, made, ordered
from ckptsync.model import Checksum, Extent, Files, Part, Shape


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of elements that tensors are views of: record ``data/<key>``, ``numel`` elements."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a view of a storage; ``offset`` and ``strides`` count elements."""

    dtype: str
    storage: Storage
    offset: int
    shape: Shape
    strides: Shape

    @property
    def numel(self) -> int:
        """Elements in the tensor, not in its storage."""
        return prod(self.shape)


@lru_cache(maxsize=1024)
def span(shape: Shape, strides: Shape) -> int:
    """How many elements of the storage a view reaches over, first to last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if prod(shape) else 0


def row_major(shape: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def _integers(values: Any) -> Shape:
    if type(values) is tuple and len(values) <= MOST_AXES:
        for n in values:
            if type(n) is not int or n < 0:
                break
        else:
            return values
    raise Corrupt("pickle: a shape, stride or offset that is not made of natural numbers")


def _stored(dtype: str, storage: Any, offset: Any, shape: Any, strides: Any) -> Stored:
    _integers((offset,)), _integers(shape), _integers(strides)
    if type(storage) is not Storage or len(shape) != len(strides):
        raise Corrupt("pickle: a tensor without a storage, or with strides of another rank")
    reach = span(shape, strides)
    if not reach:
        offset = 0  # an empty view may lie behind the end of its storage
    numel = storage.numel if dtype == storage.dtype else storage.numel * ITEMSIZE[storage.dtype] // ITEMSIZE[dtype]
    if offset + reach > numel:
        raise Corrupt(f"pickle: a tensor of shape {shape} reaches behind its storage of {numel} elements")
    return Stored(dtype, storage, offset, shape, strides)


def _rebuild_v2(_: Name, args: tuple[Any, ...]) -> Stored:
    """Arguments after the strides say whether a gradient is wanted, its hooks, and metadata."""
    storage, offset, shape, strides, *more = args
    if not 2 <= len(more) <= 3 or type(more[0]) is not bool:
        raise Corrupt("pickle: a tensor that torch does not rebuild")
    return _stored(storage.dtype if isinstance(storage, Storage) else "", storage, offset, shape, strides)


def _rebuild_v3(_: Name, args: tuple[Any, ...]) -> Stored:
    storage, offset, shape, strides = args[:4]
    return _stored(dtype_of(args[6]), storage, offset, shape, strides)


def _rebuild_from_type(_: Name, args: tuple[Any, ...]) -> Any:
    """``_rebuild_from_type_v2(func, type, args, state)``: a tensor of a subclass, or with attributes."""
    func, _kind, inner, _state = args
    if not isinstance(func, Name) or func not in TENSORS:
        raise Corrupt("pickle: a tensor that is rebuilt by something else")
    return TENSORS[func](func, inner)


def _first(_: Name, args: tuple[Any, ...]) -> Any:
    return args[0]


def _size(_: Name, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if type(args[0]) not in (tuple, list) or len(args[0]) > 2 * MOST_AXES:  # torch itself has at most 64
        raise Corrupt("pickle: a torch.Size that no tensor has")
    return tuple(args[0])


def _uncalled(name: Name, _: tuple[Any, ...]) -> Any:
    raise Corrupt(f"pickle: torch.{name.name} is called, which is no function")


TENSORS: Mapping[Name, Callable[[Name, tuple[Any, ...]], Any]] = {
    Name("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    Name("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    Name("torch._utils", "_rebuild_parameter"): _first,
    Name("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
}

ALLOWED: Mapping[Name, Build] = {
    **TENSORS,
    Name("collections", "OrderedDict"): ordered,
    Name("torch", "Size"): _size,
    Name("torch", "Tensor"): made,
    Name("torch.nn.parameter", "Parameter"): made,
    Name("torch", "device"): made,
    Name("torch.storage", "UntypedStorage"): made,
    **{Name("torch", name): _uncalled for name in (*FROM_TORCH, *STORAGES)},
}


def dtype_of(name: Any) -> str:
    """Give safetensors' name for a ``torch.<dtype>`` in a pickle."""
    if not isinstance(name, Name) or name.module != "torch":
        raise Corrupt("pickle: something else where an element type is due")
    return from_torch(name.name)


def _persistent(value: Any) -> Storage:
    """``("storage", type, key, location, numel)``; an UntypedStorage counts bytes."""
    if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage" or not isinstance(value[1], Name):
        raise Corrupt("pickle: a persistent id that is no storage")
    _, kind, key, _, numel = value
    if not isinstance(key, str) or len(key) > torch_legacy.LONGEST_KEY or type(numel) is not int or numel < 0:
        raise Corrupt("pickle: a storage without key and size")
    return Storage(STORAGES.get(kind.name, "U8"), key, numel)


def _storages() -> Callable[[Any], Storage]:
    """As `_persistent`, of one pickle, in which a storage has one type and size however often it is named: torch takes the first."""
    seen: dict[str, Storage] = {}

    def named(value: Any) -> Storage:
        storage = _persistent(value)
        if seen.setdefault(storage.key, storage) != storage:
            raise Corrupt(f"pickle: storage {storage.key} has two types or sizes")
        return storage

    return named


Container = torch_zip.Archive | torch_legacy.Legacy


def load(files: Files, where: Extent, allowed: Mapping[Name, Build] = ALLOWED) -> tuple[Any, Container]:
    """The value that one ``torch.save`` wrote, and its container (see `part` for the bytes of a tensor)."""
    if torch_legacy.is_legacy(files, where):
        return torch_legacy.load(files, where, allowed, Storage)
    archive = torch_zip.open_archive(files, where)
    torch_zip.check_version(files, archive)
    return _value(torch_zip.pickle_of(files, archive), _ById(allowed)), archive


class _ById:
    """Names that are the same if they are one table: two tables are never compared."""

    __slots__ = ("names",)

    def __init__(self, names: Mapping[Name, Build]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.names is other.names

    def __hash__(self) -> int:
        return id(self.names)


@lru_cache(maxsize=1)  # a file is asked for what it demands and then for what it holds
def _value(data: bytes, allowed: _ById) -> Any:
    """What is pickled, not to be changed."""
    return loads(data, allowed.names, _storages())[0]


def load_tensor(files: Files, where: Extent) -> tuple[Stored, torch_zip.Archive]:
    """As `load`, for an archive of one tensor, of which a distributed checkpoint has one for every chunk."""
    archive = torch_zip.open_archive(files, where)
    try:
        return _tensor(torch_zip.pickle_of(files, archive)), archive
    except _NoTensor as e:
        raise Corrupt(f"{where.file}: no tensor in the archive at {where.start}") from e


def parsed(data: bytes) -> tuple[Any, int]:
    """The value that a pickle at the start of ``data`` makes, and the bytes that it takes."""
    return loads(data, ALLOWED, _storages())


class _NoTensor(Corrupt):
    """Something else, which is not kept."""


@lru_cache(maxsize=256)  # chunks of one shape have one pickle
def _tensor(data: bytes) -> Stored:
    value, _ = loads(data, ALLOWED, _storages())
    if not isinstance(value, Stored):
        raise _NoTensor("no tensor")
    return value


_MOST_EXPANDED = 256 << 20  # bytes: position ids and masks are expanded, weights are not


def part(files: Files, container: Container, tensor: Stored) -> Part:
    """Where a tensor's elements lie, as a box of itself.

    Raises Corrupt if its record is too short, Unsupported for an expanded tensor that would fill a disk from a few bytes.
    """
    item = ITEMSIZE[tensor.dtype]
    record, checksum = _record(files, container, tensor.storage.key)
    size, told = span(tensor.shape, tensor.strides) * item, tensor.storage.numel * ITEMSIZE[tensor.storage.dtype]
    if record.size != told or tensor.offset * item + size > record.size:
        raise Corrupt(f"{record.file}: storage {tensor.storage.key} has {record.size} bytes, {told} expected")
    whole = prod(tensor.shape) * item
    if whole > _MOST_EXPANDED and whole > 1000 * size:
        raise Unsupported(
            f"{record.file}: {size} bytes that are named again and again as a tensor of {whole} bytes",
            hint="save the tensor with .contiguous()",
        )
    strides = None if is_contiguous(tensor) else tensor.strides
    extent = Extent(record.file, record.start + tensor.offset * item, size)
    return Part((0,) * len(tensor.shape), tensor.shape, extent, strides, checksum)


def _record(files: Files, container: Container, key: str) -> tuple[Extent, Checksum | None]:
    """Where a storage lies, and its CRC32 where the container has one."""
    if isinstance(container, torch_legacy.Legacy):
        return container.storages[key], None
    name = f"data/{key}"
    record = torch_zip.extent(files, container, name)
    return record, torch_zip.checksum(container, name, record)


def is_contiguous(tensor: Stored) -> bool:
    """Row-major; strides of axes of one element do not matter."""
    return _is_row_major(tensor.shape, tensor.strides)


@lru_cache(maxsize=1024)
def _is_row_major(shape: Shape, strides: Shape) -> bool:
    plain = row_major(shape)
    return all(n <= 1 or s == p for n, s, p in zip(shape, strides, plain, strict=True)) or not prod(shape)


__all__ = [
    "ALLOWED",
    "Made",
    "Name",
    "Storage",
    "Stored",
    "dtype_of",
    "is_contiguous",
    "load",
    "load_tensor",
    "parsed",
    "part",
    "row_major",
    "span",
]
