"""CRC32s of the containers: any order of reads, every damage, and files that have none."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.merger.container_crcs import CrcCheckedFiles
from ckptsync.tensors import Checksum, Extent
from tests.support.files_in_memory import MemoryFiles

DATA = bytes(range(200)) * 3
RECORDS = [Extent("f", 10, 100), Extent("f", 110, 300), Extent("f", 450, 1)]


def summed(data: bytes) -> CrcCheckedFiles:
    sums = [Checksum(e, zlib.crc32(DATA[e.start : e.start + e.size])) for e in RECORDS]
    return CrcCheckedFiles(MemoryFiles({"f": data}), sums)


def read(files: CrcCheckedFiles, start: int, size: int) -> bytes:
    out = bytearray(size)
    files.read_into("f", start, memoryview(out))
    return bytes(out)


READS = st.lists(
    st.tuples(st.integers(0, 599), st.integers(0, 200)).map(
        lambda r: (r[0], min(r[1], 600 - r[0]))
    ),
    max_size=12,
)


@given(READS)
def test_sound_bytes_pass_in_whatever_order_they_are_read(reads: list[tuple[int, int]]) -> None:
    files = summed(DATA)
    for start, size in reads:
        assert read(files, start, size) == DATA[start : start + size]
    files.finish()


@given(READS, st.sampled_from(RECORDS), st.data())
def test_a_flipped_bit_in_a_record_is_found_in_whatever_order_it_is_read(
    reads: list[tuple[int, int]], record: Extent, data: st.DataObject
) -> None:
    damaged = bytearray(DATA)
    damaged[data.draw(st.integers(record.start, record.start + record.size - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    files = summed(bytes(damaged))
    with pytest.raises(Corrupt, match="CRC32"):  # noqa: PT012 - whichever read completes it
        for start, size in reads:
            read(files, start, size)
        files.finish()


def test_many_threads_that_read_over_each_other_sum_every_byte_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, summed_, crc32 = summed(DATA), [], zlib.crc32

    def counted(data: memoryview, before: int = 0) -> int:
        summed_.append(len(data))
        return crc32(data, before)

    monkeypatch.setattr("ckptsync.merger.container_crcs.crc32", counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: read(files, at % 580, 20), range(0, 20_000, 7)))
    files.finish()
    assert sum(summed_) == sum(e.size for e in RECORDS)


def test_sums_of_several_readers_are_joined_and_what_overlaps_is_summed_again() -> None:
    """Readers of other machines: each has read some, and nobody all."""
    for data, is_right in ((DATA, True), (DATA[:50] + b"!" + DATA[51:], False)):
        here, readers = summed(DATA), [summed(data) for _ in range(3)]
        for one, (start, size) in zip(readers, ((0, 60), (55, 30), (85, 25)), strict=True):
            read(one, start, size)
        if is_right:
            join(here, readers)
        else:
            with pytest.raises(Corrupt, match="f: bytes 10 to 110"):
                join(here, readers)


def join(here: CrcCheckedFiles, readers: list[CrcCheckedFiles]) -> None:
    for one in readers:
        here.join(one.stretches())
    here.finish()


@pytest.mark.parametrize("other", [0, 40])
def test_what_was_read_to_its_end_elsewhere_is_not_read_again(other: int) -> None:
    reader, here, part = summed(DATA), summed(b""), summed(DATA)
    for record in RECORDS:
        read(reader, record.start, record.size)
    read(part, 10, other)
    join(here, [part, reader, part])  # which would find no bytes


@pytest.mark.parametrize(("crc", "is_right"), [(0, True), (1, False)])
def test_an_empty_record_has_the_crc_of_no_bytes(crc: int, is_right: bool) -> None:  # noqa: FBT001
    files = CrcCheckedFiles(MemoryFiles({"f": DATA}), [Checksum(Extent("f", 450, 0), crc)])
    if is_right:
        files.finish()
    else:
        with pytest.raises(Corrupt, match="f: bytes 450 to 450"):
            files.finish()
