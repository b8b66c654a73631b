"""Whether two tools have written the same model: ``python -m benchmarks.outputs DIR`` prints what
one has written.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

Tensors = Mapping[str, tuple[str, tuple[int, ...], str]]


def tensors(destination: Path) -> Tensors:
    """Return name → (dtype, shape, digest) of all safetensors files and of a universal checkpoint.

    In a process of its own: the kernel counts the largest resident set of whoever starts a program
    as that program's own.
    """
    command = [sys.executable, "-m", "benchmarks.outputs", str(destination)]
    lines = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {name: (dtype, tuple(shape), digest) for name, (dtype, shape, digest) in lines.items()}


def _tensors(destination: Path) -> Tensors:
    written: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for path in sorted(destination.rglob("*.safetensors")) if destination.is_dir() else ():
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            base = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:base]).items():
                if name != "__metadata__":
                    start, end = (base + offset for offset in entry["data_offsets"])
                    written[name] = (
                        entry["dtype"],
                        tuple(entry["shape"]),
                        blake3(view[start:end]).hexdigest(),
                    )
    # of DeepSpeed's universal form the bytes of each tensor
    for path in sorted(destination.rglob("zero/*/*.pt")) if destination.is_dir() else ():
        with zipfile.ZipFile(path) as archive:
            (record,) = [name for name in archive.namelist() if name.endswith("/data/0")]
            data = archive.read(record)
            name = f"{path.parent.name}/{path.stem}"
            written[name] = ("", (len(data),), blake3(data).hexdigest())
    return written


def compare(theirs: Tensors, ours: Tensors) -> str:
    """Return in a word how another program's tensors differ from ours."""
    if not theirs:
        return "no safetensors"
    if theirs == ours:
        return "same tensors"
    dtypes = {dtype for dtype, _, _ in theirs.values()}
    if theirs.keys() == ours.keys() and dtypes.isdisjoint(dtype for dtype, _, _ in ours.values()):
        return f"in {', '.join(sorted(dtypes))}"
    return "OTHER TENSORS"


if __name__ == "__main__":
    print(json.dumps(_tensors(Path(sys.argv[1]))))
