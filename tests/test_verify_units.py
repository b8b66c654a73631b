"""Which stretches level digest reads: every byte once, or a sample that is as large as was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.digest import BLOCK_HEX, FileDigest, block_size
from ckptsync.records.model_record import ModelTensor
from ckptsync.verify.expected import Expected
from ckptsync.verify.units import LARGE, Unit, coverage, sampled, units, whole

MIB = 1 << 20


def shard(size: int, name: str = "run/c/f") -> Expected:
    block = block_size(size)
    blocks = tuple(f"{i:0{BLOCK_HEX}x}" for i in range(-(-size // block)))
    return Expected(name, "f", "c/f", FileDigest(size, "d" * 64, block, blocks))


def consolidated(size: int, *tensors: tuple[int, int]) -> Expected:
    told = tuple(ModelTensor(str(i), "U8", (n,), "m", start, n, f"{i:064x}") for i, (start, n) in enumerate(tensors))
    return Expected("run/k/m", "m", "k/m", FileDigest(size, "e" * 64, 0, ()), told, is_consolidated=True)


@given(st.integers(0, 40 * LARGE), st.booleans())
def test_units_are_all_bytes_once_in_their_order(size: int, in_ranges: bool) -> None:  # noqa: FBT001
    found = list(units(shard(size), in_ranges=in_ranges))
    assert [u.start for u in found[1:]] == [u.end for u in found[:-1]]
    assert (found[0].start, found[-1].end) == (0, size)
    assert all(len(u.wanted) == max(1, -(-u.size // u.block)) for u in found)


def test_a_range_has_the_digests_of_its_blocks() -> None:
    file = shard(LARGE + 1)
    first, *rest = units(file, in_ranges=True)
    assert rest
    assert tuple(d for u in (first, *rest) for d in u.wanted) == file.wanted.blocks
    assert list(units(file, in_ranges=False)) == [whole(file)]
    assert list(units(consolidated(2 * LARGE, (8, LARGE)), in_ranges=True)) == [Unit(consolidated(2 * LARGE, (8, LARGE)), 0, 2 * LARGE, 2 * LARGE, ("e" * 64,))]  # fmt: skip


@settings(max_examples=40)
@given(st.floats(0.01, 1.0), st.integers(0, 1 << 40))
def test_a_sample_is_at_least_as_large_as_asked_and_hardly_larger(share: float, seed: int) -> None:
    files = [
        shard(100 * MIB, "a"),
        shard(50 * MIB, "b"),
        consolidated(40 * MIB, (100, 3 * MIB), (4 * MIB, 20 * MIB)),
        shard(10, "c"),
    ]
    total = 100 * MIB + 50 * MIB + 23 * MIB + 10
    count, size = coverage(sampled(files, share, seed))
    assert share * total <= size <= share * total + 20 * MIB
    assert 1 <= count <= 4


def test_another_seed_takes_another_sample_and_the_same_seed_the_same() -> None:
    files = [shard(500 * MIB)]
    assert sampled(files, 0.1, 1) == sampled(files, 0.1, 1) != sampled(files, 0.1, 2)


@pytest.mark.parametrize("size", [0, 1, MIB])
def test_small_files_are_read_as_a_whole(size: int) -> None:
    assert sampled([shard(size)], 1.0, 0) == ((whole(shard(size)),) if size else ())
