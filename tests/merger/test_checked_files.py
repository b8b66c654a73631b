from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import Digester, digest_stream
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.merger.checked_files import CheckedFiles
from ckptsync.merger.readers import open_reader
from ckptsync.records.manifest import FileEntry
from ckptsync.stores.checkpoint_files import StoreFiles
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Extent, foresee, read

DATA = random.Random(1).randbytes(50_000)  # whole blocks and a shorter one
FOUND = digest_stream([DATA], len(DATA))
BLOCK = FOUND.block_size
ENTRY = FileEntry("x", len(DATA), FOUND.digest, FOUND.block_size, FOUND.blocks, 0)


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


def files(data: bytes = DATA) -> tuple[CheckedFiles, Counted]:
    store = MemoryStore()
    store.write("run/x", [data])
    store.write("run/y", [b"nobody names this"])
    counted = Counted(store, {"x": ("run/x", len(data)), "y": ("run/y", 17)})
    return CheckedFiles(counted, {"x": ENTRY}), counted


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)))
def test_what_is_read_is_what_is_there(a: int, b: int) -> None:
    start, end = sorted((a, b))
    assert read(files()[0], Extent("x", start, end - start)) == DATA[start:end]


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.integers(0, len(DATA) - 1))
def test_a_changed_byte_in_a_block_that_is_touched_is_noticed(a: int, b: int, at: int) -> None:
    start, end = sorted((a, b))
    changed = DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :]
    touched = (
        start < end
        and start // FOUND.block_size <= at // FOUND.block_size <= (end - 1) // FOUND.block_size
    )
    if touched:
        with pytest.raises(Corrupt, match="not those that its node sent"):
            read(files(changed)[0], Extent("x", start, end - start))
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


LARGE = random.Random(2).randbytes(5 << 20)  # one block, longer than what is read at once


def large(wrong: bool = False) -> tuple[CheckedFiles, Counted]:  # noqa: FBT001, FBT002
    digester = Digester(len(LARGE), 8 << 20)
    digester.update(LARGE)
    made = digester.result()
    store = MemoryStore()
    store.write("run/x", [LARGE])
    counted = Counted(store, {"x": ("run/x", len(LARGE))})
    counted.is_wrong = wrong
    entry = FileEntry("x", len(LARGE), made.digest, made.block_size, made.blocks, 0)
    return CheckedFiles(counted, {"x": entry}), counted


@pytest.mark.parametrize("start", [0, 7, 2 << 20, len(LARGE) - (1 << 20)])
def test_of_a_large_block_each_byte_is_read_once_and_those_handed_up_are_digested(
    start: int,
) -> None:
    checked, counted = large()
    assert read(checked, Extent("x", start, 1 << 20)) == LARGE[start : start + (1 << 20)]
    assert counted.read == len(LARGE)
    with pytest.raises(Corrupt, match="not those that its node sent"):
        read(large(wrong=True)[0], Extent("x", start, 1 << 20))


@pytest.mark.parametrize(("start", "size"), [(10, 10), (0, BLOCK), (BLOCK - 5, 10)])
def test_bytes_that_only_the_first_read_got_wrong_are_not_merged(start: int, size: int) -> None:
    checked, counted = files()
    counted.is_wrong = True
    with pytest.raises(Corrupt):
        read(checked, Extent("x", start, size))


def test_what_no_manifest_names_is_not_there() -> None:
    assert set(files()[0].sizes()) == {"x"}
    with pytest.raises(Incomplete):
        read(files()[0], Extent("y", 0, 1))


def test_what_is_foreseen_is_fetched_ahead_beneath_the_checks() -> None:
    store = MemoryStore()
    store.write("run/x", [LARGE])
    made = digest_stream([LARGE], len(LARGE))
    entry = FileEntry("x", len(LARGE), made.digest, made.block_size, made.blocks, 0)
    reads = [Extent("x", at, 1000) for at in range(0, len(LARGE) - 1000, 100_000)]
    calls: list[int] = []
    for is_foreseen in (False, True):
        counted = Counted(store, {"x": ("run/x", len(LARGE))})
        checked = open_reader(counted, [store], {"x": entry}, 8 << 20)
        if is_foreseen:
            foresee(checked, [(extent, extent.start) for extent in reads])
        for extent in reads:
            assert read(checked, extent) == LARGE[extent.start : extent.start + 1000]
        calls.append(counted.calls)
    assert calls[1] < calls[0] / 4
