"""Ranges and the tensors in them, against the slow obvious way."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import FileDigest, block_size, digest_stream
from ckptsync.model import Extent
from ckptsync.verify.ranges import Spans, differing, joined

SPANS = st.lists(st.tuples(st.text("abc", min_size=1), st.integers(0, 60), st.integers(0, 20)), max_size=12)
RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)).map(lambda r: (r[0], r[0] + r[1])), max_size=4)


@given(SPANS, RANGES)
def test_a_range_finds_the_tensors_that_share_a_byte_with_it(
    spans: list[tuple[str, int, int]], ranges: list[tuple[int, int]]
) -> None:
    found = Spans((name, Extent("f", start, size)) for name, start, size in spans).overlapping("f", tuple(ranges))
    wanted = {byte for start, end in ranges for byte in range(start, end)}
    assert found == tuple(sorted({name for name, start, size in spans if wanted & set(range(start, start + size))}))


@given(RANGES)
def test_joining_keeps_the_bytes_and_leaves_gaps(ranges: list[tuple[int, int]]) -> None:
    found = joined(ranges)
    assert [b for s, e in found for b in range(s, e)] == sorted({b for s, e in ranges for b in range(s, e)})
    assert all(a[1] < b[0] for a, b in pairwise(found))


def test_a_tensor_inside_another_ends_where_it_ends() -> None:
    spans = Spans([("outer", Extent("f", 0, 20)), ("inner", Extent("f", 5, 5))])
    assert spans.overlapping("f", ((10, 12),)) == ("outer",)
    assert spans.overlapping("f", ((9, 10),)) == ("inner", "outer")
    assert spans.overlapping("f", ((0, 5),)) == ("outer",)


def test_other_files_have_no_tensors() -> None:
    assert Spans([("a", Extent("f", 0, 4))]).overlapping("g", ((0, 4),)) == ()


def test_a_hundred_thousand_tensors_are_searched_and_not_walked() -> None:
    spans = Spans((f"t{i}", Extent("f", i * 10, 10)) for i in range(100_000))
    for i in range(0, 100_000, 100):
        assert spans.overlapping("f", ((i * 10 + 3, i * 10 + 4),)) == (f"t{i}",)


def _digest(data: bytes | bytearray) -> FileDigest:
    return digest_stream([data], len(data))


@given(st.integers(1, 200_000), st.data())
def test_differing_blocks_hold_every_byte_that_differs(size: int, data: st.DataObject) -> None:
    good = bytearray(size)
    at = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3))
    bad = bytearray(good)
    for i in at:
        bad[i] = 1
    found = differing(_digest(good), _digest(bad))
    assert all(any(s <= i < e for s, e in found) for i in at)
    assert sum(e - s for s, e in found) <= len(set(at)) * block_size(size)
    assert found[-1][1] <= size


def test_equal_digests_differ_nowhere() -> None:
    assert differing(_digest(b"abc"), _digest(b"abc")) == ()


def test_without_comparable_blocks_it_is_the_whole_file() -> None:
    other = FileDigest(3, "0" * 64, 4096, ("0" * 32,))
    assert differing(other, _digest(b"abc")) == ((0, 3),)
    assert differing(FileDigest(3, "0" * 64, 0, ()), _digest(b"abc")) == ((0, 3),)
