"""Gathering: few reads, in file order, and nothing read that is far from what is wanted."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.merge.gather import SPAN, gather, groups, stored
from ckptsync.merge.units import NEAR, WORTH, Read, Unit
from ckptsync.model import Copy
from tests.boxes import stored as held
from tests.plain_files import Counting, MemoryFiles


def gathered(files: MemoryFiles, reads: list[Read]) -> bytes:
    out = bytearray(sum(r.size for r in reads))
    gather(files, Unit(stored=len(out), reads=reads), memoryview(out))
    return bytes(out)


@given(st.lists(st.tuples(st.sampled_from("fg"), st.integers(0, 30_000), st.integers(1, 9000)), max_size=12))
def test_every_byte_comes_to_its_place_whatever_the_order(wanted: list[tuple[str, int, int]]) -> None:
    files = MemoryFiles({"f": bytes(range(256)) * 160, "g": bytes(range(255, -1, -1)) * 160})
    reads, at = [], 0
    for file, start, size in wanted:
        reads.append(Read(file, start, size, at))
        at += size
    assert gathered(files, reads) == b"".join(files.content[f][s : s + n] for f, s, n in wanted)


def test_small_ranges_near_each_other_are_one_read_in_file_order() -> None:
    files = Counting({"f": bytes(range(250)) * 100, "g": bytes(100)})
    reads = [Read("f", 5000, 10, 0), Read("g", 50, 10, 10), Read("f", 100, 10, 20), Read("f", 110, 10, 30)]
    assert gathered(files, reads)[20:40] == files.content["f"][100:120]
    assert files.reads == [("f", 100, 20), ("f", 5000, 10), ("g", 50, 10)]


def test_large_ranges_far_ranges_and_long_spans_are_read_alone() -> None:
    far = [Read("f", 0, 10, 0), Read("f", 11 + NEAR, 10, 10)]
    large = [Read("f", 0, WORTH, 0), Read("f", WORTH, 10, WORTH)]
    assert [len(g) for g in groups(far)] == [1, 1]
    assert [len(g) for g in groups(large)] == [1, 1]
    spans = [g[-1].start + g[-1].size - g[0].start for g in groups([Read("f", 8000 * n, 5000, 0) for n in range(1000)])]
    assert max(spans) <= SPAN
    assert len(spans) <= 9


@given(held())
def test_a_copys_bytes_are_those_that_numpy_gathers(found: tuple[npt.NDArray[Any], Copy, MemoryFiles]) -> None:
    values, copy, files = found
    assert b"".join(map(bytes, stored(files, copy))) == values.tobytes()
