"""Packed items: their names, streams read forward, backward, by many threads, damaged.

The tensor found by the item's head.
"""

from __future__ import annotations

import builtins
import contextlib
import random
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.formats import zstd_items
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.formats.zstd_items import (
    MOST_OPEN,
    PackedItem,
    Unpacked,
    check_transforms,
    load_tensor,
    parse_name,
    real_extent,
    virtual_name,
)
from ckptsync.safe_names import checked_path
from ckptsync.tensors import Extent, Part, Shape, read
from tests.support.files_in_memory import MemoryFiles, StorageId, tensor_call, torch_pickle
from tests.support.zstd_packing import packed, stream


@pytest.mark.parametrize("file", ["__0_0.distcp", "a b/__0_0.distcp", "ünï/12"])
def test_a_name_says_all_of_a_packed_item(file: str) -> None:
    packed = PackedItem(Extent(file, 7, 1 << 40), 704, 12)
    assert parse_name(virtual_name(packed)) == packed
    assert real_extent(Extent(virtual_name(packed), 3, 4)) == packed.item


def test_no_file_can_have_such_a_name() -> None:
    with pytest.raises(Corrupt):
        checked_path(virtual_name(PackedItem(Extent("f", 0, 1))))
    assert parse_name("__0_0.distcp") is None
    assert real_extent(Extent("f", 3, 4)) == Extent("f", 3, 4)


@pytest.mark.parametrize(
    "descriptors", [["stream.zstd/1"], ("stream.zstd/1",), ["stream.zstd/1.2"]]
)
def test_zstd_is_known(descriptors: object) -> None:
    check_transforms(descriptors)


@pytest.mark.parametrize(
    "descriptors",
    [
        ["stream.zstd/2"],
        ["aes/1"],
        ["stream.zstd/1", "aes/1"],
        ["stream.zstd"],
        [""],
        ["stream.zstd/"],
    ],
)
def test_anything_else_is_refused_by_its_name(descriptors: list[str]) -> None:
    with pytest.raises(Unsupported, match="transform_descriptors"):
        check_transforms(descriptors)


@pytest.mark.parametrize("descriptors", [7, "stream.zstd/1", [7], {"stream.zstd/1": 1}])
def test_what_is_no_list_of_names_is_corrupt(descriptors: object) -> None:
    with pytest.raises(Corrupt):
        check_transforms(descriptors)


DATA = random.Random(7).randbytes(300_000) + bytes(200_000)


@given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 200_000)), max_size=6))
@settings(max_examples=30, deadline=None)
def test_any_reads_in_any_order_give_the_bytes_that_were_packed(
    reads: list[tuple[int, int]],
) -> None:
    files, name = stream(DATA, before=b"head", behind=b"tail")
    unpacked = Unpacked(files)
    for start, count in reads:
        size = min(count, len(DATA) - start)
        assert read(unpacked, Extent(name, start, size)) == DATA[start : start + size]


def test_real_files_are_read_as_they_are_and_sizes_are_theirs() -> None:
    files, name = stream(DATA)
    unpacked = Unpacked(files)
    assert unpacked.sizes() == files.sizes()
    assert read(unpacked, Extent("__0_0.distcp", 0, 4)) == files.content["__0_0.distcp"][:4]
    assert zstd_items.unpacked(unpacked) is unpacked
    with pytest.raises(Incomplete):
        read(unpacked, Extent(name.replace("__0_0", "__1_0"), 0, 4))


def test_the_head_ends_where_the_stream_ends() -> None:
    files, name = stream(b"short")
    item = parse_name(name)
    assert item is not None
    assert Unpacked(files).head(item, 3) == b"sho"
    assert Unpacked(files).head(item, 4096) == b"short"


def test_reading_behind_the_end_is_corrupt() -> None:
    files, name = stream(DATA)
    with pytest.raises(Corrupt, match="ends at byte 500000"):
        read(Unpacked(files), Extent(name, len(DATA) - 5, 6))


def test_threads_that_share_a_stream_do_not_disturb_each_other() -> None:
    files, name = stream(DATA)
    unpacked = Unpacked(files)
    starts = [n * 1000 for n in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda at: read(unpacked, Extent(name, at, 1000)), starts)) == [
            DATA[at : at + 1000] for at in starts
        ]


def test_only_so_many_decompressors_are_kept() -> None:
    one, number = packed(DATA), 3 * MOST_OPEN
    files = MemoryFiles({"f": one * number})
    unpacked = Unpacked(files)
    for n in range(number):
        assert (
            read(
                unpacked,
                Extent(virtual_name(PackedItem(Extent("f", n * len(one), len(one)))), 9, 9),
            )
            == DATA[9:18]
        )
    assert len(unpacked._streams) == MOST_OPEN


def summed(crc: int) -> bytes:
    """A record of all of DATA, its descriptor behind it."""
    return DATA + b"PK\x07\x08" + crc.to_bytes(4, "little") + bytes(8)


@pytest.mark.parametrize("step", [1000, 4096, 130_000, len(DATA)])
def test_a_record_that_is_read_to_its_end_has_its_crc32(step: int) -> None:
    for crc, is_right in ((zlib.crc32(DATA), True), (zlib.crc32(DATA) ^ 1, False)):
        files, name = stream(summed(crc), 0, len(DATA))
        unpacked = Unpacked(files)
        found = [read(unpacked, Extent(name, at, step)) for at in range(0, len(DATA) - step, step)]
        at = step * len(found)
        last = Extent(name, at, len(DATA) - at)
        if is_right:
            assert b"".join([*found, read(unpacked, last)]) == DATA
        else:
            with pytest.raises(Corrupt, match="does not have its CRC32"):
                read(unpacked, last)


def test_a_record_that_is_read_from_its_middle_is_summed_from_its_start() -> None:
    files, name = stream(summed(1), 0, len(DATA))
    with pytest.raises(Corrupt, match="CRC32"):
        read(Unpacked(files), Extent(name, len(DATA) - 9, 9))


@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 20, 1000])
def test_a_damaged_stream_is_corrupt_or_fails_its_crc32(at: int) -> None:
    files, name = stream(summed(zlib.crc32(DATA)), 0, len(DATA))
    content = bytearray(files.content["__0_0.distcp"])
    content[at] ^= 0x41
    with contextlib.suppress(Corrupt):  # the usual answer; a bit that means nothing may be flipped
        assert (
            read(
                Unpacked(MemoryFiles({"__0_0.distcp": bytes(content)})), Extent(name, 0, len(DATA))
            )
            == DATA
        )


def test_a_stream_that_is_cut_short_is_corrupt() -> None:
    content = packed(DATA)
    name = virtual_name(PackedItem(Extent("f", 0, len(content) // 2)))
    with pytest.raises(Corrupt, match="more expected"):
        read(Unpacked(MemoryFiles({"f": content})), Extent(name, 0, len(DATA)))


def test_a_stream_that_wants_a_large_window_is_refused() -> None:
    packed(b"")  # skips where nothing unpacks
    # a window of 2 TiB, and an empty last block
    head = bytes.fromhex("28b52ffd") + bytes([0x00, 0xF8]) + b"\x01\x00\x00"
    with pytest.raises(Corrupt, match="no zstd stream"):
        read(
            Unpacked(MemoryFiles({"f": head})),
            Extent(virtual_name(PackedItem(Extent("f", 0, len(head)))), 0, 1),
        )


def test_a_bomb_costs_no_more_than_what_is_asked_of_it() -> None:
    files, name = stream(bytes(1 << 28))
    unpacked, packed_item = Unpacked(files), parse_name(name)
    assert packed_item is not None
    assert unpacked.head(packed_item, 1 << 16) == bytes(1 << 16)
    (one,) = unpacked._streams.values()
    assert one._at == 1 << 16


def test_without_a_library_it_is_said_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("zstandard", "compression"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unsupported, match="packed with zstd") as refused:
        read(
            Unpacked(MemoryFiles({"f": b"x"})),
            Extent(virtual_name(PackedItem(Extent("f", 0, 1))), 0, 1),
        )
    assert "ckptsync[zstd]" in refused.value.hint


class Library:
    """What `compression.zstd` of Python 3.14 has, made of the package: no Python here is so new."""

    class DecompressionParameter:
        window_log_max = 1

    def __init__(self, package: Any) -> None:
        self._package, self.ZstdError = package, package.ZstdError

    def ZstdDecompressor(self, options: object) -> Decoder:  # noqa: N802
        return Decoder(self._package.ZstdDecompressor().decompressobj())


class Decoder:
    """Bounded output, and ``needs_input`` while none is held back."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._held, self._is_over = inner, b"", False

    @property
    def eof(self) -> bool:
        return self._is_over and not self._held

    @property
    def needs_input(self) -> bool:
        return not self._held

    def decompress(self, data: bytes, most: int) -> bytes:
        if data:
            self._held += self._inner.decompress(data)
            self._is_over = self._inner.eof
        found, self._held = self._held[:most], self._held[most:]
        return found


def test_pythons_own_library_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("zstandard")
    files, name = stream(summed(zlib.crc32(DATA)), 0, len(DATA))
    monkeypatch.setitem(sys.modules, "compression", SimpleNamespace(zstd=Library(package)))
    assert read(Unpacked(files), Extent(name, 0, len(DATA))) == DATA
    with pytest.raises(Corrupt, match="more expected"):
        read(Unpacked(files), Extent(name, len(DATA), 999))


ELEMENTS = bytes(range(48))


def record(name: str, content: bytes, crc: int | None = None, method: int = 0) -> bytes:
    """As torch streams one: no size in front, a descriptor behind."""
    head = (
        struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0x808, method, 0, 0, 0, 0, 0, len(name), 0)
        + name.encode()
    )
    told = zlib.crc32(content) if crc is None else crc
    return head + content + struct.pack("<4s3L", b"PK\x07\x08", told, len(content), len(content))


def archive(
    shape: Shape = (3, 4),
    strides: Shape = (4, 1),
    offset: int = 0,
    order: bytes = b"little",
    crc: int | None = None,
) -> bytes:
    pickle = torch_pickle(tensor_call(StorageId("FloatStorage", "0", 12), offset, shape, strides))
    parts = [("data.pkl", pickle), (".storage_alignment", b"64"), ("byteorder", order)]
    return (
        b"".join(record(f"archive/{n}", c, crc) for n, c in parts)
        + record("archive/data/0", ELEMENTS, crc)
        + bytes(300)
    )


def item(content: bytes) -> tuple[Unpacked, StoredTensor, Part]:
    data = packed(content)
    files = Unpacked(MemoryFiles({"f": b"before" + data}))
    return files, *load_tensor(files, Extent("f", 6, len(data)))


def test_the_tensor_lies_in_the_stream_where_the_head_says() -> None:
    files, stored, part = item(archive())
    assert (stored.dtype, stored.shape, part.sizes, part.strides) == ("F32", (3, 4), (3, 4), None)
    assert read(files, part.extent) == ELEMENTS
    told = parse_name(part.extent.file)
    assert told is not None
    assert (told.first, told.length) == (part.extent.start, 48)


def test_strides_and_a_view_into_its_storage_are_kept() -> None:
    files, _, part = item(archive((2, 3), (1, 2), 5))
    assert part.strides == (1, 2)
    assert read(files, part.extent) == ELEMENTS[20:44]


def test_sums_that_were_switched_off_are_not_held_against_the_bytes() -> None:
    files, _, part = item(archive(crc=0))
    assert read(files, part.extent) == ELEMENTS


def test_another_byte_order_is_refused() -> None:
    with pytest.raises(Unsupported, match="byte order"):
        item(archive(order=b"big"))


def test_a_flipped_bit_of_the_tensor_is_found_by_the_sum_behind_it() -> None:
    content = bytearray(archive())
    content[content.index(ELEMENTS) + 7] ^= 1
    files, _, part = item(bytes(content))
    with pytest.raises(Corrupt, match="CRC32"):
        read(files, part.extent)


def test_every_cut_of_the_head_is_corrupt() -> None:
    content = archive()
    for size in range(content.index(ELEMENTS)):
        with pytest.raises(Corrupt):
            item(content[:size])


def test_every_changed_byte_of_the_head_is_read_or_refused_and_never_crashes() -> None:
    content = archive()
    for at in range(content.index(ELEMENTS)):
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[at] ^= change
            with contextlib.suppress(CkptsyncError):
                item(bytes(changed))


def test_a_compressed_record_and_a_stream_of_something_else_are_refused() -> None:
    with pytest.raises(Unsupported, match="compressed record"):
        item(record("archive/data.pkl", b"x", method=8))
    with pytest.raises(Corrupt, match="does not begin with data"):
        item(record("archive/other", b"x"))
    with pytest.raises(Corrupt, match="no archive"):
        item(bytes(500))
    with pytest.raises(Corrupt, match="no tensor"):
        item(record("archive/data.pkl", torch_pickle(7)))
