"""torch's files loaded by torch itself, ``weights_only``, and what they hold besides tensors made objects that can do nothing.

Used in the loading child only; ``torch`` is an argument, so that this module can be imported without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_MOST_NAMES = 300
_LEGACY = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch.serialization.MAGIC_NUMBER, as a pickle has it
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")  # torch/_weights_only_unpickler.py, torch 2.13
_BLOCKED = re.compile(
    r"Trying to load unsupported GLOBAL \S+|Can only (?:create new object|build) .*|Trying to call reduce for unrecognized function .*"
)
_NESTED = {  # what it asks to import: enough of it is known without
    "must be imported to load DTensors": (
        *(f"torch.distributed.tensor.{name}" for name in ("DTensor", "placement_types.Partial", "placement_types.Replicate")),
        *(f"torch.distributed.tensor.{name}" for name in ("placement_types.Shard", "_dtensor_spec.DTensorSpec")),
        *("torch.distributed.tensor._dtensor_spec.TensorMeta", "torch.distributed.device_mesh.DeviceMesh"),
    ),
}
_CODES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
}


_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_COMPRESSED = {  # layouts that have no storage of their own, and the methods that give what they are made of
    "torch.sparse_csr": _ROWS,
    "torch.sparse_bsr": _ROWS,
    "torch.sparse_csc": _COLUMNS,
    "torch.sparse_bsc": _COLUMNS,
}


class Refused(Exception):
    """A file that holds what torch does not load with ``weights_only``, whoever asks."""


class Inert:
    """Whatever it was: what it was called with, and its state."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.inner: list[Any] = list(args)

    def __new__(cls, *args: Any, **_: Any) -> Inert:  # noqa: PYI034 - `Self` is younger than Python 3.10
        """As pickle's NEWOBJ calls it, without ``__init__``."""
        made = super().__new__(cls)
        made.inner = list(args)
        return made

    def __setstate__(self, state: Any) -> None:
        self.inner.append(state)


def _kind(name: str, torch: Any) -> type[Any]:
    """A class of its own for each name, since the unpickler tells them apart by what they are."""
    if not name.endswith(".DTensor"):
        return type("Inert", (Inert,), {})

    def dispatch(*_: Any) -> Any:
        raise Refused("a distributed tensor that is worked with while it is loaded")

    def setstate(self: Any, state: Any) -> None:
        self.inner = [state]

    return type("InertTensor", (torch.Tensor,), {"__torch_dispatch__": staticmethod(dispatch), "__setstate__": setstate})


def load(torch: Any, file: Any) -> Any:
    """What is in a path or an open file.  Raises `Refused`, and whatever torch raises."""
    from torch.serialization import safe_globals  # noqa: PLC0415

    known: dict[str, type[Any]] = {}
    while True:
        with safe_globals([(kind, name) for name, kind in known.items()]):
            loaded, names = _tried(torch, file)
        if not names:
            return loaded
        if len(known) > _MOST_NAMES or not names - known.keys():
            raise Refused(f"it holds more than data: {min(names)}")
        known |= {name: _kind(name, torch) for name in names}


def _tried(torch: Any, file: Any) -> tuple[Any, frozenset[str]]:
    """What was loaded, or names of what torch does not know as safe."""
    try:
        return _loaded(torch, file), frozenset()
    except Exception as e:
        told = str(e)
        if blocked := _BLOCKED.search(told):
            raise Refused(f"torch does not load it with weights_only: {blocked[0]}"[:300]) from e
        if not (names := _wanted(told)):
            raise
        return None, frozenset(names)


def _loaded(torch: Any, file: Any) -> Any:
    if not isinstance(file, str):
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    with open(file, "rb") as opened:  # noqa: PTH123 - a descriptor's path
        head = opened.read(64)
    is_archive = head.startswith(b"PK\x03\x04")
    if not is_archive and _LEGACY not in head:
        raise Refused("it begins as no file of torch's does")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)


def _wanted(told: str) -> tuple[str, ...]:
    if unknown := _UNKNOWN.search(told):
        return unknown[1], f"builtins.{unknown[1]}"
    return next((names for sign, names in _NESTED.items() if sign in told), ())


def storages(value: Any, torch: Any) -> Iterator[tuple[str, str, Bytes]]:
    """Name, dtype and bytes of everything that tensors in ``value`` lie in, each storage once, under the first tensor's name."""
    seen: set[object] = set()
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        name, one = todo.pop()
        if isinstance(one, torch.Tensor) and "inner" not in vars(one):
            for part in _parts(one):
                storage = part.untyped_storage()
                if (key := (storage.data_ptr(), storage.nbytes())) not in seen:
                    seen.add(key)
                    yield name, _CODES.get(str(part.dtype).removeprefix("torch."), ""), _bytes(storage, part.element_size(), torch)
        elif id(one) not in seen and (inner := _inside(one)):
            seen.add(id(one))
            todo += [(f"{name}{name and '.'}{key}", item) for key, item in inner][::-1]


def _inside(one: Any) -> list[tuple[str, Any]]:
    if isinstance(one, dict):
        return [(str(key)[:200], item) for key, item in one.items()]
    if isinstance(one, (list, tuple, set)):
        return [(str(i), item) for i, item in enumerate(one)]
    return [(str(i), item) for i, item in enumerate(getattr(one, "inner", ()))]


def _parts(tensor: Any) -> list[Any]:
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]  # noqa: SLF001 - torch has no other name for what is not coalesced
    if names := _COMPRESSED.get(str(tensor.layout)):
        return [getattr(tensor, name)() for name in names]
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [] if tensor.is_meta else [tensor]


def _bytes(storage: Any, size: int, torch: Any) -> Bytes:
    """Whole elements of it."""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    found: Bytes = flat.numpy()
    return found[: found.size // size * size]
