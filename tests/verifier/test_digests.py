"""Stretches are read at once, from near and far, and what differs is found wherever it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.digest import (
    BLOCK_HEX,
    FileDigest,
    RangeDigests,
    block_size,
    compared_ranges,
    digest_stream,
)
from ckptsync.errors import StoreError
from ckptsync.records.model_record import ModelTensor
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_any
from ckptsync.tensors import Extent
from ckptsync.verifier import level_digest
from ckptsync.verifier.expected_files import ExpectedFile
from ckptsync.verifier.level_digest import Sample, Stretch, choose_sample, find_damaged, split
from ckptsync.verifier.tracked_files import CountedSource
from tests.support.files_in_memory import MemoryFiles

SIZES = {"empty": 0, "one": 1, "small": 70_000, "large": (5 << 20) + 3}
DATA = {name: bytes(range(1, 252)) * (size // 251 + 1) for name, size in SIZES.items()}


def expected(name: str, *, has_blocks: bool = True) -> ExpectedFile:
    data = DATA[name][: SIZES[name]]
    found = digest_stream([data], len(data))
    return ExpectedFile(
        name, name, name, found if has_blocks else FileDigest(found.size, found.digest, 0, ())
    )


FILES = [expected(name) for name in SIZES]


@pytest.fixture(params=["near", "near, from a disk", "far"])
def counted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CountedSource:
    monkeypatch.setattr(level_digest, "LARGE", 1 << 20)
    monkeypatch.setattr(level_digest, "RANGE", 300_000)
    if request.param == "near, from a disk":
        monkeypatch.setattr(level_digest, "_is_in_memory", lambda root, unit: False)
    store = MemoryStore() if request.param == "far" else open_any(str(tmp_path))
    for name, size in SIZES.items():
        store.write(name, [DATA[name][:size]])
    return CountedSource(store)


def everything(source: CountedSource) -> list[Stretch]:
    in_ranges = isinstance(source.source, MemoryStore)
    files = [*FILES, expected("large", has_blocks=False)]
    return [stretch for file in files for stretch in split(file, in_ranges=in_ranges)]


def whole(file: ExpectedFile) -> Stretch:
    (found,) = split(file, in_ranges=False)
    return found


def test_what_is_well_is_no_suspect_and_each_byte_is_read_once(counted: CountedSource) -> None:
    assert find_damaged(counted, everything(counted)) == frozenset()
    assert counted.read == sum(SIZES.values()) + SIZES["large"]


@pytest.mark.parametrize(
    ("name", "at"),
    [(name, at) for name, n in SIZES.items() for at in {0, n // 2, n - 1} if 0 <= at < n],
)
def test_a_flipped_bit_makes_its_file_a_suspect_and_no_other(
    counted: CountedSource, name: str, at: int
) -> None:
    data = bytearray(DATA[name][: SIZES[name]])
    data[at] ^= 0x10
    counted.source.write(name, [data])  # type: ignore[attr-defined]
    assert find_damaged(counted, everything(counted)) == {name}
    if name == "large":  # and each of the two ways in which it is recorded finds it
        assert find_damaged(counted, [whole(expected(name, has_blocks=False))]) == {name}
        assert find_damaged(counted, split(expected(name), in_ranges=True)) == {name}


@pytest.mark.parametrize("at", [99, 100, (3 << 20) + 99, (3 << 20) + 100])
def test_a_long_stretch_in_the_middle_with_one_digest_is_compared_alone(
    counted: CountedSource, at: int
) -> None:
    """As a sample takes a consolidated model's tensors."""
    file = expected("large")
    wanted = digest_stream([DATA["large"][100 : (3 << 20) + 100]], 3 << 20).digest
    ends = 100, (3 << 20) + 100
    unit = Stretch(file, *ends, RangeDigests(file.size, "", ends, ("", wanted)))
    assert find_damaged(counted, [unit]) == frozenset()
    data = bytearray(DATA["large"][: SIZES["large"]])
    data[at] ^= 1
    counted.source.write("large", [data])  # type: ignore[attr-defined]
    assert (find_damaged(counted, [unit]) == {"large"}) is (100 <= at < (3 << 20) + 100)


def test_what_is_gone_or_short_is_a_suspect(counted: CountedSource) -> None:
    counted.source.delete("one")  # type: ignore[attr-defined]
    counted.source.write("large", [DATA["large"][: SIZES["large"] - 1]])  # type: ignore[attr-defined]
    assert find_damaged(counted, everything(counted)) == {"one", "large"}


class Watching(MemoryFiles):
    """Says how many threads were in it at once, and waits for the next one."""

    def __init__(self, content: dict[str, bytes], wait_for: int) -> None:
        super().__init__(content)
        self.barrier = threading.Barrier(wait_for)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.barrier.wait(60)
        super().read_into(name, start, out)


def test_ranges_of_one_file_are_read_at_once_from_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_digest, "LARGE", 1 << 20)
    monkeypatch.setattr(level_digest, "RANGE", 1 << 20)
    data = DATA["large"][: 4 << 20]
    file = ExpectedFile("f", "f", "f", digest_stream([data], len(data)))
    assert (
        find_damaged(CountedSource(Watching({"f": data}, 4)), split(file, in_ranges=True))
        == frozenset()
    )


@pytest.mark.parametrize("count", [1, 40])
def test_an_error_of_the_store_ends_it_and_damages_nothing(count: int) -> None:
    class Broken(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError("input/output error")

    with pytest.raises(StoreError, match="input/output"):
        find_damaged(CountedSource(Broken()), [whole(expected("one"))] * count)


def test_a_store_that_pours_is_let_pour() -> None:
    class Pouring(MemoryStore):
        def stream(
            self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]
        ) -> None:
            for at in range(extent.start, extent.start + extent.size, 1000):
                take(memoryview(DATA[extent.file])[at : min(at + 1000, extent.start + extent.size)])

    source = CountedSource(Pouring())
    assert find_damaged(source, [whole(expected("small"))]) == frozenset()
    assert source.read == SIZES["small"]


# --- stretches and samples

MIB = 1 << 20


def shard(size: int, name: str = "run/c/f") -> ExpectedFile:
    block = block_size(size)
    blocks = tuple(f"{i:0{BLOCK_HEX}x}" for i in range(-(-size // block)))
    return ExpectedFile(name, "f", "c/f", FileDigest(size, "d" * 64, block, blocks))


def model_file(size: int, *tensors: tuple[int, int]) -> ExpectedFile:
    told = tuple(
        ModelTensor(str(i), "U8", (n,), "m", start, n, f"{i:064x}")
        for i, (start, n) in enumerate(tensors)
    )
    return ExpectedFile(
        "run/k/m", "m", "k/m", FileDigest(size, "e" * 64, 0, ()), told, is_consolidated=True
    )


@given(st.integers(0, 40 * level_digest.LARGE), st.booleans())
def test_units_are_all_bytes_once_in_their_order(size: int, in_ranges: bool) -> None:  # noqa: FBT001
    found = list(split(shard(size), in_ranges=in_ranges))
    assert [u.start for u in found[1:]] == [u.end for u in found[:-1]]
    assert (found[0].start, found[-1].end) == (0, size)
    assert all(u.digests.size == size for u in found)


def test_a_range_has_the_digests_of_its_blocks() -> None:
    file = shard(level_digest.LARGE + 1)
    first, *rest = split(file, in_ranges=True)
    assert rest
    ranges = [r for u in (first, *rest) for r in compared_ranges(u.digests, u.start, u.end)]
    assert tuple(digest for _, _, digest in ranges) == file.recorded.blocks
    assert list(split(file, in_ranges=False)) == [whole(file)]
    of_model = model_file(2 * level_digest.LARGE, (8, level_digest.LARGE))
    assert split(of_model, in_ranges=True) == [whole(of_model)]


@settings(max_examples=40)
@given(st.floats(0.01, 1.0), st.integers(0, 1 << 40))
def test_a_sample_is_at_least_as_large_as_asked_and_hardly_larger(share: float, seed: int) -> None:
    files = [
        shard(100 * MIB, "a"),
        shard(50 * MIB, "b"),
        model_file(40 * MIB, (100, 3 * MIB), (4 * MIB, 20 * MIB)),
        shard(10, "c"),
    ]
    total = 100 * MIB + 50 * MIB + 23 * MIB + 10
    size = sum(stretch.size for stretch in choose_sample(files, Sample(share, seed)))
    assert share * total <= size <= share * total + 20 * MIB


def test_another_seed_takes_another_sample_and_the_same_seed_the_same() -> None:
    files = [shard(500 * MIB)]

    def choose(seed: int) -> list[Stretch]:
        return choose_sample(files, Sample(0.1, seed))

    assert choose(1) == choose(1) != choose(2)


@pytest.mark.parametrize("size", [0, 1, MIB])
def test_small_files_are_read_as_a_whole(size: int) -> None:
    assert choose_sample([shard(size)], Sample(1.0)) == ([whole(shard(size))] if size else [])
