"""CRC32s of the containers: any order of reads, every damage, and files that have none."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt
from ckptsync.merge import consolidate
from ckptsync.merge.plan import Options
from ckptsync.merge.prepare import prepare
from ckptsync.merge.summed import SummedFiles
from ckptsync.model import Checksum, Extent
from tests.plain_files import MemoryFiles, tree
from tests.vector import vector

DATA = bytes(range(200)) * 3
RECORDS = [Extent("f", 10, 100), Extent("f", 110, 300), Extent("f", 450, 1)]


def summed(data: bytes) -> SummedFiles:
    sums = [Checksum(e, zlib.crc32(DATA[e.start : e.start + e.size])) for e in RECORDS]
    return SummedFiles(MemoryFiles({"f": data}), sums)


def read(files: SummedFiles, start: int, size: int) -> bytes:
    out = bytearray(size)
    files.read_into("f", start, memoryview(out))
    return bytes(out)


def read_all(files: SummedFiles, reads: list[tuple[int, int]]) -> None:
    for start, size in reads:
        read(files, start, size)
    files.finish()


READS = st.lists(st.tuples(st.integers(0, 599), st.integers(0, 200)).map(lambda r: (r[0], min(r[1], 600 - r[0]))), max_size=12)


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
    damaged[data.draw(st.integers(record.start, record.start + record.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    files = summed(bytes(damaged))
    with pytest.raises(Corrupt, match="CRC32"):
        read_all(files, reads)


def test_the_last_read_of_a_record_tells() -> None:
    files = summed(DATA[:50] + b"!" + DATA[51:])
    read(files, 10, 60)
    with pytest.raises(Corrupt, match="f: bytes 10 to 110"):
        read(files, 70, 40)


def test_many_threads_that_read_over_each_other_sum_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files, summed_, crc32 = summed(DATA), [], zlib.crc32

    def counted(data: memoryview, before: int = 0) -> int:
        summed_.append(len(data))
        return crc32(data, before)

    monkeypatch.setattr("ckptsync.merge.summed.crc32", counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: read(files, at % 580, 20), range(0, 58_000, 7)))
    files.finish()
    assert sum(summed_) == sum(e.size for e in RECORDS)


def test_one_read_over_several_records_checks_each() -> None:
    for at in (50, 200, 450):
        with pytest.raises(Corrupt, match="CRC32"):
            read(summed(DATA[:at] + b"!" + DATA[at + 1 :]), 0, 600)


@pytest.mark.parametrize("name", ["hf-fsdp1", "hf-zero3-2node", "raw-ds-zero2-bf16-tied"])
def test_a_flipped_bit_in_any_tensor_that_is_read_stops_a_merge(name: str) -> None:
    files = tree(*vector(name).sources)
    job = prepare(files, Options(dtype="keep"))
    extents = sorted({part.extent for p in job.plans for t in p.tensors for part in t.copy.parts})
    for extent in extents[:: max(1, len(extents) // 20)]:
        damaged = bytearray(files.content[extent.file])
        damaged[extent.start + extent.size // 2] ^= 0x10
        with pytest.raises(Corrupt, match="CRC32"):
            consolidate.carry_out(
                job, MemoryFiles({**files.content, extent.file: bytes(damaged)}), lambda _, chunks: [*chunks].clear()
            )


def test_sums_of_several_readers_are_joined_and_what_overlaps_is_summed_again() -> None:
    """Readers of other machines: each has read some, and nobody all."""
    for data, is_right in ((DATA, True), (DATA[:50] + b"!" + DATA[51:], False)):
        here, told = summed(DATA), [summed(data) for _ in range(3)]
        for one, (start, size) in zip(told, ((0, 60), (55, 30), (85, 25)), strict=True):
            read(one, start, size)
        if is_right:
            assert join(here, told) == 1
        else:
            with pytest.raises(Corrupt, match="f: bytes 10 to 110"):
                join(here, told)


def join(here: SummedFiles, told: list[SummedFiles]) -> int:
    for one in told:
        here.take_as_read(one.whole())
        here.join(one.stretches())
    here.finish()
    return sum(e.start == 10 for e in here.whole())


def test_what_was_read_to_its_end_elsewhere_is_not_read_again() -> None:
    told, here = summed(DATA), summed(b"")
    for record in RECORDS:
        read(told, record.start, record.size)
    here.take_as_read(told.whole())
    here.finish()  # which would find no bytes
