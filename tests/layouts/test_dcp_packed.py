"""Whole checkpoints whose items are packed: the same tensors as of those that are not."""

from __future__ import annotations

import random

import pytest

from ckptsync.errors import Corrupt
from ckptsync.formats.zstd_items import unpacked
from ckptsync.layouts import dcp
from ckptsync.merge.copying import Work
from ckptsync.merge.plan import Options, plan
from ckptsync.merge.prepare import prepare
from ckptsync.model import Shape, read
from tests.consolidated import consolidate
from tests.dcp_files import DATA, Chunk, found, metadata
from tests.formats.test_zstd_items import ELEMENTS as LONG
from tests.formats.test_zstd_items import archive, record
from tests.packing import packed
from tests.plain_files import MemoryFiles, StorageId, tensor_call, torch_pickle

ZSTD = ("stream.zstd/1",)


def checkpoint(shape: Shape = (3, 4), dtype: str = "float32", transforms: tuple[str, ...] = ZSTD) -> MemoryFiles:
    data = packed(archive())
    chunk = Chunk((0,) * len(shape), shape, "__0_0.distcp", 3, len(data), transforms)
    return MemoryFiles({".metadata": metadata({"w": (dtype, shape, (chunk,))}), "__0_0.distcp": b"\0\0\0" + data})


def test_a_packed_tensor_is_found_and_read() -> None:
    files = checkpoint()
    (part,) = found(files)["w"].copies[0].parts
    assert read(unpacked(files), part.extent) == LONG
    plan(dcp.tensors(files, ""), Options())
    assert DATA != LONG


def test_a_job_names_the_real_files_that_it_reads() -> None:
    assert prepare(checkpoint(), Options()).reads == {"__0_0.distcp"}


@pytest.mark.parametrize(("shape", "dtype"), [((4, 3), "float32"), ((12,), "float32"), ((3, 4), "int32")])
def test_a_packed_item_that_is_another_tensor_is_corrupt(shape: Shape, dtype: str) -> None:
    with pytest.raises(Corrupt, match="is not the"):
        found(checkpoint(shape, dtype))


def test_a_packed_item_that_is_called_plain_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        found(checkpoint(transforms=()))


class Counting(MemoryFiles):
    """Counts the bytes that are read of shards."""

    read_bytes = 0

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.read_bytes += len(out) if name.endswith(".distcp") else 0
        super().read_into(name, start, out)


def test_threads_do_not_make_it_be_unpacked_again_and_again() -> None:
    data = random.Random(1).randbytes(16 << 20)
    pickle = torch_pickle(tensor_call(StorageId("FloatStorage", "0", len(data) // 4), 0, (len(data) // 4,), (1,)))
    held = packed(
        b"".join(record(f"archive/{n}", c) for n, c in (("data.pkl", pickle), ("byteorder", b"little"), ("data/0", data)))
    )
    chunk = Chunk((0,), (len(data) // 4,), "__0_0.distcp", 0, len(held), ZSTD)
    files = Counting({".metadata": metadata({"w": ("float32", (len(data) // 4,), (chunk,))}), "__0_0.distcp": held})
    written: list[bytes] = []
    consolidate(files, lambda name, chunks: written.extend(map(bytes, chunks)), Options(), work=Work(4))
    assert b"".join(written).endswith(data)
    assert files.read_bytes < 1.2 * len(held)
