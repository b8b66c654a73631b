"""Pieces of stored tensors are read as numpy would cut and join them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Unsupported
from ckptsync.merger.joined_files import add_prefix
from ckptsync.merger.plan import check_tiling
from ckptsync.merger.read_units import stored_bytes
from ckptsync.merger.tensor_pieces import Piece, assemble
from ckptsync.tensors import Checksum, Copy, Extent, Part, Tensor
from tests.support.files_in_memory import MemoryFiles
from tests.support.random_boxes import FULL, stored


def content(files: MemoryFiles, tensor: Tensor) -> bytes:
    (copy,) = tensor.copies
    check_tiling(tensor, copy)
    return b"".join(map(bytes, stored_bytes(files, copy)))


def flat(values: np.ndarray[Any, Any], cuts: list[int]) -> tuple[Copy, MemoryFiles]:
    """Return a tensor as a framework stores it that cuts the flattened one."""
    ends = sorted({0, values.size, *(cut % (values.size + 1) for cut in cuts)})
    parts, files = [], {}
    for low, high in pairwise(ends):
        files[str(low)] = b"\xee" * 6 + values.ravel()[low:high].tobytes()
        parts.append(Part((low,), (high - low,), Extent(str(low), 6, 2 * (high - low))))
    return Copy("BF16", (values.size,), tuple(parts)), MemoryFiles(files)


@given(st.data(), stored(FULL))
def test_a_box_with_its_axes_in_any_order_is_numpys(
    data: st.DataObject, of: tuple[np.ndarray[Any, Any], Copy, MemoryFiles]
) -> None:
    values, copy, files = of
    if data.draw(st.booleans()):
        copy, files = flat(values, data.draw(st.lists(st.integers(0, 1000), max_size=5)))
    shape = values.shape
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    high = tuple(data.draw(st.integers(o + 1, n)) for o, n in zip(low, shape, strict=True))
    box = values[tuple(slice(o, n) for o, n in zip(low, high, strict=True))]
    axes = data.draw(st.permutations(range(len(shape))))
    sizes = tuple(n - o for o, n in zip(low, high, strict=True))
    piece = Piece(Tensor("w", "BF16", shape, (copy,)), low, sizes, (0,) * len(axes), tuple(axes))
    made = assemble("x", tuple(sizes[a] for a in axes), [piece])
    assert content(files, made) == box.transpose(axes).tobytes()


def test_replicas_and_checksums_are_cut_alike_and_a_missing_file_stays_missing() -> None:
    part = Part((0, 0), (4, 2), Extent("a", 8, 16), None, Checksum(Extent("a", 0, 40), 7))
    part = replace(part, replicas=(replace(part, extent=Extent("b", 100, 16)),))
    absent = Copy("F32", (8,), (), absent="optimizer")
    tensor = Tensor("w", "BF16", (4, 2), (Copy("BF16", (4, 2), (part,)), absent))
    made = assemble("x", (2, 2), [Piece(tensor, (1, 0), (2, 2), (0, 0), (0, 1))])
    (cut,) = made.copies[0].parts
    assert (cut.extent, cut.replicas[0].extent) == (Extent("a", 12, 8), Extent("b", 104, 8))
    named = add_prefix(tensor.copies[0], "x/").parts[0]
    assert (named.extent.file, named.replicas[0].extent.file) == ("x/a", "x/b")
    assert named.checksum == Checksum(Extent("x/a", 0, 40), 7)
    assert cut.checksum == cut.replicas[0].checksum == part.checksum
    assert made.copies[1] == Copy("F32", (2, 2), (), absent="optimizer")


def test_pieces_of_several_dtypes_make_up_no_tensor() -> None:
    copies = {
        dtype: Copy(dtype, (1, 2), (Part((0, 0), (1, 2), Extent(dtype, 0, 8)),))
        for dtype in ("F32", "BF16")
    }
    one, other = (Tensor(d, d, (1, 2), (copy,)) for d, copy in copies.items())
    pieces = [Piece(t, (0, 0), (1, 2), (n, 0), (0, 1)) for n, t in enumerate((one, other))]
    with pytest.raises(Unsupported, match="stored in different dtypes"):
        assemble("x", (2, 2), pieces)
    assert prod(assemble("x", (2, 2), [pieces[0], replace(pieces[0], at=(1, 0))]).shape) == 4
