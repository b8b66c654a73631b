"""Tensors of shards are named by metadata that is whole, and by no other."""

from __future__ import annotations

import pytest

from ckptsync.errors import StoreError
from ckptsync.formats import zstd_items
from ckptsync.layouts import table
from ckptsync.verify.naming import named
from tests import packing
from tests.plain_files import MemoryFiles, safetensors_file, tree
from tests.vector import vector

TWO = {
    "model-00001-of-00002.safetensors": safetensors_file({"a": ("U8", (9000,), bytes(9000))}),
    "model-00002-of-00002.safetensors": safetensors_file({"b": ("U8", (9000,), bytes(9000))}),
}
DCP = tree(*vector("hf-fsdp2-2node").sources)
ZERO = tree(*vector("hf-zero3-2node").sources)


def extents(files: MemoryFiles, layout: str) -> dict[str, list[tuple[str, int, int]]]:
    (source,) = [s for s in table.sources(files) if s.layout == layout]
    found: dict[str, list[tuple[str, int, int]]] = {}
    for tensor in table.tensors(files, source):
        for e in (p.extent for copy in tensor.copies for p in copy.parts):
            found.setdefault(e.file, []).append((tensor.name, e.start, e.start + e.size))
    return found


def damaged(files: MemoryFiles, path: str, at: int) -> MemoryFiles:
    data = bytearray(files.content[path])
    data[at] ^= 1
    return MemoryFiles({**files.content, path: bytes(data)})


@pytest.mark.parametrize(("files", "layout"), [(DCP, "dcp"), (ZERO, "zero")], ids=["dcp", "zero"])
def test_a_byte_of_a_shard_is_named_by_the_tensor_that_holds_it(files: MemoryFiles, layout: str) -> None:
    for path, spans in extents(files, layout).items():
        name, start, end = spans[len(spans) // 2]
        if not path.endswith("_model_states.pt"):
            assert name in named(damaged(files, path, start), {path: ((start, end),)})[path]


def test_the_last_byte_of_one_tensor_is_not_the_next_ones() -> None:
    path, spans = next(iter(extents(DCP, "dcp").items()))
    name, _, end = spans[0]
    assert named(DCP, {path: ((end - 1, end),)}) == {path: (name,)}
    assert named(DCP, {path: ((end, end + 1),)}) == {}


def test_the_head_of_an_item_says_where_its_tensor_lies_and_not_which_it_is() -> None:
    path, spans = next(iter(extents(DCP, "dcp").items()))
    found = named(damaged(DCP, path, spans[0][1]), {path: ((0, len(DCP.content[path])),)})
    assert found == {path: tuple(sorted({name for name, _, _ in spans}))}


def test_damaged_metadata_names_nothing() -> None:
    (metadata,) = [p for p in DCP.content if p.endswith("pytorch_model_fsdp_0/.metadata")]
    path, spans = next(iter(extents(DCP, "dcp").items()))
    damage = {path: (spans[0][1:],), metadata: ((0, 4096),)}
    assert named(DCP, damage) == {}
    assert named(damaged(DCP, metadata, 100), {path: (spans[0][1:],), metadata: ((0, 4096),)}) == {}


def test_a_damaged_header_silences_only_its_own_file() -> None:
    damage = {"model-00001-of-00002.safetensors": ((0, 8192),), "model-00002-of-00002.safetensors": ((8192, 9000),)}
    assert named(MemoryFiles(TWO), damage) == {"model-00002-of-00002.safetensors": ("b",)}


def test_files_without_tensors_have_no_names() -> None:
    assert named(MemoryFiles({**TWO, "config.json": b"{}"}), {"config.json": ((0, 2),)}) == {}
    assert named(MemoryFiles({"x.bin": b"1"}), {"x.bin": ((0, 1),)}) == {}


class Broken(MemoryFiles):
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        raise StoreError(f"{name}: input/output error")


def test_an_error_of_the_store_is_raised() -> None:
    with pytest.raises(StoreError):
        named(Broken(TWO), {"model-00001-of-00002.safetensors": ((0, 1),)})


def test_damage_in_a_packed_item_is_named_by_its_tensor() -> None:
    packing.packed(b"")  # skips where nothing unpacks
    files = tree(*vector("dcp-zstd").sources)
    (source,) = table.sources(files)
    for tensor in table.tensors(files, source):
        for part in tensor.copies[0].parts:
            where = zstd_items.real_extent(part.extent)
            end = where.start + where.size
            assert named(files, {where.file: ((end - 1, end),)}) == {where.file: (tensor.name,)}
