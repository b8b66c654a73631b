"""A packed item is found by its head: every cut, every changed byte of it."""

from __future__ import annotations

import contextlib
import struct
import zlib

import pytest

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats import packed_item
from ckptsync.formats.packed import parse
from ckptsync.formats.torch_pickle import Stored
from ckptsync.formats.unpacking import Unpacked
from ckptsync.model import Extent, Part, Shape, read
from tests.packing import packed
from tests.plain_files import MemoryFiles, StorageId, tensor_call, torch_pickle

DATA = bytes(range(48))


def record(name: str, content: bytes, crc: int | None = None, method: int = 0) -> bytes:
    """As torch streams one: no size in front, a descriptor behind."""
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0x808, method, 0, 0, 0, 0, 0, len(name), 0) + name.encode()
    told = zlib.crc32(content) if crc is None else crc
    return head + content + struct.pack("<4s3L", b"PK\x07\x08", told, len(content), len(content))


def archive(
    shape: Shape = (3, 4), strides: Shape = (4, 1), offset: int = 0, order: bytes = b"little", crc: int | None = None
) -> bytes:
    pickle = torch_pickle(tensor_call(StorageId("FloatStorage", "0", 12), offset, shape, strides))
    parts = [("data.pkl", pickle), (".storage_alignment", b"64"), ("byteorder", order)]
    return b"".join(record(f"archive/{n}", c, crc) for n, c in parts) + record("archive/data/0", DATA, crc) + bytes(300)


def load(content: bytes) -> tuple[Unpacked, Stored, Part]:
    data = packed(content)
    files = Unpacked(MemoryFiles({"f": b"before" + data}))
    return files, *packed_item.load(files, Extent("f", 6, len(data)))


def test_the_tensor_lies_in_the_stream_where_the_head_says() -> None:
    files, stored, part = load(archive())
    assert (stored.dtype, stored.shape, part.sizes, part.strides) == ("F32", (3, 4), (3, 4), None)
    assert read(files, part.extent) == DATA
    told = parse(part.extent.file)
    assert told is not None
    assert (told.first, told.length) == (part.extent.start, 48)


def test_strides_and_a_view_into_its_storage_are_kept() -> None:
    files, _, part = load(archive((2, 3), (1, 2), 5))
    assert part.strides == (1, 2)
    assert read(files, part.extent) == DATA[20:44]


def test_sums_that_were_switched_off_are_not_held_against_the_bytes() -> None:
    files, _, part = load(archive(crc=0))
    assert read(files, part.extent) == DATA


def test_another_byte_order_is_refused() -> None:
    with pytest.raises(Unsupported, match="byte order"):
        load(archive(order=b"big"))


def test_a_flipped_bit_of_the_tensor_is_found_by_the_sum_behind_it() -> None:
    content = bytearray(archive())
    content[content.index(DATA) + 7] ^= 1
    files, _, part = load(bytes(content))
    with pytest.raises(Corrupt, match="CRC32"):
        read(files, part.extent)


def test_every_cut_of_the_head_is_corrupt() -> None:
    content = archive()
    for size in range(content.index(DATA)):
        with pytest.raises(Corrupt):
            load(content[:size])


def test_every_changed_byte_of_the_head_is_read_or_refused_and_never_crashes() -> None:
    content = archive()
    for at in range(content.index(DATA)):
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[at] ^= change
            with contextlib.suppress(CkptsyncError):
                load(bytes(changed))


def test_a_compressed_record_and_a_stream_of_something_else_are_refused() -> None:
    with pytest.raises(Unsupported, match="compressed record"):
        load(record("archive/data.pkl", b"x", method=8))
    with pytest.raises(Corrupt, match="does not begin with data"):
        load(record("archive/other", b"x"))
    with pytest.raises(Corrupt, match="no archive"):
        load(bytes(500))
    with pytest.raises(Corrupt, match="no tensor"):
        load(record("archive/data.pkl", torch_pickle(7)))
