"""Small reads of what is far away: the same bytes, in few requests, within bounds."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import StoreError
from ckptsync.merger.readers import open_reader
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.prefetch import (
    AROUND,
    LARGE,
    MOST,
    NEAR,
    PrefetchedFiles,
    is_near,
)
from ckptsync.tensors import Extent, read

MIB = 1 << 20


class Far:
    """Files that tell what was asked of them; ``size`` bytes each."""

    def __init__(self, *names: str, size: int = 8 * MIB, takes: float = 0.0) -> None:
        self.content = {name: random.Random(name).randbytes(size) for name in names}
        self.requests: list[Extent] = []
        self.failing = 0
        self.at_once = self.most_at_once = 0
        self._takes, self._lock = takes, threading.Lock()

    def sizes(self) -> Mapping[str, int]:
        return {name: len(data) for name, data in self.content.items()}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._lock:
            self.requests.append(Extent(name, start, out.nbytes))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.failing -= 1
            fails = self.failing >= 0
        time.sleep(self._takes)
        with self._lock:
            self.at_once -= 1
        if fails:
            raise StoreError("the network is gone")
        out[:] = self.content[name][start : start + out.nbytes]


@pytest.fixture
def opened() -> Iterator[list[PrefetchedFiles]]:
    found: list[PrefetchedFiles] = []
    yield found
    for pieces in found:
        pieces.close()


SIZE = 8 * MIB


@pytest.mark.parametrize(
    ("reads", "requested"),
    [
        ([(at, 100) for at in (0, 8, 5000, 60_000)], Extent("a", 0, AROUND)),
        (
            [(SIZE - at, min(at, 76)) for at in (22, 98, 5000, AROUND)],
            Extent("a", SIZE - AROUND, AROUND),
        ),
        ([(5, LARGE)], Extent("a", 5, LARGE)),
    ],
    ids=["beside each other", "before the end", "large"],
)
def test_reads_are_one_request(reads: list[tuple[int, int]], requested: Extent) -> None:
    far = Far("a")
    pieces = PrefetchedFiles(far)
    for at, size in reads:
        assert read(pieces, Extent("a", at, size)) == far.content["a"][at : at + size]
    assert far.requests == [requested]


def test_memory_holds_what_was_read_last() -> None:
    far = Far("a")
    pieces = PrefetchedFiles(far, memory=2 * AROUND)
    for at in (0, 2 * MIB, 0, 4 * MIB, 0, 2 * MIB):
        read(pieces, Extent("a", at, 10))
    assert [-(-e.start // MIB) for e in far.requests] == [0, 2, 4, 2]


def test_what_is_expected_is_asked_for_at_once_and_before_it_is_read(
    opened: list[PrefetchedFiles],
) -> None:
    far = Far("a", takes=0.05)
    opened.append(pieces := PrefetchedFiles(far, threads=8))
    wanted = [Extent("a", at, 1000) for at in range(0, 4 * MIB, 64 << 10)]
    pieces.expect(wanted)
    assert [read(pieces, e) for e in wanted] == [
        far.content["a"][e.start : e.start + e.size] for e in wanted
    ]
    assert sorted(far.requests) == wanted
    assert far.most_at_once > 4


def test_what_is_expected_takes_half_of_the_memory_at_most() -> None:
    far = Far("a")
    pieces = PrefetchedFiles(far, memory=MIB)
    pieces.expect(Extent("a", at, 64 << 10) for at in range(0, 4 * MIB, 64 << 10))
    pieces.close()
    assert len(far.requests) == 8


def test_what_is_foreseen_is_read_in_large_pieces_each_byte_once(
    opened: list[PrefetchedFiles],
) -> None:
    far = Far("a", "b")
    opened.append(pieces := PrefetchedFiles(far, memory=16 * MIB))
    reads = [
        (Extent(name, at, 100_000), 2 * at)
        for at in range(0, 8 * MIB - 100_000, 100_000)
        for name in "ab"
    ]
    pieces.foresee(reads[::-1])
    for extent, _ in reads:
        pieces.expect([extent])
        assert (
            read(pieces, extent)
            == far.content[extent.file][extent.start : extent.start + extent.size]
        )
    assert len(far.requests) < len(reads) / 8
    assert sum(e.size for e in far.requests) == sum(e.size for e, _ in reads)
    assert max(e.size for e in far.requests) <= 2 * MIB, "a quarter of the memory, for two files"


def test_what_is_foreseen_for_much_later_or_lies_far_behind_is_not_fetched_now() -> None:
    far = Far("a")
    pieces = PrefetchedFiles(far, memory=16 * MIB)
    pieces.foresee(
        [
            (Extent("a", 0, 1000), 0),
            (Extent("a", 1000, 1000), 1 << 40),
            (Extent("a", 2001 + NEAR, 10), 0),
        ]
    )
    read(pieces, Extent("a", 0, 1000))
    assert far.requests == [Extent("a", 0, 1000)]


def test_a_long_range_is_read_piece_by_piece() -> None:
    far = Far("a", size=20 * MIB)
    pieces = PrefetchedFiles(far)
    pieces.foresee([(Extent("a", 1, 20 * MIB - 1), 0)])
    for at in range(1, 20 * MIB, 128 << 10):
        size = min(128 << 10, 20 * MIB - at)
        assert read(pieces, Extent("a", at, size)) == far.content["a"][at : at + size]
    assert max(e.size for e in far.requests) == MOST
    assert len(far.requests) < 8


@pytest.mark.parametrize("size", [40_000, 300_000])
def test_any_range_read_by_many_threads_is_what_was_asked_for_though_memory_is_short(
    size: int, opened: list[PrefetchedFiles]
) -> None:
    far = Far(*"abcdefgh", size=2 * MIB)
    opened.append(pieces := PrefetchedFiles(far, memory=MIB, threads=4))
    dice = random.Random(1)
    starts = [(name, at) for name in far.content for at in range(0, 2 * MIB - size, size)]
    dice.shuffle(starts)
    pieces.foresee([(Extent(name, at, size), at) for name, at in starts[::2]])

    def is_right(place: tuple[str, int]) -> bool:
        name, at = place
        pieces.expect([Extent(name, at, size)])
        return (
            read(pieces, Extent(name, at + 7, size - 1000))
            == far.content[name][at + 7 : at + size - 993]
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, starts * 4))


def test_what_fails_is_raised_and_asked_for_again_by_who_wants_it_next(
    opened: list[PrefetchedFiles],
) -> None:
    far = Far("a")
    opened.append(pieces := PrefetchedFiles(far))
    far.failing = 1
    pieces.expect([Extent("a", 0, 10)])
    while far.failing > 0:
        time.sleep(0.001)
    # raised if the reader still found the request that failed
    with contextlib.suppress(StoreError):
        read(pieces, Extent("a", 0, 10))
    assert read(pieces, Extent("a", 0, 10)) == far.content["a"][:10]
    far.failing = 1
    with pytest.raises(StoreError, match="network"):
        read(pieces, Extent("a", 4 * MIB, 10))
    assert read(pieces, Extent("a", 4 * MIB, 10)) == far.content["a"][4 * MIB : 4 * MIB + 10]


def test_what_is_near_is_read_as_it_is(tmp_path: object) -> None:
    files = Far("a")
    assert open_reader(files, [PosixStore(str(tmp_path))]) is files
    assert isinstance(
        open_reader(files, [PosixStore(str(tmp_path)), MemoryStore()]), PrefetchedFiles
    )
    assert not is_near(MemoryStore())
    assert is_near(create_store(str(tmp_path))), "whatever it is wrapped in"
