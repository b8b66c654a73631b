"""Tensors put together from their parts in the plainest way there is: numpy, one element at a time
where it must be.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.tensors import Files, Part, Tensor, read
from tests.support.vector import Bits


def assembled(files: Files, tensors: Iterable[Tensor]) -> Bits:
    """As `tests.support.vector.bits`; the first copy of each.

    Elements that no part gives are 0xEE.
    """
    return {
        tensor.name: (tensor.dtype, tensor.shape, _content(files, tensor)) for tensor in tensors
    }


def _content(files: Files, tensor: Tensor) -> bytes:
    item, copy = ITEMSIZE[tensor.dtype], tensor.copies[0]
    whole = np.full((*copy.grid, item), 0xEE, np.uint8)
    for part in copy.parts:
        where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        whole[where] = _box(files, part, item)
    return whole.tobytes()


def _box(files: Files, part: Part, item: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    held = np.frombuffer(read(files, part.extent), np.uint8)
    if part.strides is None:
        return held.reshape(*part.sizes, item)
    out = np.empty((prod(part.sizes), item), np.uint8)
    for number, location in enumerate(np.ndindex(*part.sizes)):
        at = item * sum(p * s for p, s in zip(location, part.strides, strict=True))
        out[number] = held[at : at + item]
    return out.reshape(*part.sizes, item)
