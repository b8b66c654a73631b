"""Tensors put together from their parts, as a merge reads them."""

from __future__ import annotations

from collections.abc import Iterable

from ckptsync.merger.plan import check_tiling
from ckptsync.merger.read_units import stored_bytes
from ckptsync.tensors import Files, Tensor
from tests.support.vector import Bits


def assembled(files: Files, tensors: Iterable[Tensor]) -> Bits:
    """Return tensors as `tests.support.vector.bits` does, each from its first copy.

    The copy's parts must tile it.
    """
    result = {}
    for tensor in tensors:
        copy = tensor.copies[0]
        check_tiling(tensor, copy)
        data = b"".join(map(bytes, stored_bytes(files, copy)))
        result[tensor.name] = (tensor.dtype, tensor.shape, data)
    return result
