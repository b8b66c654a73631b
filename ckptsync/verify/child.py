"""Load every tensor of files, in a process that may be killed: ``python -m ckptsync.verify.child``, a socket as its standard input and output.

It sends ``ready <loader>`` once its libraries are imported, a tab, and what it could not shut itself in against; then answers each request with one line of JSON: ``tensors``, ``read``, ``nonfinite``
(name → count, the first `MOST`), ``more``, or ``fault``, or ``refused``, where what a file has is more than data.  A request is one byte with
the file's descriptor, then a line of JSON: ``kind`` (``safetensors``, ``torch``, ``items``), ``items`` (start, size, name), and how many wall
seconds it may take.  Whoever asks limits its memory and its CPU time (`process`).

safetensors files are loaded as torch would; without torch by safetensors' numpy loader, and what numpy has no type for (BF16, fp8) as raw bytes
from where the header says.  torch's own are loaded with ``weights_only=True`` and never otherwise: what is no tensor in them becomes an `inert`
object, whatever it is called, and is looked at for tensors.

Imports nothing of ckptsync but `bits`, `inert` and `sandbox`: the interpreter that has torch may have little else.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptsync.verify import inert, sandbox
from ckptsync.verify.bits import nonfinite

MOST = 1000
_PIECE = 64 << 20
_CALLBACKS, _SCORE = "callbacks.", 8  # bytes: Lightning's ModelCheckpoint and EarlyStopping begin with infinity as the best value
_MISSING = 3  # exit status: no safetensors here

Bytes = npt.NDArray[np.uint8]
Load = Callable[[Any, str], Iterator[Bytes]]


def main() -> int:
    """Until the socket ends."""
    os.dup2(2, 1)  # what libraries print is no answer
    lacks = sandbox.enter()
    try:
        import safetensors  # noqa: PLC0415 - its absence is an answer
    except ImportError:
        sys.stderr.write("level load: neither torch with safetensors nor safetensors alone is installed here\n")
        return _MISSING
    torch = _torch()
    other = f"torch {torch.__version__}" if torch else f"numpy {np.__version__}"
    with socket.socket(fileno=0) as asked:
        asked.sendall(f"ready safetensors {safetensors.__version__}, {other}\t{lacks or sandbox.close()}\n".encode())
        while fds := socket.recv_fds(asked, 1, 1)[1]:
            _serve(asked, fds[0], (safetensors, torch))
    return 0


def _torch() -> Any:
    try:
        import torch  # noqa: PLC0415 - it may not be there
    except ImportError:
        return None  # then safetensors files can be loaded, and others are said not to be
    torch.set_num_threads(1)
    return torch


def _serve(asked: socket.socket, fd: int, libraries: tuple[Any, Any]) -> None:
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (got := asked.recv(1 << 16)):
            return  # who asked is gone
        line += got
    request = json.loads(line)
    try:
        signal.alarm(request["wall"])  # a signal that says why; also when the parent is dead
        answer = _load(f"/dev/fd/{fd}", request, *libraries)
    except inert.Refused as e:
        answer = {"refused": str(e)[:500]}
    except Exception as e:  # noqa: BLE001 - whatever the libraries raise about this file is the answer
        answer = {"fault": f"{type(e).__name__}: {e}"[:500]}
    finally:
        signal.alarm(0)
        os.close(fd)
    asked.sendall(json.dumps(answer).encode() + b"\n")


def _load(path: str, request: dict[str, Any], safetensors: Any, torch: Any) -> dict[str, Any]:
    if request["kind"] == "safetensors":
        framework, load = ("pt", _Torch(torch)) if torch else ("numpy", _Numpy(path))
        return _answer(safetensors.safe_open(path, framework), load)
    if torch is None:
        return {"refused": "torch is not installed here"}
    if request["kind"] == "torch":
        return counted(inert.storages(inert.load(torch, path), torch))
    return counted(_items(path, request["items"], torch))


def _items(path: str, items: list[tuple[int, int, str]], torch: Any) -> Iterator[tuple[str, str, Bytes]]:
    """Of a distributed checkpoint: archives, one behind the other."""
    with open(path, "rb") as file:  # noqa: PTH123 - it is a descriptor's path
        for start, size, name in items:
            file.seek(start)
            data = file.read(size)
            if len(data) < size:
                raise EOFError(f"{name}: ends at byte {start + len(data)}, {start + size} expected")
            for inner, dtype, piece in inert.storages(inert.load(torch, io.BytesIO(data)), torch):
                yield f"{name}{inner and '.'}{inner}", dtype, piece


def counted(found: Iterator[tuple[str, str, Bytes]]) -> dict[str, Any]:
    """The answer, from names, dtypes and bytes of tensors."""
    odd: dict[str, int] = {}
    read = tensors = 0
    for name, dtype, piece in found:
        count = nonfinite(dtype, piece)
        read, tensors = read + piece.size, tensors + 1
        if count and not (name.startswith(_CALLBACKS) and piece.size <= _SCORE):
            odd[name] = odd.get(name, 0) + count
    return _told(tensors, read, odd)


def _told(tensors: int, read: int, odd: dict[str, int]) -> dict[str, Any]:
    return {"tensors": tensors, "read": read, "nonfinite": dict(list(odd.items())[:MOST]), "more": max(0, len(odd) - MOST)}


def _answer(opened: Any, load: Load) -> dict[str, Any]:
    odd: dict[str, int] = {}
    read = tensors = 0
    with opened as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            dtype, count = file.get_slice(name).get_dtype(), 0
            for piece in load(file, name):
                count += nonfinite(dtype, piece)
                read += piece.size
            tensors += 1
            if count:
                odd[name] = count
    return _told(tensors, read, odd)


class _Torch:
    """Mapped, not copied."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __call__(self, file: Any, name: str) -> Iterator[Bytes]:
        tensor = file.get_tensor(name)
        yield tensor.reshape(-1).view(self._torch.uint8).numpy()


class _Numpy:
    """Copied, a few rows at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offsets: dict[str, tuple[int, int]] = {}

    def __call__(self, file: Any, name: str) -> Iterator[Bytes]:
        rows = file.get_slice(name)
        shape = rows.get_shape()
        if not _has_numpy(rows.get_dtype()):
            yield from self._raw(name)
        elif not shape or 0 in shape:
            yield _bytes(file.get_tensor(name))
        else:
            step = max(1, _PIECE // (8 * int(np.prod(shape[1:], dtype=np.int64))))
            for at in range(0, shape[0], step):
                yield _bytes(rows[at : min(at + step, shape[0])])

    def _raw(self, name: str) -> Iterator[Bytes]:
        """The header was checked by safetensors when it opened the file."""
        if not self._offsets:
            with open(self._path, "rb") as file:  # noqa: PTH123 - it may be a descriptor's path
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            self._offsets = {
                k: (8 + length + v["data_offsets"][0], 8 + length + v["data_offsets"][1])
                for k, v in header.items()
                if k != "__metadata__"
            }
        at, end = self._offsets[name]
        with open(self._path, "rb") as file:  # noqa: PTH123
            file.seek(at)
            while at < end:
                piece = file.read(min(_PIECE, end - at))
                if not piece:
                    raise EOFError(f"ends at byte {at}, {end} expected")
                at += len(piece)
                yield np.frombuffer(piece, np.uint8)


def _has_numpy(dtype: str) -> bool:
    return not dtype.startswith(("BF", "F8_", "F6_", "F4"))


def _bytes(array: Any) -> Bytes:
    flat: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat


if __name__ == "__main__":
    sys.exit(main())
