"""Items found by comparison against each of them parsed in full."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
import torch

from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.formats import torch_save
from ckptsync.layouts import dcp_items
from ckptsync.layouts.dcp_described import Item
from ckptsync.model import Extent, Files, Part
from tests.plain_files import MemoryFiles
from tests.torch_files import saved

ALIKE = [saved(torch.full((5, 3), float(n))) for n in range(6)]


def item(file: str, start: int, size: int) -> Item:
    found = Item()
    found.take(["relative_path", file, "offset", start, "length", size])
    return found


def together(blobs: Sequence[bytes], file: str = "f") -> tuple[MemoryFiles, list[Item]]:
    """Items back to back in one file."""
    ends = [0]
    for blob in blobs:
        ends.append(ends[-1] + len(blob))
    return MemoryFiles({file: b"".join(blobs)}), [item(file, at, len(blob)) for at, blob in zip(ends, blobs, strict=False)]


def in_full(files: Files, one: Item) -> Part:
    stored, archive = torch_save.load_tensor(files, Extent(one.file, one.start, one.size))
    return torch_save.part(files, archive, stored)


def compared(files: Files, items: list[Item]) -> list[Part]:
    return [
        dcp_items.part(one, found, found[0].stored.shape) for one, found in zip(items, dcp_items.find(files, items), strict=True)
    ]


def check(blobs: Sequence[bytes]) -> None:
    files, items = together(blobs)
    for part, one in zip(compared(files, items), items, strict=True):
        expected = in_full(files, one)
        assert (part.sizes, part.extent, part.strides) == (expected.sizes, expected.extent, expected.strides)
        assert part.checksum == expected.checksum


def test_items_that_differ_in_their_values_alone_have_their_own_sums() -> None:
    files, items = together(ALIKE)
    check(ALIKE)
    assert len({part.checksum for part in compared(files, items)}) == len(ALIKE)
    assert len({id(kind) for kind, _ in dcp_items.find(files, items)}) == 1


def test_items_of_one_length_can_be_of_several_kinds() -> None:
    square = torch.arange(16.0).reshape(4, 4)
    kinds = [square, square.t(), square.int(), square.reshape(2, 8), square.reshape(8, 2).t()]
    blobs = [saved(kind.clone(memory_format=torch.preserve_format)) for kind in kinds] * 3
    assert len(set(map(len, blobs))) < len(kinds)
    check(blobs)


def test_each_dtype_size_and_empty_tensor_is_found() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    check([saved(torch.zeros(n, dtype=dtype)) for dtype in dtypes for n in (0, 1, 7, 5000)] * 2)
    check([saved(torch.tensor(2.5)), saved(torch.tensor(3.5))])


def test_items_without_sums_are_told_from_those_with() -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        without = saved(torch.ones(5, 3))
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert len(without) == len(ALIKE[0])
    check([ALIKE[0], without, ALIKE[1], without])
    check([without, without, ALIKE[1]])


def test_a_changed_byte_anywhere_gives_what_a_full_parse_gives() -> None:
    for at in range(len(ALIKE[1])):
        blob = bytearray(ALIKE[1])
        blob[at] ^= 0x14
        files, items = together([ALIKE[0], bytes(blob), ALIKE[2]])
        try:
            expected = in_full(files, items[1])
        except CkptsyncError as e:
            with pytest.raises(type(e)):
                compared(files, items)
            continue
        assert compared(files, items)[1].checksum == expected.checksum, at
        assert compared(files, items)[1].extent == expected.extent, at


def test_little_is_read_of_large_items_and_small_ones_are_read_once() -> None:
    large, items = together([saved(torch.full((100_000,), float(n))) for n in range(20)])
    dcp_items.find(large, items)
    assert large.read < 20 * 3 * 1024 + 8 * 1024
    small, items = together(ALIKE * 50)
    dcp_items.find(small, items)
    assert small.read < 1.1 * len(small.content["f"])


def test_items_come_in_any_order_and_from_several_files() -> None:
    one, items = together(ALIKE, "one")
    other, others = together(ALIKE[::-1], "other")
    files = MemoryFiles(one.content | other.content)
    mixed = [i for pair in zip(items, others[::-1], strict=True) for i in pair][::-1]
    assert [p.extent.file for p in compared(files, mixed)] == [i.file for i in mixed]
    assert [p.checksum for p in compared(files, mixed)] == [in_full(files, i).checksum for i in mixed]


def test_items_that_overlap_cost_no_more() -> None:
    files, items = together(ALIKE)
    many = [item("f", i.start, i.size) for i in items for _ in range(100)]
    dcp_items.find(files, many)
    assert files.read < 600 * 4 * 1024


def test_what_is_no_archive_of_a_tensor_is_corrupt() -> None:
    out = io.BytesIO()
    torch.save({"a": 1}, out)
    for blob in (out.getvalue(), b"x" * 2000, b""):
        files, items = together([ALIKE[0], blob])
        with pytest.raises(Corrupt):
            dcp_items.find(files, items)
