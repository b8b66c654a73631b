from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import digest_stream
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.merger.checked_files import CheckedFiles
from ckptsync.merger.readers import open_reader
from ckptsync.records.manifest import FileEntry
from ckptsync.stores.checkpoint_files import StoreFiles
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Extent, foresee, read

DATA = random.Random(1).randbytes(50_000)  # whole blocks and a shorter one
LARGE = random.Random(2).randbytes(5 << 20)  # one block, longer than what is read at once


def entry(data: bytes, block_size: int) -> FileEntry:
    made = digest_stream([data], len(data), block_size)
    return FileEntry("x", len(data), made.digest, made.block_size, made.blocks, 0)


BLOCK = 16 << 10
ENTRIES = {DATA: entry(DATA, BLOCK), LARGE: entry(LARGE, 8 << 20)}


class Counted(StoreFiles):
    read = calls = 0
    is_wrong = False

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.read += out.nbytes
        self.calls += 1
        super().read_into(name, start, out)
        if self.is_wrong:
            out[out.nbytes // 2] ^= 1
            self.is_wrong = False


def files(data: bytes = DATA, own: bytes = DATA) -> tuple[CheckedFiles, Counted]:
    """Files whose manifest was made of ``own``, and that hold ``data``."""
    store = MemoryStore()
    store.write("run/x", [data])
    store.write("run/y", [b"nobody names this"])
    counted = Counted(store, {"x": ("run/x", len(data)), "y": ("run/y", 17)})
    return CheckedFiles(counted, {"x": ENTRIES[own]}), counted


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.integers(0, len(DATA) - 1))
def test_a_changed_byte_in_a_block_that_is_touched_is_noticed(a: int, b: int, at: int) -> None:
    start, end = sorted((a, b))
    changed = DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :]
    if start < end and start // BLOCK <= at // BLOCK <= (end - 1) // BLOCK:
        checked, extent = files(changed)[0], Extent("x", start, end - start)
        for _ in range(2):  # also when it is read again
            with pytest.raises(Corrupt, match="not those that its node sent"):
                read(checked, extent)
    else:
        assert read(files(changed)[0], Extent("x", start, end - start)) == DATA[start:end]


def test_whole_blocks_are_read_once() -> None:
    checked, counted = files()
    read(checked, Extent("x", 0, len(DATA)))
    assert counted.read == len(DATA)


def test_a_block_is_checked_once() -> None:
    checked, counted = files()
    for _ in range(3):
        read(checked, Extent("x", 10, 10))
    assert counted.read == 2 * 10 + BLOCK


@pytest.mark.parametrize(("start", "size"), [(0, BLOCK), (5, 3 * BLOCK)])
def test_a_block_that_is_read_whole_is_checked_each_time(start: int, size: int) -> None:
    checked, counted = files()
    read(checked, Extent("x", start, size))
    counted.is_wrong = True
    with pytest.raises(Corrupt, match="not those that its node sent"):
        read(checked, Extent("x", start, size))


@pytest.mark.parametrize("start", [0, 7, 2 << 20, len(LARGE) - (1 << 20)])
def test_of_a_large_block_each_byte_is_read_once_and_those_handed_up_are_digested(
    start: int,
) -> None:
    checked, counted = files(LARGE, LARGE)
    assert read(checked, Extent("x", start, 1 << 20)) == LARGE[start : start + (1 << 20)]
    assert counted.read == len(LARGE)
    checked, counted = files(LARGE, LARGE)
    counted.is_wrong = True
    with pytest.raises(Corrupt, match="not those that its node sent"):
        read(checked, Extent("x", start, 1 << 20))


@pytest.mark.parametrize(("start", "size"), [(10, 10), (0, BLOCK), (BLOCK - 5, 10)])
def test_bytes_that_only_the_first_read_got_wrong_are_not_merged(start: int, size: int) -> None:
    checked, counted = files()
    counted.is_wrong = True
    with pytest.raises(Corrupt):
        read(checked, Extent("x", start, size))


def test_what_no_manifest_names_or_holds_is_not_there() -> None:
    checked, _ = files()
    assert set(checked.sizes()) == {"x"}
    with pytest.raises(Incomplete):
        read(checked, Extent("y", 0, 1))
    with pytest.raises(Corrupt, match="50000 bytes, at least 50001 expected"):
        read(checked, Extent("x", 49_999, 2))


def test_what_is_foreseen_is_fetched_ahead_beneath_the_checks() -> None:
    store = MemoryStore()
    store.write("run/x", [LARGE])
    small_blocks = entry(LARGE, 0)
    reads = [Extent("x", at, 1000) for at in range(0, len(LARGE) - 1000, 100_000)]
    calls: list[int] = []
    for is_foreseen in (False, True):
        counted = Counted(store, {"x": ("run/x", len(LARGE))})
        checked = open_reader(counted, [store], {"x": small_blocks}, 8 << 20)
        if is_foreseen:
            foresee(checked, [(extent, extent.start) for extent in reads])
        for extent in reads:
            assert read(checked, extent) == LARGE[extent.start : extent.start + 1000]
        calls.append(counted.calls)
    assert calls[1] < calls[0] / 4
