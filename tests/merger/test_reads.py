"""Blocks, units and reads against numpy slicing: the whole file, each byte once, in few reads."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.merger import read_units as module
from ckptsync.merger.plan import FilePlan, MergeOptions, plan
from ckptsync.merger.read_units import (
    NEAR,
    SPAN,
    WORTH,
    Box,
    Read,
    Unit,
    box_reads,
    cut_boxes,
    cut_units,
    gather,
)
from ckptsync.tensors import Copy, Extent, Part, Shape, Tensor
from tests.support.files_in_memory import Counting, MemoryFiles
from tests.support.random_boxes import SHAPES, stored

Stored = tuple[npt.NDArray[Any], Copy, MemoryFiles]
MOST = st.integers(1, 60)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def into(read: Read) -> Box:
    assert read.scatter
    return read.scatter.into


def taken(read: Read, files: MemoryFiles) -> npt.NDArray[Any]:
    """What a read brings, element by element."""
    data = files.content[read.file][read.start :][: read.size]
    assert len(data) == read.size
    assert read.scatter
    held = np.frombuffer(data, "<u2")
    found = np.empty(into(read).sizes, "<u2")
    for index in np.ndindex(*into(read).sizes):
        found[index] = held[sum(i * s for i, s in zip(index, read.scatter.strides, strict=True))]
    return found


@given(SHAPES, MOST)
def test_boxes_follow_each_other_and_make_up_the_tensor(shape: Shape, most: int) -> None:
    order = np.arange(prod(shape)).reshape(shape)
    found = [order[region(box)].ravel() for box in cut_boxes(shape, most)]
    assert all(0 < len(piece) <= most for piece in found)
    assert np.array_equal(np.concatenate([*found, np.array([], int)]), order.ravel())


@pytest.mark.parametrize("over", [0, 12, 256 << 10])
@given(stored(), MOST)
def test_reads_bring_what_numpy_would_slice(over: int, held: Stored, most: int) -> None:
    values, copy, files = held
    was, module.MERGE_READS = module.MERGE_READS, over
    try:
        for box in cut_boxes(copy.grid, most):
            out = np.full(box.sizes, 0xEEEE, "<u2")
            for read in (r for part in copy.parts for r in box_reads(box, part, 2, 0)):
                out[region(into(read))] = taken(read, files)
            assert np.array_equal(out, values[region(box)])
    finally:
        module.MERGE_READS = was


@given(stored(), MOST)
def test_a_part_stored_row_by_row_gives_a_box_one_read_of_nothing_but_what_is_wanted(
    held: Stored, most: int
) -> None:
    _, copy, _ = held
    for part in (p for p in copy.parts if p.strides is None):
        reads = [list(box_reads(box, part, 2, 0)) for box in cut_boxes(copy.grid, most)]
        assert all(len(found) <= 1 for found in reads)
        assert sum(read.size for found in reads for read in found) == 2 * prod(part.sizes)


def test_a_large_transposed_part_is_read_in_pieces_of_little_waste() -> None:
    shape = (4096, 4096)
    part = Part((0, 0), shape, Extent("file", 0, 4 * prod(shape)), (1, 4096))
    for box in list(cut_boxes(shape, 1 << 20))[:3]:
        reads = list(box_reads(box, part, 4, 0))
        assert sum(prod(into(r).sizes) for r in reads) == prod(box.sizes)
        assert len(reads) <= 256  # halved along the axis whose elements lie furthest apart
        assert all(r.size <= max(2 * 4 * prod(into(r).sizes), module.MERGE_READS) for r in reads)


def planned(*copies: Copy) -> FilePlan:
    (found,) = plan(
        [Tensor(f"t{n:06d}", c.dtype, c.grid, (c,)) for n, c in enumerate(copies)],
        MergeOptions("keep"),
    )
    return found


def flat(count: int, file: str = "f", start: int = 0) -> Copy:
    return Copy("F32", (count,), (Part((0,), (count,), Extent(file, start, 4 * count)),))


def whole(found: list[Unit], plan_: FilePlan) -> None:
    assert b"".join(unit.text for unit in found) == plan_.header
    shares = [share for unit in found for share in unit.shares]
    for number, tensor in enumerate(plan_.tensors):
        assert sum(s.size for s in shares if s.number == number) == tensor.size
    assert [s.number for s in shares] == sorted(s.number for s in shares)
    assert all(unit.stored == sum(s.size for s in unit.shares) for unit in found)


@given(st.lists(st.integers(0, 40), max_size=20), st.sampled_from([2, 6, 16, 2 << 20]))
def test_units_make_up_the_file(sizes: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", window)
        plan_ = planned(*(flat(n, start=100 * i) for i, n in enumerate(sizes)), flat(1))
        found = list(cut_units(plan_))
        whole(found, plan_)
        assert max(unit.stored for unit in found) <= max(4, window)


def test_a_large_tensor_is_cut_into_windows_that_follow_each_other() -> None:
    (copy,) = [flat(5 << 20)]
    _, *found = cut_units(planned(copy))
    assert [unit.stored for unit in found] == [4 << 20] * 5
    assert [r.start for unit in found for r in unit.reads] == [*range(0, 20 << 20, 4 << 20)]


def test_small_tensors_that_lie_as_they_are_written_are_one_read() -> None:
    _, unit = cut_units(planned(*(flat(100, start=400 * n) for n in range(50))))
    assert [(r.start, r.size) for r in unit.reads] == [(0, 20_000)]


def test_memory_for_reads_is_bounded_where_they_bring_next_to_nothing() -> None:
    plan_ = planned(*(flat(1, start=20_000 * n) for n in range(9000)))
    assert max(len(unit.reads) for unit in cut_units(plan_)) <= module.MOST_READS


def gathered(files: MemoryFiles, reads: list[Read]) -> bytes:
    out = bytearray(sum(r.size for r in reads))
    gather(files, Unit(stored=len(out), reads=reads), memoryview(out))
    return bytes(out)


@given(
    st.lists(
        st.tuples(st.sampled_from("fg"), st.integers(0, 30_000), st.integers(1, 9000)), max_size=12
    )
)
def test_every_byte_comes_to_its_place_whatever_the_order(
    wanted: list[tuple[str, int, int]],
) -> None:
    files = MemoryFiles({"f": bytes(range(256)) * 160, "g": bytes(range(255, -1, -1)) * 160})
    reads, at = [], 0
    for file, start, size in wanted:
        reads.append(Read(file, start, size, at))
        at += size
    assert gathered(files, reads) == b"".join(files.content[f][s : s + n] for f, s, n in wanted)


def test_small_ranges_near_each_other_are_one_read_in_file_order() -> None:
    files = Counting({"f": bytes(range(250)) * 100, "g": bytes(100)})
    reads = [
        Read("f", 5000, 10, 0),
        Read("g", 50, 10, 10),
        Read("f", 100, 10, 20),
        Read("f", 110, 10, 30),
    ]
    assert gathered(files, reads)[20:40] == files.content["f"][100:120]
    assert files.reads == [("f", 100, 20), ("f", 5000, 10), ("g", 50, 10)]


def test_large_ranges_far_ranges_and_long_spans_are_read_alone() -> None:
    far = [Read("f", 0, 10, 0), Read("f", 11 + NEAR, 10, 10)]
    large = [Read("f", 0, WORTH, 0), Read("f", WORTH, 10, WORTH)]
    long = [Read("f", 8000 * n, 5000, 5000 * n) for n in range(1000)]
    for reads, least, most in ((far, 2, 2), (large, 2, 2), (long, 8, 9)):
        files = Counting({"f": bytes(8_000_000)})
        gathered(files, reads)
        assert least <= len(files.reads) <= most
        assert max(size for _, _, size in files.reads) <= SPAN
