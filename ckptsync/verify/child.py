"""Load every tensor of one safetensors file, in a process that may be killed: ``python -m ckptsync.verify.child``.

Arguments: path, and how many bytes of address space beyond the file's own, CPU seconds and wall seconds it may take.  Prints
``ready <loader>`` when its libraries are loaded and the limits are set, then one line of JSON: ``tensors``, ``read``, ``nonfinite``
(name → count, the first `MOST`), or ``fault``.  With torch, tensors are loaded as torch would; without it by safetensors' numpy
loader, and what numpy has no type for (BF16, fp8) as raw bytes from where the header says.

Imports nothing of ckptsync but `bits`: the interpreter that has torch may have little else.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptsync.verify.bits import nonfinite

MOST = 1000
_PIECE = 64 << 20
_MISSING = 3  # exit status: no safetensors here

Bytes = npt.NDArray[np.uint8]
Load = Callable[[Any, str], Iterator[Bytes]]


def main(path: str, memory: str, cpu: str, wall: str) -> int:
    """Exit status 0 if there is an answer, also if it is a fault."""
    try:
        import safetensors  # noqa: PLC0415 - its absence is an answer
    except ImportError:
        return _MISSING
    loader, framework, load = _loader(safetensors, path)
    _limit(path, int(memory), int(cpu), int(wall))
    print(f"ready {loader}", flush=True)  # noqa: T201 - this is the protocol
    try:
        answer = _answer(safetensors.safe_open(path, framework), load)
    except Exception as e:  # noqa: BLE001 - whatever the libraries raise about this file is the answer
        answer = {"fault": f"{type(e).__name__}: {e}"[:500]}
    print(json.dumps(answer), flush=True)  # noqa: T201
    return 0


def _answer(opened: Any, load: Load) -> dict[str, Any]:
    found: dict[str, int] = {}
    read = tensors = 0
    with opened as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            dtype, count = file.get_slice(name).get_dtype(), 0
            for piece in load(file, name):
                count += nonfinite(dtype, piece)
                read += piece.size
            tensors += 1
            if count:
                found[name] = count
    return {"tensors": tensors, "read": read, "nonfinite": dict(list(found.items())[:MOST]), "more": max(0, len(found) - MOST)}


def _loader(safetensors: Any, path: str) -> tuple[str, str, Load]:
    try:
        import torch  # noqa: PLC0415 - it may not be there
    except ImportError:
        return f"safetensors {safetensors.__version__}, numpy {np.__version__}", "numpy", _Numpy(path)
    torch.set_num_threads(1)
    return f"safetensors {safetensors.__version__}, torch {torch.__version__}", "pt", _Torch(torch)


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


def _limit(path: str, memory: int, cpu: int, wall: int) -> None:
    """After the libraries are loaded: theirs is trusted, and large."""
    held = _address_space() + 2 * os.stat(path).st_size + memory  # noqa: PTH116 - as above
    for what, most in ((resource.RLIMIT_AS, held), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 5))  # first the signal that says why
    signal.alarm(wall)  # also when the parent is dead


def _address_space() -> int:
    with open("/proc/self/statm") as told:  # noqa: PTH123
        return int(told.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
