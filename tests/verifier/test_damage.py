"""Ranges and the tensors in them, against the slow obvious way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import FileDigest, block_size, digest_stream
from ckptsync.errors import StoreError
from ckptsync.layouts import registry
from ckptsync.verifier.level_digest import find_differing, join_ranges, name_tensors, overlaps
from tests.support.files_in_memory import MemoryFiles, safetensors_file, tree
from tests.support.vector import vector

RANGES = st.lists(
    st.tuples(st.integers(0, 80), st.integers(1, 20)).map(lambda r: (r[0], r[0] + r[1])), max_size=4
)


@given(RANGES, st.integers(0, 80), st.integers(0, 20))
def test_bytes_overlap_ranges_that_they_share_a_byte_with(
    ranges: list[tuple[int, int]], start: int, size: int
) -> None:
    damaged = {byte for first, end in ranges for byte in range(first, end)}
    assert overlaps(join_ranges(ranges), start, size) is bool(
        damaged & set(range(start, start + size))
    )


@given(RANGES)
def test_joining_keeps_the_bytes_and_leaves_gaps(ranges: list[tuple[int, int]]) -> None:
    found = join_ranges(ranges)
    assert [b for s, e in found for b in range(s, e)] == sorted(
        {b for s, e in ranges for b in range(s, e)}
    )
    assert all(a[1] < b[0] for a, b in pairwise(found))


def _digest(data: bytes | bytearray) -> FileDigest:
    return digest_stream([data], len(data))


@given(st.integers(1, 200_000), st.data())
def test_differing_blocks_hold_every_byte_that_differs(size: int, data: st.DataObject) -> None:
    good = bytearray(size)
    at = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3))
    bad = bytearray(good)
    for i in at:
        bad[i] = 1
    found = find_differing(_digest(good), _digest(bad))
    assert all(any(s <= i < e for s, e in found) for i in at)
    assert sum(e - s for s, e in found) <= len(set(at)) * block_size(size)
    assert found[-1][1] <= size


def test_equal_digests_differ_nowhere() -> None:
    assert find_differing(_digest(b"abc"), _digest(b"abc")) == ()


def test_without_comparable_blocks_it_is_the_whole_file() -> None:
    other = FileDigest(3, "0" * 64, 4096, ("0" * 32,))
    assert find_differing(other, _digest(b"abc")) == ((0, 3),)
    assert find_differing(FileDigest(3, "0" * 64, 0, ()), _digest(b"abc")) == ((0, 3),)


# --- tensors

TWO = {
    "model-00001-of-00002.safetensors": safetensors_file({"a": ("U8", (9000,), bytes(9000))}),
    "model-00002-of-00002.safetensors": safetensors_file({"b": ("U8", (9000,), bytes(9000))}),
}
DCP = tree(*vector("hf-fsdp2-2node").sources)
ZERO = tree(*vector("hf-zero3-2node").sources)


def extents(files: MemoryFiles, layout: str) -> dict[str, list[tuple[str, int, int]]]:
    (source,) = [s for s in registry.sources(files) if s.layout == layout]
    found: dict[str, list[tuple[str, int, int]]] = {}
    for tensor in registry.tensors(files, source):
        for e in (p.extent for copy in tensor.copies for p in copy.parts):
            found.setdefault(e.file, []).append((tensor.name, e.start, e.start + e.size))
    return found


def damaged(files: MemoryFiles, path: str, at: int) -> MemoryFiles:
    data = bytearray(files.content[path])
    data[at] ^= 1
    return MemoryFiles({**files.content, path: bytes(data)})


@pytest.mark.parametrize(("files", "layout"), [(DCP, "dcp"), (ZERO, "zero")], ids=["dcp", "zero"])
def test_a_byte_of_a_shard_is_named_by_the_tensor_that_holds_it(
    files: MemoryFiles, layout: str
) -> None:
    for path, spans in extents(files, layout).items():
        name, start, end = spans[len(spans) // 2]
        if not path.endswith("_model_states.pt"):
            assert name in name_tensors(damaged(files, path, start), {path: ((start, end),)})[path]


def test_the_last_byte_of_one_tensor_is_not_the_next_ones() -> None:
    path, spans = next(iter(extents(DCP, "dcp").items()))
    name, _, end = spans[0]
    assert name_tensors(DCP, {path: ((end - 1, end),)}) == {path: (name,)}
    assert name_tensors(DCP, {path: ((end, end + 1),)}) == {}


def test_the_head_of_an_item_says_where_its_tensor_lies_and_not_which_it_is() -> None:
    path, spans = next(iter(extents(DCP, "dcp").items()))
    found = name_tensors(damaged(DCP, path, spans[0][1]), {path: ((0, len(DCP.content[path])),)})
    assert found == {path: tuple(sorted({name for name, _, _ in spans}))}


def test_damaged_metadata_names_nothing() -> None:
    (metadata,) = [p for p in DCP.content if p.endswith("pytorch_model_fsdp_0/.metadata")]
    path, spans = next(iter(extents(DCP, "dcp").items()))
    damage = {path: (spans[0][1:],), metadata: ((0, 4096),)}
    assert name_tensors(DCP, damage) == {}
    assert (
        name_tensors(damaged(DCP, metadata, 100), {path: (spans[0][1:],), metadata: ((0, 4096),)})
        == {}
    )


def test_a_damaged_header_silences_only_its_own_file() -> None:
    damage = {
        "model-00001-of-00002.safetensors": ((0, 8192),),
        "model-00002-of-00002.safetensors": ((8192, 9000),),
    }
    assert name_tensors(MemoryFiles(TWO), damage) == {"model-00002-of-00002.safetensors": ("b",)}


def test_files_without_tensors_have_no_names() -> None:
    assert (
        name_tensors(MemoryFiles({**TWO, "config.json": b"{}"}), {"config.json": ((0, 2),)}) == {}
    )
    assert name_tensors(MemoryFiles({"x.bin": b"1"}), {"x.bin": ((0, 1),)}) == {}


class Broken(MemoryFiles):
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        raise StoreError(f"{name}: input/output error")


def test_an_error_of_the_store_is_raised() -> None:
    with pytest.raises(StoreError):
        name_tensors(Broken(TWO), {"model-00001-of-00002.safetensors": ((0, 1),)})
