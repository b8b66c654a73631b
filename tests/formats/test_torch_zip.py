"""The zip reader against Python's own, and against archives that torch would never write."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.torch_save import load, part
from ckptsync.formats.torch_zip import Archive, checksum, extent, has_end, open_archive, pickle_of
from ckptsync.tensors import Extent, read
from tests.hostile import zips
from tests.support.files_in_memory import MemoryFiles, torch_zip_file
from tests.support.torch_bytes import saved

REAL = saved({"w": torch.arange(6.0).reshape(2, 3), "step": 3})
SMALL = torch_zip_file({"data.pkl": b"N.", "byteorder": b"little", "data/0": b"12345678"})


def opened(data: bytes, before: int = 0, after: int = 0) -> tuple[MemoryFiles, Archive]:
    files = MemoryFiles({"m": b"\xaa" * before + data + b"\xbb" * after})
    return files, open_archive(files, Extent("m", before, len(data)))


def records(data: bytes, before: int = 0, after: int = 0) -> dict[str, bytes]:
    files, archive = opened(data, before, after)
    return {name: read(files, extent(files, archive, name)) for name in archive.records}


def by_zipfile(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def zip64(records: dict[str, bytes]) -> bytes:
    """Every local header, directory entry and end record in its zip64 form, as torch writes beyond
    4 GiB.
    """
    out, directory, full = b"", b"", 2**32 - 1
    for name, data in records.items():
        path, crc = f"archive/{name}".encode(), zlib.crc32(data)
        sizes = (crc, full, full, len(path))
        another = struct.pack("<2H5s", 0x5455, 5, b"times")
        extra = another + struct.pack("<2H3Q", 1, 24, len(data), len(data), len(out))
        directory += (
            struct.pack(
                "<4s6H3L5H2L", b"PK\x01\x02", 45, 45, 0, 0, 0, 0, *sizes, 37, 0, 0, 0, 0, full
            )
            + path
            + extra
        )
        out += (
            struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, *sizes, 4)
            + path
            + b"xx\0\0"
            + data
        )
    end = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *[len(records)] * 2, len(directory), len(out)
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(out) + len(directory), 1)
    return (
        out
        + directory
        + end
        + locator
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *[2**16 - 1] * 2, full, full, 0)
    )


@given(
    st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn]),
        max_size=4,
    ),
    st.integers(0, 2000),
    st.integers(0, 100),
)
@settings(max_examples=30)
def test_real_archives_have_the_records_that_zipfile_finds(
    kinds: list[torch.dtype], before: int, after: int
) -> None:
    data = saved([torch.zeros(n * 7, dtype=kind) for n, kind in enumerate(kinds)])
    assert records(data, before, after) == by_zipfile(data)


@pytest.mark.parametrize("force", [True, False])
def test_what_python_writes_is_read_with_zip64_headers_too(force: bool) -> None:  # noqa: FBT001
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", allowZip64=True) as archive:
        for name, data in {"data.pkl": b"N.", "data/0": bytes(range(100))}.items():
            with archive.open(f"archive/{name}", "w", force_zip64=force) as record:
                record.write(data)
    assert records(out.getvalue(), 3) == by_zipfile(out.getvalue())


@pytest.mark.parametrize("before", [0, 1000])
def test_sizes_and_offsets_are_taken_from_zip64_records(before: int) -> None:
    content = {
        "data.pkl": b"N.",
        "byteorder": b"little",
        "data/0": bytes(range(200)),
        "data/1": b"",
    }
    assert by_zipfile(zip64(content)) == content
    assert records(zip64(content), before, 5) == content


@pytest.mark.parametrize(
    "data",
    [REAL, SMALL, zip64({"data.pkl": b"N.", "data/0": b"x"})],
    ids=["real", "small", "zip64"],
)
def test_an_archive_cut_anywhere_is_corrupt(data: bytes) -> None:
    for size in range(len(data)):
        files = MemoryFiles({"m": data[:size]})
        assert not has_end(files, Extent("m", 0, size))
        with pytest.raises(Corrupt, match="m"):
            open_archive(files, Extent("m", 0, size))
    assert has_end(MemoryFiles({"m": data}), Extent("m", 0, len(data)))


SAID = {"two-pickles": r"2 data\.pkl", "no-pickle": r"0 data\.pkl", "duplicate": "two records"}
SAID |= {"comment": "no end record", "big-endian": "byte order b'big'"}
UNSUPPORTED = ("compressed-bomb", "big-endian", "odd-byteorder")


@pytest.mark.parametrize("lie", [lie for lie in zips.LIES if lie != "overlapping"])
def test_an_archive_that_lies_is_refused(lie: str) -> None:
    files = MemoryFiles({"m": zips.LIES[lie]})

    def read_weight() -> None:
        value, container = load(files, Extent("m", 0, len(zips.LIES[lie])))
        part(files, container, value["module"]["w"])

    with pytest.raises(Unsupported if lie in UNSUPPORTED else Corrupt, match=SAID.get(lie)):
        read_weight()


def test_the_records_of_an_archive_inside_a_file_stay_inside_it() -> None:
    data = bytearray(SMALL)
    at = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    # sizes beyond the archive, not beyond the file
    struct.pack_into("<2L", data, at + 20, 5000, 5000)
    with pytest.raises(Corrupt, match="not where the directory says"):
        records(bytes(data), 0, 9000)
    struct.pack_into("<L", data, at + 42, len(SMALL) - 5)
    with pytest.raises(Corrupt, match="behind the end"):
        records(bytes(data), 0, 9000)


@pytest.mark.parametrize(("at", "bit"), [(8, 1), (10, 8), (20, 4), (24, 4)])
def test_a_record_that_one_flipped_bit_calls_compressed_or_encrypted_is_damaged(
    at: int, bit: int
) -> None:
    data = bytearray(SMALL)
    data[data.index(b"PK\x01\x02") + at] ^= bit
    with pytest.raises(Corrupt, match="called compressed or encrypted, and is not"):
        opened(bytes(data))


def test_encrypted_records_are_refused() -> None:
    data = bytearray(SMALL)
    entry = data.index(b"PK\x01\x02")
    data[entry + 8] |= 1
    data[entry + 20] += 12  # the header that encryption puts in front
    with pytest.raises(Unsupported, match="encrypted"):
        opened(bytes(data))


def test_a_record_stored_and_called_compressed_by_its_own_header_is_refused() -> None:
    data = bytearray(SMALL)
    data[8] = 8
    with pytest.raises(Corrupt, match=r"data\.pkl is not where"):
        pickle_of(*opened(bytes(data)))


def test_a_record_has_the_crc_that_its_bytes_have() -> None:
    files, archive = opened(REAL, 11)
    where = extent(files, archive, "data/0")
    found = checksum(archive, "data/0", where)
    assert found is not None
    assert (found.extent, found.crc32) == (where, zlib.crc32(read(files, where)))


def test_a_damaged_pickle_is_corrupt() -> None:
    at = REAL.index(b"FloatStorage")
    with pytest.raises(Corrupt, match=r"data\.pkl does not have its CRC32"):
        pickle_of(*opened(REAL[:at] + b"f" + REAL[at + 1 :]))


def test_junk_where_torch_was_told_to_write_no_crc_is_not_taken_for_one() -> None:
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        data = saved(torch.arange(5))
    finally:
        torch.serialization.set_crc32_options(was)
    files, archive = opened(data)
    assert pickle_of(files, archive)
    assert checksum(archive, "data/0", extent(files, archive, "data/0")) is None


class Counted(MemoryFiles):
    """Counts reads."""

    reads = 0

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.reads += 1
        super().read_into(name, start, out)


def test_the_places_of_many_small_records_are_found_in_few_reads() -> None:
    data = torch_zip_file(
        {"data.pkl": b"N."} | {f"data/{n}": bytes([n % 256]) * 100 for n in range(3000)}
    )
    files = Counted({"m": data})
    archive = open_archive(files, Extent("m", 0, len(data)))
    found = [read(files, extent(files, archive, f"data/{n}")) for n in range(3000)]
    assert found == [bytes([n % 256]) * 100 for n in range(3000)]
    assert files.reads < 3000 + 50  # each read once, here
    assert files.read < 3 * len(data)


def test_of_large_records_little_more_than_their_headers_is_read() -> None:
    data = torch_zip_file(
        {"data.pkl": b"N.", "byteorder": b"little"}
        | {f"data/{n}": bytes(100_000) for n in range(20)}
    )
    files = Counted({"m": data})
    archive = open_archive(files, Extent("m", 0, len(data)))
    for n in (*range(20), 3, 19, 0):
        extent(files, archive, f"data/{n}")
    assert files.read < 8 * 1024
