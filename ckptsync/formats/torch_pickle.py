"""Read tensors in pickles of ``torch.save`` as `StoredTensor`, everything else as plain values.

Names observed in files of torch 2.13 and read in ``torch/_utils.py``, ``torch/storage.py`` and
``torch/_tensor.py``. Quantised tensors are refused by name, because their storages mean nothing
without the kernels that wrote them; their names are as torch, bitsandbytes 0.4x and torchao 0.x
pickle them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import FROM_TORCH, ITEMSIZE, MOST_AXES, STORAGES, from_torch
from ckptsync.formats.pickles import Build, Name, all_made, loads, ordered
from ckptsync.tensors import Shape

# letters of a storage's name, which is a number: each mention of it is compared with others
_LONGEST_KEY = 100
_MOST_ELEMENTS = 1 << 60


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of elements that tensors are views of: record ``data/<key>``, ``numel`` elements."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a view of a storage; ``offset`` and ``strides`` count elements."""

    dtype: str
    storage: Storage
    offset: int
    shape: Shape
    strides: Shape

    @property
    def numel(self) -> int:
        """Return the elements in the tensor, not in its storage."""
        return prod(self.shape)


@lru_cache(maxsize=1024)
def span(shape: Shape, strides: Shape) -> int:
    """Return how many elements of the storage a view reaches over, first to last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if prod(shape) else 0


def row_major(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def shape_of(values: Any) -> Shape:
    """Return a tuple of a pickle that is a shape, strides or offsets; raises Corrupt otherwise."""
    if type(values) is tuple and len(values) <= MOST_AXES:
        for n in values:
            if type(n) is not int or n < 0:
                break
        else:
            return values
    raise Corrupt("pickle: a shape, stride or offset that is not made of natural numbers")


def _stored(dtype: str, storage: Any, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    shape_of((offset,)), shape_of(shape), shape_of(strides)
    if type(storage) is not Storage or len(shape) != len(strides):
        raise Corrupt("pickle: a tensor without a storage, or with strides of another rank")
    reach = span(shape, strides)
    if not reach:
        offset = 0  # an empty view may lie behind the end of its storage
    numel = (
        storage.numel
        if dtype == storage.dtype
        else storage.numel * ITEMSIZE[storage.dtype] // ITEMSIZE[dtype]
    )
    if offset + reach > numel:
        raise Corrupt(
            f"pickle: a tensor of shape {shape} reaches behind its storage of {numel} elements"
        )
    return StoredTensor(dtype, storage, offset, shape, strides)


def _rebuild_v2(_: Name, args: tuple[Any, ...]) -> StoredTensor:
    """Rebuild a tensor; ignore ``requires_grad``, hooks and metadata."""
    storage, offset, shape, strides, *more = args
    if not 2 <= len(more) <= 3 or type(more[0]) is not bool:
        raise Corrupt("pickle: a tensor that torch does not rebuild")
    return _stored(
        storage.dtype if isinstance(storage, Storage) else "", storage, offset, shape, strides
    )


def _rebuild_v3(_: Name, args: tuple[Any, ...]) -> StoredTensor:
    storage, offset, shape, strides = args[:4]
    return _stored(dtype_of(args[6]), storage, offset, shape, strides)


def _rebuild_from_type(_: Name, args: tuple[Any, ...]) -> Any:
    """Return a tensor of a subclass: ``_rebuild_from_type_v2(func, type, args, state)``."""
    func, _kind, inner, _state = args
    if not isinstance(func, Name) or func not in TENSORS:
        raise Corrupt("pickle: a tensor that is rebuilt by something else")
    return TENSORS[func](func, inner)


def _first(_: Name, args: tuple[Any, ...]) -> Any:
    return args[0]


def _size(_: Name, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # torch itself has at most 64
    if type(args[0]) not in (tuple, list) or len(args[0]) > 2 * MOST_AXES:
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

_REFUSED: Mapping[str, tuple[Name, ...]] = {
    "torch's quantized tensors": (Name("torch._utils", "_rebuild_qtensor"),),
    "bitsandbytes": (
        Name("bitsandbytes.nn.modules", "Params4bit"),
        Name("bitsandbytes.nn.modules", "Int8Params"),
        Name("bitsandbytes.functional", "QuantState"),
    ),
    "torchao": (
        Name("torchao.dtypes.affine_quantized_tensor", "AffineQuantizedTensor"),
        Name(
            "torchao.quantization.linear_activation_quantized_tensor",
            "LinearActivationQuantizedTensor",
        ),
        Name("torchao.dtypes.nf4tensor", "NF4Tensor"),
        Name("torchao.float8.float8_tensor", "Float8Tensor"),
        Name("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"),
        Name("torchao.quantization.quantize_.workflows.float8.float8_tensor", "Float8Tensor"),
        Name("torchao.quantization.quantize_.workflows.int4.int4_tensor", "Int4Tensor"),
    ),
    "sparse tensors": (
        Name("torch._utils", "_rebuild_sparse_tensor"),
        Name("torch._utils", "_rebuild_sparse_csr_tensor"),
    ),
    "nested tensors": (Name("torch._utils", "_rebuild_nested_tensor"),),
    "tensors on the meta device": (Name("torch._utils", "_rebuild_meta_tensor_no_storage"),),
}
# Arguments of refused tensors: a pickle names them before it names the tensor.
_OF_REFUSED = (
    *(f"Q{kind}Storage" for kind in ("Int8", "UInt8", "Int32", "UInt4x2", "UInt2x4")),
    *(
        f"per_{what}_affine{params}"
        for what in ("tensor", "channel")
        for params in ("", "_float_qparams")
    ),
    *("per_tensor_symmetric", "per_channel_symmetric"),
)


def _refusal(kind: str) -> Build:
    def refuse(name: Name, args: tuple[Any, ...]) -> NoReturn:
        raise Unsupported(
            f"{kind} cannot be read ({name.name}, {len(args)} arguments)",
            hint=(
                "save the model dequantised, or with save_pretrained in safetensors; an adapter on"
                " top of it can be merged alone"
            ),
        )

    return refuse


REFUSED: Mapping[Name, Build] = {
    name: _refusal(kind) for kind, names in _REFUSED.items() for name in names
}
ALLOWED: Mapping[Name, Build] = {
    **TENSORS,
    Name("collections", "OrderedDict"): ordered,
    Name("torch", "Size"): _size,
    **{Name("torch", name): _uncalled for name in (*FROM_TORCH, *STORAGES)},
    **all_made(
        {
            "torch": ("Tensor", "device", *_OF_REFUSED),
            "torch.nn.parameter": ("Parameter",),
            "torch.storage": ("UntypedStorage",),
            "torch.serialization": ("_get_layout",),
        }
    ),
    **REFUSED,
}


def dtype_of(name: Any) -> str:
    """Return safetensors' name for a ``torch.<dtype>`` in a pickle."""
    if not isinstance(name, Name) or name.module != "torch":
        raise Corrupt("pickle: something else where an element type is due")
    return from_torch(name.name)


class Storages:
    """The storages that one pickle names: each has one type and size, however often named."""

    def __init__(self) -> None:
        self.found: dict[str, Storage] = {}

    def add(self, value: Any) -> Storage:
        """Read a persistent id ``("storage", type, key, location, numel)``, of bytes if untyped."""
        if (
            not isinstance(value, tuple)
            or len(value) != 5
            or value[0] != "storage"
            or not isinstance(value[1], Name)
        ):
            raise Corrupt("pickle: a persistent id that is no storage")
        _, kind, key, _, numel = value
        if (
            not isinstance(key, str)
            or len(key) > _LONGEST_KEY
            or type(numel) is not int
            or not 0 <= numel < _MOST_ELEMENTS
        ):
            raise Corrupt("pickle: a storage without key and size")
        storage = Storage(STORAGES.get(kind.name, "U8"), key, numel)
        if self.found.setdefault(key, storage) != storage:
            raise Corrupt(f"pickle: storage {key} has two types or sizes")
        return storage


def parsed(data: bytes, allowed: Mapping[Name, Build] = ALLOWED) -> tuple[Any, int]:
    """Return the value of the pickle at the start of ``data``, and the bytes that it takes."""
    return loads(data, allowed, Storages().add)


def is_contiguous(tensor: StoredTensor) -> bool:
    """Whether a tensor is row-major; strides of axes of one element do not matter."""
    return _is_row_major(tensor.shape, tensor.strides)


@lru_cache(maxsize=1024)
def _is_row_major(shape: Shape, strides: Shape) -> bool:
    plain = row_major(shape)
    return all(n <= 1 or s == p for n, s, p in zip(shape, strides, plain, strict=True)) or not prod(
        shape
    )
