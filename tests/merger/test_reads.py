"""Blocks, units and reads against numpy slicing: the whole file, each byte once, in few reads."""

from __future__ import annotations

from math import prod

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
from ckptsync.tensors import Copy, Extent, Part, Tensor
from tests.support.files_in_memory import Counting, MemoryFiles


def into(read: Read) -> Box:
    assert read.scatter
    return read.scatter.into


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
