"""Files in memory, the plainest `ckptsync.tensors.Files`, and small containers to fill them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ckptsync.errors import Corrupt, Incomplete


class MemoryFiles:
    """Names to bytes; counts the bytes that were read."""

    def __init__(self, content: Mapping[str, bytes]) -> None:
        self.content = dict(content)
        self.read = 0

    def sizes(self) -> Mapping[str, int]:
        return {name: len(data) for name, data in self.content.items()}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self.content:
            raise Incomplete(f"{name}: not found")
        data = self.content[name][start : start + len(out)]
        if len(data) != len(out):
            raise Corrupt(f"{name}: too short")
        self.read += len(data)
        out[:] = data


def file_paths(root: Path) -> dict[str, Path]:
    """Return every file below a directory, by its path from there."""
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path for path in found}


def contents(root: Path) -> dict[str, bytes]:
    """Return the content of every file below a directory."""
    return {name: path.read_bytes() for name, path in file_paths(root).items()}


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below a directory, which is returned."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def tree(*roots: Path) -> MemoryFiles:
    """Return everything below some directories, in memory; of equal names the first directory's."""
    return MemoryFiles(
        {name: data for root in reversed(roots) for name, data in contents(root).items()}
    )


def safetensors_file(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """Return a well-formed safetensors file, written without the code under test."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return raw_safetensors(header, b"".join(data for _, _, data in tensors.values()))


def raw_safetensors(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def torch_zip_file(
    records: Mapping[str, bytes], prefix: str = "archive", method: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a zip as torch lays it out, by Python's own writer."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(f"{prefix}/{name}", data)
    return out.getvalue()


class Global:
    """Pickles as a mention of ``module.name``; called with ``args`` if there are any."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Pickler(pickle._Pickler):
    """Writes what torch writes, without torch: persistent ids for storages, and names of things
    that need not exist.
    """

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, StorageId) else None

    dispatch: ClassVar[dict[type, Any]] = {**vars(pickle)["_Pickler"].dispatch}


class StorageId:
    def __init__(self, kind: str, key: str, numel: int) -> None:
        self.pid = ("storage", Global("torch", kind), key, "cpu", numel)


class Call:
    """Pickles as a call of a `Global`."""

    def __init__(self, name: Global, *args: Any) -> None:
        self.name, self.args = name, args


def _save_name(pickler: Any, obj: Global) -> None:
    pickler.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())


def _save_call(pickler: Any, obj: Call) -> None:
    _save_name(pickler, obj.name)
    pickler.save(obj.args)
    pickler.write(b"R")


_Pickler.dispatch |= {Global: _save_name, Call: _save_call}


def torch_pickle(value: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


def tensor_call(
    storage: StorageId, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Call:
    return Call(
        Global("torch._utils", "_rebuild_tensor_v2"),
        storage,
        offset,
        shape,
        strides,
        False,  # noqa: FBT003
        {},
    )


class Counting(MemoryFiles):
    """Remembers every read, of any thread."""

    def __init__(self, content: dict[str, bytes]) -> None:
        super().__init__(content)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.reads.append((name, start, len(out)))
        super().read_into(name, start, out)
