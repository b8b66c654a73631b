"""Adapters over bases of small whole numbers: `tests/vectors/make/sums.py` computes the same.

Every sum is exact, so a digest says whether it is right.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptsync.merger.change_types import BiasDelta, Change, Changes, Factor, Replacement, Rows
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor
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
    """Return a tensor that lies in a file of its name."""
    extent = Extent(name, 0, 4 * int(np.prod(shape)))
    copy = Copy(dtype, shape, (Part((0,) * len(shape), shape, extent),))
    return Tensor(name, dtype, shape, (copy,))


def stored(tensor: Tensor) -> Values:
    """Return the values of a tensor: of its own, or a range of the one that it was cut from."""
    (part,) = tensor.copies[0].parts
    start, size = part.extent.start // 4, part.extent.size // 4
    return value(part.extent.file, (start + size,))[start:].reshape(tensor.shape)


def apply(plan: Changes, base: Iterable[Tensor]) -> dict[str, Values]:
    """Return every tensor that is written, computed in the plainest way."""
    result: dict[str, Values] = {}
    for one in (*base, *plan.added):
        if one.name not in plan.removed:
            result[one.name] = changed(stored(one), plan.of.get(one.name, ()))
    return result


def changed(values: Values, changes: Sequence[Change]) -> Values:
    """Return values after their changes."""
    values = values.copy()
    for change in changes:
        if isinstance(change, Replacement):
            values = stored(change.tensor).copy()
        elif isinstance(change, Rows):
            values[list(change.rows)] = stored(change.tensor)
        elif isinstance(change, BiasDelta):
            values += np.float32(change.scale) * stored(change.tensor)
        else:
            product = np.float32(change.scale) * (_part(change.b) @ _part(change.a))
            box = tuple(slice(o, o + n) for o, n in zip(change.offsets, change.sizes, strict=True))
            whole = product.T if change.is_transposed else product
            values[box] += whole.reshape(change.sizes)
    return values


def _part(factor: Factor) -> Values:
    whole = stored(factor.tensor)
    flat: Values = whole.reshape(whole.shape[0], -1)
    return flat[np.ix_(factor.rows, factor.columns)]
