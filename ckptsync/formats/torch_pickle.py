"""Read tensors in pickles of ``torch.save`` as `StoredTensor`, everything else as plain values.

`ALLOWED` is the table of names for the pickle machine: it has a constructor for each function of
torch that makes a tensor. A tensor that is no plain view of a storage becomes a `RefusedTensor`,
which is an error only if its values are needed: a quantised one means nothing without the kernels
that wrote it.

The names were observed in files of torch 2.13 and read in ``torch/_utils.py``, ``torch/storage.py``
and ``torch/_tensor.py``, 2.13 and 2.14.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import (
    FROM_TORCH,
    ITEMSIZE,
    MOST_AXES,
    STORAGES,
    UNNAMED,
    UNNAMED_STORAGES,
    from_torch,
    is_castable,
)
from ckptsync.formats.pickles import (
    Build,
    Name,
    PickledObject,
    Unknown,
    all_made,
    brief,
    loads,
    ordered,
)
from ckptsync.tensors import Shape, is_row_major

# letters of a storage's key, which is a number; keys are compared at each mention
_LONGEST_KEY = 100
_MOST_ELEMENTS = 1 << 60
_MOST_ATTRIBUTES = 50  # of one tensor; a thousand tensors may share one dictionary


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of elements that tensors are views of: record ``data/<key>``, ``numel`` elements.

    ``dtype`` is torch's name if safetensors has none.
    """

    dtype: str
    key: str
    numel: int

    @property
    def item(self) -> int:
        """The bytes of one element."""
        return ITEMSIZE.get(self.dtype) or UNNAMED[self.dtype]

    @property
    def size(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.item


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
        """The number of elements in the tensor, not in its storage."""
        return prod(self.shape)


@lru_cache(maxsize=1024)
def span(shape: Shape, strides: Shape) -> int:
    """Return how many elements of its storage a view spans, both ends included; 0 if empty."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if prod(shape) else 0


def shape_of(values: Any) -> Shape:
    """Return ``values``, a tuple of at most `MOST_AXES` ints of 0 or more; raise Corrupt if not."""
    if type(values) is tuple and len(values) <= MOST_AXES:
        for n in values:
            if type(n) is not int or n < 0:
                break
        else:
            return values
    raise Corrupt("pickle: a shape, stride or offset that is not made of natural numbers")


def _stored(dtype: str, storage: Any, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    """Return the tensor with these fields, all checked here; an empty tensor's offset becomes 0.

    Raise Corrupt if a field is of a wrong type or the tensor reaches out of its storage,
    Unsupported if safetensors has no such dtype.
    """
    shape_of((offset,)), shape_of(shape), shape_of(strides)
    if type(storage) is not Storage or len(shape) != len(strides):
        raise Corrupt("pickle: a tensor without a storage, or with strides of another rank")
    if dtype not in ITEMSIZE:
        from_torch(dtype)
    reach = span(shape, strides)
    if not reach:
        offset = 0  # an empty view may lie behind the end of its storage
    numel = storage.numel if dtype == storage.dtype else storage.size // ITEMSIZE[dtype]
    if offset + reach > numel:
        raise Corrupt(
            f"pickle: a tensor of shape {shape} reaches behind its storage of {numel} elements"
        )
    return StoredTensor(dtype, storage, offset, shape, strides)


@dataclass(frozen=True, slots=True, eq=False)
class RefusedTensor:
    """A call that makes a tensor whose values cannot be read here.

    It is an error if the tensor is a weight, and none if nobody needs its values.
    """

    name: Name
    args: tuple[Any, ...]

    def error(self) -> Unsupported:
        """Return why it is refused, with a hint: it runs the rebuild function again.

        Raise Corrupt if that succeeds, since the arguments changed, or fails with Corrupt.
        """
        try:
            _REBUILDERS[self.name](self.name, self.args)
        except Unsupported as e:
            return Unsupported(str(e), hint=e.hint)
        raise Corrupt("pickle: the arguments of a tensor change after it is made")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A tensor of a wrapper class ``kind``: its global dtype and shape, and its state."""

    kind: Name
    dtype: str
    shape: Shape
    state: Any

    def error(self) -> Unsupported:
        """Return the error for a tensor whose class is not known."""
        return _of_class(self.kind)


def plain_tensor(value: Any) -> StoredTensor | None:
    """Return ``value`` if it is a plain tensor, None if it is no tensor.

    Raise Unsupported for a `RefusedTensor` or `Wrapped`; Corrupt as `RefusedTensor.error`.
    """
    if isinstance(value, (RefusedTensor, Wrapped)):
        raise value.error()
    return value if isinstance(value, StoredTensor) else None


ANY_TENSOR = (StoredTensor, RefusedTensor, Wrapped)  # what a pickle's tensors become
_HINT = (
    "save the model dequantised, or with save_pretrained in safetensors; an adapter on top of it"
    " can be merged alone"
)
# classes of torch itself whose objects are the tensors that they are made of
_PLAIN = frozenset(
    {
        Name("torch", "Tensor"),
        *(Name("torch.nn.parameter", kind) for kind in ("Parameter", "Buffer")),
    }
)
_PLAIN_VALUES = frozenset({bool, int, float, str, type(None), tuple, list, dict})
# Libraries whose classes may stand in any pickle: their tensors are refused by name, unless they
# only wrap a plain one.
_LIBRARIES = re.compile(
    r"(torchao|bitsandbytes|transformer_engine|optimum|quanto|hqq|compressed_tensors|fbgemm_gpu"
    r"|modelopt|torch\.(_dynamo|ao|masked|nested|sparse|_subclasses))(\..*)?",
    re.DOTALL,
)
# Wrappers of torchao 0.5 to 0.18 around a weight that is trained in a plain dtype and quantised as
# it is used, and the attribute that holds it: ``torchao/float8/fsdp_utils.py``,
# ``torchao/prototype/{quantized_training,moe_training}``.
_WRAPPERS = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "WeightWithDelayedFloat8CastTensor": "_tensor",
    "WeightWithStaticFloat8CastTensor": "_tensor",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
    "ScaledGroupedMMTensor": "_data",
    "TrainingWeightWrapperBaseTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
}


def is_of_library(name: Name) -> bool:
    """Return whether a name belongs to a library whose tensors are refused with its name."""
    return _LIBRARIES.fullmatch(name.module) is not None


def _of_class(kind: Name) -> Unsupported:
    """Return the error for a tensor of a class that may change the meaning of its elements."""
    library = kind.module.partition(".")[0]
    return Unsupported(
        f"a {kind}, whose values only {library} can read",
        hint="save plain, dense tensors" if library == "torch" else _HINT,
    )


def _rebuild_v2(_: Name, args: tuple[Any, ...]) -> StoredTensor:
    """Return the tensor; its ``requires_grad`` and hooks are ignored.

    Raise Corrupt for wrong arguments and as `_stored`, Unsupported as that and `_check_bits`.
    """
    storage, offset, shape, strides, *optional_args = args
    if not 2 <= len(optional_args) <= 3 or type(optional_args[0]) is not bool:
        raise Corrupt("pickle: a tensor that torch does not rebuild")
    _check_bits(optional_args[2:])
    return _stored(
        storage.dtype if isinstance(storage, Storage) else "", storage, offset, shape, strides
    )


def _rebuild_v1(_: Name, args: tuple[Any, ...]) -> StoredTensor:
    """Return the tensor of torch before 0.4; raises as `_stored`."""
    storage, offset, shape, strides = args
    dtype = storage.dtype if isinstance(storage, Storage) else ""
    return _stored(dtype, storage, offset, shape, strides)


def _rebuild_v3(_: Name, args: tuple[Any, ...]) -> StoredTensor:
    """Return the tensor, whose dtype need not be that of its storage. Raises as `_rebuild_v2`."""
    storage, offset, shape, strides, _grad, _hooks, dtype, *metadata = args
    if len(metadata) > 1:
        raise Corrupt("pickle: a tensor that torch does not rebuild")
    _check_bits(metadata)
    return _stored(dtype_of(dtype), storage, offset, shape, strides)


def _check_bits(metadata: Sequence[Any]) -> None:
    """Raise Unsupported if an entry of ``metadata`` is not False: the values are not as stored.

    The entries are those of `torch._utils.get_tensor_metadata`, the conjugate and the negative bit.
    Raise Corrupt if metadata are not None or a dictionary of at most `_MOST_ATTRIBUTES` entries.
    """
    for bits in metadata:
        if bits is not None and (type(bits) is not dict or len(bits) > _MOST_ATTRIBUTES):
            raise Corrupt("pickle: a tensor whose metadata is no small dictionary")
        flag = next((key for key, value in (bits or {}).items() if value is not False), None)
        if flag is not None:
            raise Unsupported(
                f"a tensor with torch's {brief(flag)} bit: its values are not those that are"
                " stored",
                hint="save tensor.resolve_conj().resolve_neg()",
            )


def _rebuild_parameter(_: Name, args: tuple[Any, ...]) -> Any:
    """Return the parameter's data, one of `ANY_TENSOR`, without its attributes.

    Raise Unsupported if an attribute is an object of `_LIBRARIES`, or is a tensor while the data
    are no float: it is quantised. Raise Corrupt if there is no tensor, or as `_attributes`.
    """
    data, _grad, _hooks, *state = args
    if not isinstance(data, ANY_TENSOR) or len(state) > 1:
        raise Corrupt("pickle: a parameter without a tensor")
    # bitsandbytes' parameters are pickled as torch's, and have what they need as attributes
    is_float = isinstance(data, StoredTensor) and is_castable(data.dtype)
    for attributes in _attributes(*state):
        if _PLAIN_VALUES.issuperset(map(type, attributes.values())):
            continue
        for key, value in attributes.items():
            if isinstance(value, Unknown) and is_of_library(value.name):
                raise _of_class(value.name)
            if isinstance(value, StoredTensor) and not is_float:
                raise Unsupported(
                    f"a parameter that is no float and has a tensor as its {brief(key)}: it is"
                    " quantised",
                    hint=_HINT,
                )
    return data


def _attributes(state: Any = None) -> list[dict[Any, Any]]:
    """Return the dictionaries among a tensor's state: of its ``__dict__``, and of its slots.

    ``state``: a dictionary or None, or a pair of those; anything else gives []. Raise Corrupt if
    one has more than `_MOST_ATTRIBUTES` entries.
    """
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    attributes = [part for part in parts if type(part) is dict]
    if any(len(part) > _MOST_ATTRIBUTES for part in attributes):
        raise Corrupt("pickle: a tensor of too many attributes")
    return attributes


def _rebuild_from_type(_: Name, args: tuple[Any, ...]) -> Any:
    """Return a tensor of a subclass: ``_rebuild_from_type_v2(func, type, args, state)``.

    A wrapper class gives what `_unwrapped` returns; a class of `_PLAIN` what its function in
    `TENSORS` returns, which may be a `RefusedTensor`. Raise Unsupported for any other class,
    Corrupt for wrong arguments.
    """
    func, kind, inner, state = args
    if func == _WRAPPER:
        return _unwrapped(kind, inner, state)
    if not isinstance(func, Name) or func not in TENSORS:
        raise Corrupt("pickle: a tensor that is rebuilt by something else")
    if not isinstance(kind, Name):
        raise Corrupt("pickle: a tensor of something that is no class")
    if kind not in _PLAIN:
        raise _of_class(kind)
    return TENSORS[func](func, inner)


def _unwrapped(kind: Any, args: Any, state: Any) -> Any:
    """Return the plain tensor that a wrapper of `_WRAPPERS` holds, if dtype and shape are its own.

    Otherwise return a `Wrapped`. ``args`` are those of ``_rebuild_wrapper_subclass``: class, dtype,
    shape, strides, offset, layout, device and ``requires_grad``. Raise Unsupported if it is not
    strided or safetensors has no such dtype, Corrupt for wrong arguments.
    """
    if not isinstance(kind, Name) or not isinstance(args, tuple) or len(args) < 6:
        raise Corrupt("pickle: a wrapped tensor without class, dtype and shape")
    layout = args[5]
    if not isinstance(layout, PickledObject) or layout.args != ("torch.strided",):
        raise Unsupported(f"a {kind} that is not strided", hint="only dense tensors are read")
    size = args[2]
    dtype, shape = dtype_of(args[1]), shape_of(tuple(size) if type(size) is list else size)
    if kind.name in _WRAPPERS and kind.module.startswith("torchao."):
        inner = next(
            (attributes.get(_WRAPPERS[kind.name]) for attributes in _attributes(state)), None
        )
        if isinstance(inner, StoredTensor) and (inner.dtype, inner.shape) == (dtype, shape):
            return inner
    return Wrapped(kind, dtype, shape, state)


def _rebuild_on_device(_: Name, args: tuple[Any, ...]) -> Any:
    """Return the CPU's copy of a tensor of another device.

    Raise Unsupported if the copy has another dtype, Corrupt if it is no plain tensor.
    """
    data, dtype, _device, _grad = args
    if not isinstance(data, StoredTensor):
        raise Corrupt("pickle: a tensor of another device without a plain copy")
    if dtype_of(dtype) != data.dtype:
        raise Unsupported(f"a tensor of {data.dtype} that torch casts to {dtype} as it loads it")
    return data


Rebuild = Callable[[Name, tuple[Any, ...]], Any]


def _refusal(kind: str, hint: str = _HINT) -> Rebuild:
    """Return a constructor that raises Unsupported: the tensor is a ``kind``."""

    def refuse(name: Name, _: tuple[Any, ...]) -> NoReturn:
        """Raise Unsupported, with the name."""
        raise Unsupported(f"{kind} ({name.name})", hint=hint)

    return refuse


def _deferred(build: Rebuild) -> Rebuild:
    """Return a constructor that returns a `RefusedTensor` if ``build`` raises Unsupported."""

    def built(name: Name, args: tuple[Any, ...]) -> Any:
        """Return what ``build`` returns, or a `RefusedTensor`."""
        try:
            return build(name, args)
        except Unsupported:
            return RefusedTensor(name, args)

    return built


def _size(_: Name, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a ``torch.Size`` as a tuple; raise Corrupt if it has over 2 * `MOST_AXES` sizes."""
    # torch itself has at most 64
    if type(args[0]) not in (tuple, list) or len(args[0]) > 2 * MOST_AXES:
        raise Corrupt("pickle: a torch.Size that no tensor has")
    return tuple(args[0])


def _uncalled(name: Name, _: tuple[Any, ...]) -> Any:
    """Raise Corrupt: the name is a dtype or a storage, and no function."""
    raise Corrupt(f"pickle: torch.{name.name} is called, which is no function")


_UTILS = "torch._utils"
_WRAPPER = Name(_UTILS, "_rebuild_wrapper_subclass")
_DENSE = "save the tensor dense: tensor.to_dense()"
_NUMPY = _refusal(
    "a tensor whose elements are a numpy array", "move the model to the CPU, and save"
)
_REBUILDERS: Mapping[Name, Rebuild] = {
    Name(_UTILS, "_rebuild_tensor"): _rebuild_v1,
    Name(_UTILS, "_rebuild_tensor_v2"): _rebuild_v2,
    Name(_UTILS, "_rebuild_tensor_v3"): _rebuild_v3,
    Name(_UTILS, "_rebuild_parameter"): _rebuild_parameter,
    Name(_UTILS, "_rebuild_parameter_with_state"): _rebuild_parameter,
    Name("torch._tensor", "_rebuild_from_type"): _rebuild_from_type,
    Name("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    _WRAPPER: _refusal("a wrapper class's tensor without its values"),
    Name(_UTILS, "_rebuild_device_tensor_from_cpu_tensor"): _rebuild_on_device,
    Name(_UTILS, "_rebuild_device_tensor_from_numpy"): _NUMPY,
    Name(_UTILS, "_rebuild_xla_tensor"): _NUMPY,
    Name(_UTILS, "_rebuild_qtensor"): _refusal("one of torch's quantized tensors"),
    Name(_UTILS, "_rebuild_sparse_tensor"): _refusal("a sparse tensor", _DENSE),
    Name(_UTILS, "_rebuild_sparse_csr_tensor"): _refusal("a sparse tensor", _DENSE),
    Name(_UTILS, "_rebuild_nested_tensor"): _refusal("a nested tensor", "save its components"),
    Name("torch.nested._internal.nested_tensor", "_rebuild_njt"): _refusal(
        "a nested tensor", "save its components"
    ),
    Name(_UTILS, "_rebuild_meta_tensor_no_storage"): _refusal(
        "a tensor on the meta device, which has no values",
        "save the model after its weights are on a real device",
    ),
}
TENSORS: Mapping[Name, Rebuild] = {name: _deferred(build) for name, build in _REBUILDERS.items()}
"""The functions of torch since 1.0 that a pickle calls to make a tensor."""

# Arguments of refused tensors: a pickle names them before it names the tensor.
_OF_REFUSED = (
    *(
        f"per_{what}_affine{params}"
        for what in ("tensor", "channel")
        for params in ("", "_float_qparams")
    ),
    *("per_tensor_symmetric", "per_channel_symmetric"),
)


class Names(dict[Name, Build]):
    """A table of known names that has `Unknown` as the constructor of classes of some libraries."""

    def get(self, name: Name, _: object = None) -> Build | None:  # type: ignore[override]
        """Return the constructor, `Unknown` for other names of `_LIBRARIES`, None if refused."""
        return super().get(name) or (Unknown if is_of_library(name) else None)


ALLOWED: Mapping[Name, Build] = Names(
    {
        **TENSORS,
        Name("collections", "OrderedDict"): ordered,
        Name("torch", "Size"): _size,
        **{
            Name("torch", name): _uncalled
            for name in (*FROM_TORCH, *STORAGES, *UNNAMED, *UNNAMED_STORAGES)
        },
        **all_made(
            {
                "torch": ("Tensor", "device", *_OF_REFUSED),
                "torch.nn.parameter": ("Parameter", "Buffer"),
                "torch.storage": ("UntypedStorage",),
                "torch.serialization": ("_get_layout",),
                # a module's extra state may be a stream of bytes, which protocol 2 writes as text
                "_io": ("BytesIO",),
                "_codecs": ("encode",),
                # allowed by torch.load(weights_only=True), too: attributes may be of these types
                "builtins": ("set", "bytearray", "complex"),
                "__builtin__": ("set", "bytearray", "complex"),
                "collections": ("Counter",),
            }
        ),
    }
)


def dtype_of(name: Any) -> str:
    """Return safetensors' name for a ``torch.<dtype>`` in a pickle.

    Raise Corrupt if it is no dtype, Unsupported if safetensors has no such dtype.
    """
    if not isinstance(name, Name) or name.module != "torch":
        raise Corrupt("pickle: something else where an element type is due")
    return from_torch(name.name)


def any_dtype_of(name: Any) -> str:
    """Return safetensors' name for a ``torch.<dtype>``, or torch's own name where it has none.

    Raise Corrupt if it is no ``torch`` name, Unsupported if that is no dtype that is known.
    """
    is_unnamed = isinstance(name, Name) and name.module == "torch" and name.name in UNNAMED
    return name.name if is_unnamed else dtype_of(name)


class Storages:
    """The storages that one pickle names, by key; each has one type and size."""

    def __init__(self) -> None:
        self.by_key: dict[str, Storage] = {}

    def add(self, value: Any) -> Storage:
        """Return the storage that a persistent id names, and record it in ``by_key``.

        The id is ``("storage", type, key, location, numel)``; an unknown type counts bytes. Raise
        Corrupt if it is no such id, or if the key is recorded with another type or size.
        """
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
        dtype = STORAGES.get(kind.name) or UNNAMED_STORAGES.get(kind.name, "U8")
        storage = Storage(dtype, key, numel)
        if self.by_key.setdefault(key, storage) != storage:
            raise Corrupt(f"pickle: storage {key} has two types or sizes")
        return storage


def parsed(data: bytes, allowed: Mapping[Name, Build] = ALLOWED) -> tuple[Any, int]:
    """Return the value of the pickle at the start of ``data``, and the bytes that it takes.

    Persistent ids must be those of `Storages.add`. Raises as `loads`.
    """
    return loads(data, allowed, Storages().add)


def is_contiguous(tensor: StoredTensor) -> bool:
    """Return whether a tensor is row-major or empty; strides of axes of length 1 do not matter."""
    return _is_row_major(tensor.shape, tensor.strides)


@lru_cache(maxsize=1024)
def _is_row_major(shape: Shape, strides: Shape) -> bool:
    """Return whether strides are those of a row-major tensor, or the tensor is empty."""
    return is_row_major(shape, strides) or not prod(shape)
