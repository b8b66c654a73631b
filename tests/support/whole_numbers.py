"""Adapters over bases of small whole numbers: `tests/vectors/make/sums.py` computes the same.

Every sum is exact, so a digest says whether it is right.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from ckptsync.merger.engine import Destination, write_model
from ckptsync.merger.into_base import join_files, plan_sums
from ckptsync.merger.plan import FilePlan, MergeOptions, plan
from ckptsync.merger.prepare import MergeJob
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor
from tests.support.files_in_memory import MemoryFiles
from tests.support.merge_in_memory import Written
from tests.support.vector import ROOT

Values = npt.NDArray[np.float32]
SUMS: dict[str, dict[str, Any]] = json.loads((ROOT / "sums.json").read_text())


def value(name: str, shape: Shape) -> Values:
    """Return whole numbers from -2 to 2; of a factor from -1 to 1."""
    most = 3 if ".lora_" in name else 5
    numbers = np.arange(int(np.prod(shape)), dtype="u4") * np.uint32(2654435761)
    numbers += np.uint32(zlib.crc32(name.encode()))
    whole: Values = ((numbers >> 13) % most).astype("f4").reshape(shape) - most // 2
    return whole


def digest(values: Values) -> str:
    """Return the digest of values as `sums.json` has it."""
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()[:12]


def tensors(shapes: Mapping[str, Iterable[int]], dtype: str = "F32") -> tuple[Tensor, ...]:
    """Return tensors, each in a file of its own name."""
    return tuple(tensor(name, tuple(shape), dtype) for name, shape in shapes.items())


def tensor(name: str, shape: Shape, dtype: str = "F32") -> Tensor:
    """Return a tensor that lies in a file of its name: half of them flattened, as ZeRO does."""
    size = int(np.prod(shape))
    grid = (size,) if zlib.crc32(name.encode()) % 2 else shape
    part = Part((0,) * len(grid), grid, Extent(name, 0, 4 * size))
    return Tensor(name, dtype, shape, (Copy(dtype, grid, (part,)),))


def sum_into_base(
    base: Mapping[str, Iterable[int]],
    config: Mapping[str, Any],
    adapter: Mapping[str, Iterable[int]],
    adapter_config: Mapping[str, Any],
) -> dict[str, Values]:
    """Return every tensor that a merge of the adapter into its base writes."""
    options, files = MergeOptions("keep"), [_files(base), _files(adapter)]
    base_job = _job(plan(tensors(base), options), "config.json", config)
    factors = plan(tensors(adapter), options, "adapter_model")
    adapters = [("adapter", _job(factors, "adapter_config.json", adapter_config))]
    joined, written = join_files(files[0], files[1:]), Written()
    write_model(plan_sums(base_job, adapters, joined, options), joined, Destination(written.write))
    return load(written["model.safetensors"])


def _files(shapes: Mapping[str, Iterable[int]]) -> MemoryFiles:
    return MemoryFiles({name: value(name, tuple(s)).tobytes() for name, s in shapes.items()})


def _job(plans: tuple[FilePlan, ...], name: str, config: Mapping[str, Any]) -> MergeJob:
    content = {name: json.dumps(config).encode()}
    return MergeJob("whole:.", plans, ((name, MemoryFiles(content)),), (), content)
