"""Load every tensor of a file in a child process: ``python -m ckptsync.verifier.load_child``.

A hostile file may exploit a hole in torch, so the process that loads is sandboxed, and imports
nothing of ckptsync but `sandbox` and `child`. It answers one request at a time. Standard input is a
socket. The child sends ``ready``, its libraries, a tab, and what of the sandbox it could not have.
A request is a line of JSON: ``kind`` (safetensors, torch, items), ``items`` (start, size, name),
and ``wall``, the seconds after which SIGALRM ends the process, also if the parent is dead. A byte
before the line carries the open file. The answer has ``tensors``, ``read``, ``nonfinite`` (name →
count, the first `MOST`) and ``more``; or ``fault``; or ``refused`` if a file holds more than data.

torch's own files are loaded with ``weights_only=True`` and never otherwise: what is no tensor
becomes an `Inert` object and is searched for tensors. ``torch`` is an argument everywhere, so that
this module can be imported without it.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptsync.child import die_with_parent
from ckptsync.verifier import sandbox

MOST = 1000
_CHUNK = 4 << 20
_CALLBACKS, _SCORE = "callbacks.", 8  # bytes: Lightning's best value so far starts infinite

Bytes = npt.NDArray[np.uint8]
NamedTensor = tuple[str, str, Bytes]
"""A tensor's name and dtype, and some of its bytes."""

# dtype → unsigned integer of its width, mask, and what is left of a value that is not finite.
# numpy has no BF16 and no fp8, and bits cost no conversion.  IEEE types and BF16: all exponent bits
# are set.  The OCP fp8 types: E5M2 as IEEE; E4M3 has one NaN for each sign and no infinity; E8M0
# has one NaN.  The FNUZ types use what would be minus zero.
_NONFINITE: dict[str, tuple[Any, int, int]] = {
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F32": (np.uint32, 0x7F800000, 0x7F800000),
    "C64": (np.uint32, 0x7F800000, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000, 0x7FF0000000000000),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
}

_MOST_NAMES = 300
# torch.serialization.MAGIC_NUMBER, as a pickle has it.
_LEGACY = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
# Errors of torch/_weights_only_unpickler.py, torch 2.13.
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
_BLOCKED = re.compile(
    r"Trying to load unsupported GLOBAL \S+|Can only (?:create new object|build) .*"
    r"|Trying to call reduce for unrecognized function .*"
)
_DTENSOR = "must be imported to load DTensors"
_DTENSOR_NAMES = (
    *("torch.distributed.tensor.DTensor", "torch.distributed.tensor.placement_types.Partial"),
    "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Shard",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.device_mesh.DeviceMesh",
)
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
_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_COMPRESSED = {  # layouts without a storage of their own, and the methods for what they are made of
    "torch.sparse_csr": _ROWS,
    "torch.sparse_bsr": _ROWS,
    "torch.sparse_csc": _COLUMNS,
    "torch.sparse_bsc": _COLUMNS,
}


def main() -> int:
    """Enter the sandbox for good, then answer requests until the parent closes the socket.

    Return the exit status: 0, or `MISSING` if a library is not installed. An error in a request is
    its answer (``refused`` or ``fault``). A request that takes longer than its ``wall`` seconds
    ends the process by SIGALRM. What libraries print goes to stderr.
    """
    die_with_parent()
    os.dup2(2, 1)  # what libraries print is no answer
    lacks = sandbox.enter()
    try:
        import safetensors  # noqa: PLC0415 - their absence is an answer
        import torch  # noqa: PLC0415
    except ImportError as e:
        sys.stderr.write(f"level load: {e.name} is not installed here\n")
        return sandbox.MISSING
    torch.set_num_threads(1)
    libraries = f"safetensors {safetensors.__version__}, torch {torch.__version__}"
    with socket.socket(fileno=0) as parent:
        lacks = "; ".join(dict.fromkeys(filter(None, (lacks, sandbox.close()))))
        parent.sendall(f"ready {libraries}\t{lacks}\n".encode())
        while True:
            line, fds, _, _ = socket.recv_fds(parent, 1 << 16, 1)
            line = line[len(fds) :]
            while not line.endswith(b"\n"):
                if not (more_data := parent.recv(1 << 16)):
                    return 0  # the parent is gone
                line += more_data
            request = json.loads(line)
            signal.alarm(request["wall"])
            try:
                answer = load(f"/dev/fd/{fds[0]}", request, safetensors, torch)
            except Refused as e:
                answer = {"refused": str(e)[:500]}
            except Exception as e:  # noqa: BLE001 - whatever libraries raise is the answer
                answer = {"fault": f"{type(e).__name__}: {e}"[:500]}
            signal.alarm(0)
            os.close(fds[0])
            parent.sendall(json.dumps(answer).encode() + b"\n")


def load(path: str, request: dict[str, Any], safetensors: Any, torch: Any) -> dict[str, Any]:
    """Load the file at ``path`` as a request's ``kind`` says; return the answer of `count`.

    Raise Refused, and whatever the libraries raise.
    """
    if request["kind"] == "safetensors":
        with safetensors.safe_open(path, "pt") as file:
            return count(_tensors(file, torch))
    if request["kind"] == "torch":
        return count(storages(load_inert(torch, path), torch))
    return count(_items(path, request["items"], torch))


def _tensors(file: Any, torch: Any) -> Iterator[NamedTensor]:
    """Yield every tensor of an open safetensors file, mapped and not copied."""
    for name in file.keys():  # noqa: SIM118 - it is no dictionary
        tensor = file.get_tensor(name)
        yield name, file.get_slice(name).get_dtype(), tensor.reshape(-1).view(torch.uint8).numpy()


def _items(path: str, items: list[tuple[int, int, str]], torch: Any) -> Iterator[NamedTensor]:
    """Yield the tensors in a shard's archives, each of which is read into memory.

    Raise EOFError if the file ends too early, Refused, and whatever torch raises.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - it is a descriptor's path
        for start, size, name in items:
            file.seek(start)
            data = file.read(size)
            if len(data) < size:
                raise EOFError(f"{name}: ends at byte {start + len(data)}, {start + size} expected")
            for inner, dtype, piece in storages(load_inert(torch, io.BytesIO(data)), torch):
                yield f"{name}{inner and '.'}{inner}", dtype, piece


def count(tensors_found: Iterator[NamedTensor]) -> dict[str, Any]:
    """Return the answer: how many tensors and bytes there are, and which values are not finite.

    Storages of one tensor follow each other, and count as one tensor. ``nonfinite`` has the first
    `MOST` names, ``more`` counts the others; Lightning's scores of up to `_SCORE` bytes are left
    out.
    """
    nonfinite_counts: dict[str, int] = {}
    size_read = tensors = 0
    last_name: str | None = None
    for name, dtype, piece in tensors_found:
        bad_values = nonfinite(dtype, piece)
        size_read, tensors, last_name = size_read + piece.size, tensors + (name != last_name), name
        if bad_values and not (name.startswith(_CALLBACKS) and piece.size <= _SCORE):
            nonfinite_counts[name] = nonfinite_counts.get(name, 0) + bad_values
    first = dict(list(nonfinite_counts.items())[:MOST])
    return {
        "tensors": tensors,
        "read": size_read,
        "nonfinite": first,
        "more": max(0, len(nonfinite_counts) - MOST),
    }


def nonfinite(dtype: str, data: Bytes) -> int:
    """Return how many values are NaN or infinite; each part of a complex number counts.

    0 for a dtype that is not in `_NONFINITE`, but its bytes are read, too: a mapped file must be
    there.
    """
    kind, mask, pattern = _NONFINITE.get(dtype, (np.uint8, 0, 1))
    count_found = 0
    for start in range(0, data.size, _CHUNK):
        values = data[start : start + _CHUNK].view(kind)
        count_found += int(np.count_nonzero((values & kind(mask)) == kind(pattern)))
    return count_found


class Refused(Exception):
    """Raised if a file holds what torch does not load with ``weights_only``; that is no damage."""


class Inert:
    """An object of any class: what it was called with, and its state."""

    def __init__(self, *args: Any, **_: Any) -> None:
        """Keep the positional arguments; keyword arguments are dropped."""
        self.inner: list[Any] = list(args)

    def __new__(cls, *args: Any, **_: Any) -> Inert:  # noqa: PYI034
        """Return an object with its arguments: pickle's NEWOBJ does not call ``__init__``."""
        instance = super().__new__(cls)
        instance.inner = list(args)
        return instance

    def __setstate__(self, state: Any) -> None:
        """Keep the state beside the arguments, so that tensors in it are found."""
        self.inner.append(state)


def load_inert(torch: Any, file: Any) -> Any:
    """Return the object in a path or an open file, with `Inert` objects for unknown classes.

    It is loaded again for each unknown class. Raise Refused if it needs a name that is not data, or
    more than `_MOST_NAMES` of them, and whatever torch raises.
    """
    from torch.serialization import safe_globals  # noqa: PLC0415

    classes: dict[str, type[Any]] = {}
    while True:
        try:
            with safe_globals([(kind, name) for name, kind in classes.items()]):
                return _load_safely(torch, file)
        except Exception as e:
            text = str(e)
            if blocked := _BLOCKED.search(text):
                why = f"torch does not load it with weights_only: {blocked[0]}"
                raise Refused(why[:300]) from e
            names = frozenset(_DTENSOR_NAMES if _DTENSOR in text else ())
            if unknown := _UNKNOWN.search(text):
                names = frozenset({unknown[1], f"builtins.{unknown[1]}"})
            if not names:
                raise
            if len(classes) > _MOST_NAMES or not names - classes.keys():
                raise Refused(
                    f"its pickle needs {min(names)}, which is not data (no damage)"
                ) from e
        classes |= {name: _make_class(name, torch) for name in names}


def _load_safely(torch: Any, file: Any) -> Any:
    """Load a path, or an open file from its start, with ``weights_only``; return the object.

    An archive at a path is mapped. Raise Refused if a path does not begin like a file of torch's,
    and whatever torch raises.
    """
    if not isinstance(file, str):
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    with open(file, "rb") as opened:  # noqa: PTH123 - a descriptor's path
        head = opened.read(64)
    is_archive = head.startswith(b"PK\x03\x04")
    if not is_archive and _LEGACY not in head:
        raise Refused("it does not begin like a file of torch's")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)


def _make_class(name: str, torch: Any) -> type[Any]:
    """Return a new class for a name: the unpickler tells classes apart by identity.

    A DTensor's is a subclass of Tensor whose every operation raises Refused.
    """
    if not name.endswith(".DTensor"):
        return type("Inert", (Inert,), {})

    def dispatch(*_: Any) -> Any:
        """Raise Refused."""
        raise Refused("its pickle runs an operation on a DTensor while it is loaded (no damage)")

    def setstate(self: Any, state: Any) -> None:
        """Keep the state, so that tensors in it are found."""
        self.inner = [state]

    methods = {"__torch_dispatch__": staticmethod(dispatch), "__setstate__": setstate}
    return type("InertTensor", (torch.Tensor,), methods)


def storages(value: Any, torch: Any) -> Iterator[NamedTensor]:
    """Yield name, dtype and bytes of every storage of tensors in ``value``, in order.

    Each storage is yielded once, under the first tensor's name (keys joined by dots); its
    incomplete last element is cut off. The dtype is empty if it has no values that are not finite.
    """
    visited: set[object] = set()
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        name, item = pending.pop()
        if isinstance(item, torch.Tensor) and "inner" not in vars(item):
            for part in _list_stored_parts(item):
                storage = part.untyped_storage()
                if (key := (storage.data_ptr(), storage.nbytes())) in visited:
                    continue
                visited.add(key)
                dtype = _CODES.get(str(part.dtype).removeprefix("torch."), "")
                flat: Bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                size = part.element_size()
                yield name, dtype, flat[: flat.size // size * size]  # whole elements
        elif id(item) not in visited and (inner := _list_items(item)):
            visited.add(id(item))
            pending += [
                (f"{name}{name and '.'}{key}", inner_item) for key, inner_item in reversed(inner)
            ]


def _list_items(container: Any) -> list[tuple[str, Any]]:
    """Return the items of a container or an `Inert` object, with keys or indexes; else nothing.

    Keys are text of at most 200 characters.
    """
    if isinstance(container, dict):
        return [(str(key)[:200], item) for key, item in container.items()]
    items = (
        container if isinstance(container, (list, tuple, set)) else getattr(container, "inner", ())
    )
    return [(str(i), item) for i, item in enumerate(items)]


def _list_stored_parts(tensor: Any) -> list[Any]:
    """Return the tensors with a storage that a tensor is made of; none for a meta tensor."""
    if tensor.is_sparse:
        # Torch has no other name for what is not coalesced.
        return [tensor._indices(), tensor._values()]  # noqa: SLF001
    if names := _COMPRESSED.get(str(tensor.layout)):
        return [getattr(tensor, name)() for name in names]
    if hasattr(tensor, "__tensor_flatten__"):
        tensors = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [
            stored_part
            for inner_tensor in tensors
            for stored_part in _list_stored_parts(inner_tensor)
        ]
    return [] if tensor.is_meta else [tensor]


if __name__ == "__main__":
    sys.exit(main())
