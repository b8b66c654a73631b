"""Distributed checkpoints: tensors out of boxes.

Items found by comparison against each of them parsed in full.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats import torch_save
from ckptsync.layouts import dcp, registry
from ckptsync.layouts.dcp_metadata import StorageItem
from ckptsync.merger.plan import MergeOptions, plan
from ckptsync.tensors import Extent, Files, Part, Shape, Tensor, read
from tests.support.dcp_writer import DATA, WHOLE, Chunk, checkpoint, found, item, metadata, one
from tests.support.exhaustive import sampled
from tests.support.files_in_memory import MemoryFiles
from tests.support.random_boxes import tilings
from tests.support.torch_bytes import saved


def rebuilt(files: MemoryFiles, tensor: Tensor) -> bytes:
    out = np.zeros(tensor.shape, "<u4")
    for part in tensor.copies[0].parts:
        where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        out[where] = np.frombuffer(read(files, part.extent), "<u4").reshape(part.sizes)
    return out.tobytes()


@given(tilings(), st.sampled_from(["", "pytorch_model_fsdp_0"]))
def test_any_boxes_are_found_where_they_lie(
    tiling: tuple[Shape, tuple[tuple[Shape, Shape], ...]], root: str
) -> None:
    shape, boxes = tiling
    values = np.arange(int(np.prod(shape)), dtype="<u4").reshape(shape)
    filled = {
        o: (n, values[tuple(slice(a, a + b) for a, b in zip(o, n, strict=True))].tobytes())
        for o, n in boxes
        if 0 not in n
    }
    files = MemoryFiles(checkpoint(root, {"w": (shape, filled)}))
    assert rebuilt(files, found(files, root)["w"]) == values.tobytes()
    plan(dcp.tensors(files, root), MergeOptions())


def test_a_root_is_a_directory_with_shards_or_their_metadata() -> None:
    names = [
        "a/.metadata",
        "b/__0_0.distcp",
        "c/__0_0.pt",
        "d/x.distcp",
        "__3_12.distcp",
        ".metadata.json",
        "e/f/.metadata",
    ]
    assert dcp.roots(names) == ("", "a", "b", "e/f")


def test_every_file_is_demanded_with_the_size_that_its_last_item_gives_it() -> None:
    chunks = (Chunk((0,), (2,), "__0_0.distcp", 100, 50), Chunk((2,), (2,), "__1_0.distcp", 0, 70))
    more = (Chunk((0,), (4,), "__0_0.distcp", 10, 60),)
    data = metadata({"w": ("float32", (4,), chunks), "v": ("float32", (4,), more)})
    files = MemoryFiles({"m/.metadata": data})
    assert dcp.demands(files, "m") == {
        "m/.metadata": len(data),
        "m/__0_0.distcp": 150,
        "m/__1_0.distcp": 70,
    }


@pytest.mark.parametrize(
    ("path", "is_resumable"),
    [
        (("optimizer", "state", "w", "exp_avg"), True),
        (("optimizer", "state.w.exp_avg"), True),  # torchtitan's
        (("app", "optim", "state", "w", "exp_avg"), True),
        (("opt", "param_groups", 0, "lr"), True),  # a name of the script's own
        (("model", "optimizer"), False),  # a weight
        (("step",), False),
        (("lr_scheduler", "last_epoch"), False),
    ],
)
def test_a_model_beside_its_optimizer_demands_the_same_files_for_resuming(
    path: tuple[object, ...], *, is_resumable: bool
) -> None:
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 60)
    paths = {"model.w": ("model", "w"), "other": path}
    data = metadata({"model.w": ("float32", (4,), (chunk,))}, paths, ["other"])
    demands = registry.demands(MemoryFiles({".metadata": data, "__0_0.distcp": bytes(60)}))
    assert demands.model == {".metadata": len(data), "__0_0.distcp": 60}
    assert demands.resume == (demands.model if is_resumable else {})


@pytest.mark.parametrize(
    "name", ["a.b.c", "with space", "ünï.cödé", "model.model.x", "a/b", "..", "x\ny"]
)
def test_names_are_kept_letter_by_letter(name: str) -> None:
    assert found(one(name, blobs=("step", "model.extra"))).keys() == {name}
    assert found(one(f"model.{name}", paths={f"model.{name}": ("model", name)})).keys() == {name}


def test_a_checkpoint_of_nothing_but_other_things_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="without model tensors"):
        dcp.tensors(MemoryFiles({".metadata": metadata({}, blobs=("step",))}), "")


def test_optimizer_states_alone_are_not_taken_for_a_model() -> None:
    files = one(root="optimizer_0")
    assert registry.sources(files) == ()
    with pytest.raises(Unsupported, match="no known checkpoint among"):
        registry.choose(files, None)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5,), "float32"), ((2, 2), "float32"), ((4,), "int32"), ((4,), "bfloat16")],
)
def test_an_item_that_is_another_tensor_is_corrupt(shape: Shape, dtype: str) -> None:
    held = item(DATA, (4,))
    chunk = Chunk((0,) * len(shape), shape, "__0_0.distcp", 0, len(held))
    told = metadata({"w": (dtype, shape, (chunk,))})
    with pytest.raises(Corrupt, match="is not the"):
        dcp.tensors(MemoryFiles({".metadata": told, "__0_0.distcp": held}), "")


def test_a_chunk_of_another_rank_is_corrupt() -> None:
    for offsets, sizes in [((0, 0), (4, 1)), ((0,), (4, 1)), ((0, 0), (4,))]:
        told = metadata({"w": ("float32", (4,), (Chunk(offsets, sizes, "__0_0.distcp", 0, 9),))})
        with pytest.raises(Corrupt, match="has a chunk at"):
            dcp.tensors(MemoryFiles({".metadata": told}), "")


def test_tensors_in_one_block_of_safetensors_are_refused_by_name() -> None:
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, 16)
    head = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    block = len(head).to_bytes(8, "little") + head + DATA
    files = MemoryFiles(
        {".metadata": metadata({"w": ("float32", (4,), (chunk,))}), "__0_0.distcp": block}
    )
    with pytest.raises(Unsupported, match=r"__0_0\.distcp: .*SerializationFormat\.SAFETENSORS"):
        dcp.demands(files, "")


def test_a_section_may_be_asked_for_by_its_name() -> None:
    paths = {"a.w": ("a", "w"), "b.w": ("b", "w")}
    files = MemoryFiles(
        checkpoint(
            "x", {"a.w": ((4,), WHOLE), "b.w": ((4,), {(0,): ((4,), DATA[::-1])})}, paths=paths
        )
    )
    with pytest.raises(Unsupported, match="2 sets of weights") as refused:
        registry.tensors(files, registry.choose(files, None))
    assert refused.value.hint == "--source 'dcp:x#a' or --source 'dcp:x#b'"
    chosen = registry.choose(files, "dcp:x#b")
    assert str(chosen) == "dcp:x#b"
    (tensor,) = registry.tensors(files, chosen)
    assert (tensor.name, read(files, tensor.copies[0].parts[0].extent)) == ("w", DATA[::-1])


def test_a_directory_whose_name_has_the_mark_of_a_section_is_a_directory() -> None:
    assert found(one(root="run#a"), "run#a").keys() == {"w"}


def test_an_average_beside_the_model_is_left_out_and_said() -> None:
    paths = {"model.w": ("model", "w"), "ema.w": ("ema", "w")}
    files = MemoryFiles(
        checkpoint(
            "", {"model.w": ((4,), WHOLE), "ema.w": ((4,), {(0,): ((4,), DATA[::-1])})}, paths=paths
        )
    )
    (tensor,) = dcp.tensors(files, "")
    assert tensor.remark == "'ema' beside the weights is left out: --source 'dcp:.#ema' takes it"
    assert read(files, tensor.copies[0].parts[0].extent) == DATA
    (average,) = dcp.tensors(files, ".#ema")
    assert (read(files, average.copies[0].parts[0].extent), average.remark) == (DATA[::-1], "")


ALIKE = [saved(torch.full((5, 3), float(n))) for n in range(6)]


def placed(file: str, start: int, size: int) -> StorageItem:
    found = StorageItem()
    found.take(["relative_path", file, "offset", start, "length", size])
    return found


def together(blobs: Sequence[bytes], file: str = "f") -> tuple[MemoryFiles, list[StorageItem]]:
    """Items back to back in one file."""
    ends = [0]
    for blob in blobs:
        ends.append(ends[-1] + len(blob))
    return MemoryFiles({file: b"".join(blobs)}), [
        placed(file, at, len(blob)) for at, blob in zip(ends, blobs, strict=False)
    ]


def in_full(files: Files, one: StorageItem) -> Part:
    stored, archive = torch_save.load_tensor(files, Extent(one.file, one.start, one.size))
    return torch_save.part(files, archive, stored)


def compared(files: Files, items: list[StorageItem]) -> list[Part]:
    return [
        Part((), stored.shape, extent, strides, crc)
        for stored, extent, strides, crc in dcp.find_items(files, items)
    ]


def check(blobs: Sequence[bytes]) -> None:
    files, items = together(blobs)
    for part, it in zip(compared(files, items), items, strict=True):
        expected = in_full(files, it)
        assert (part.sizes, part.extent, part.strides) == (
            expected.sizes,
            expected.extent,
            expected.strides,
        )
        assert part.checksum == expected.checksum


def test_items_of_one_length_can_be_of_several_kinds() -> None:
    check(ALIKE)
    square = torch.arange(16.0).reshape(4, 4)
    kinds = [square, square.t(), square.int(), square.reshape(2, 8), square.reshape(8, 2).t()]
    blobs = [saved(kind.clone(memory_format=torch.preserve_format)) for kind in kinds] * 3
    assert len(set(map(len, blobs))) < len(kinds)
    check(blobs)


def test_each_dtype_size_and_empty_tensor_is_found() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    check([saved(torch.zeros(n, dtype=dtype)) for dtype in dtypes for n in (0, 1, 7, 5000)] * 2)
    check([saved(torch.tensor(2.5)), saved(torch.tensor(3.5))])


def test_items_without_sums_are_told_from_those_with() -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        without = saved(torch.ones(5, 3))
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert len(without) == len(ALIKE[0])
    check([ALIKE[0], without, ALIKE[1], without])
    check([without, without, ALIKE[1]])


def test_a_changed_byte_anywhere_gives_what_a_full_parse_gives() -> None:
    for at in sampled(range(len(ALIKE[1])), 2):
        blob = bytearray(ALIKE[1])
        blob[at] ^= 0x14
        files, items = together([ALIKE[0], bytes(blob), ALIKE[2]])
        try:
            expected = in_full(files, items[1])
        except CkptsyncError as e:
            with pytest.raises(type(e)):
                compared(files, items)
            continue
        part = compared(files, items)[1]
        assert (part.checksum, part.extent) == (expected.checksum, expected.extent), at


def test_little_is_read_of_large_items_and_small_ones_are_read_once() -> None:
    large, items = together([saved(torch.full((100_000,), float(n))) for n in range(20)])
    dcp.find_items(large, items)
    assert large.read < 20 * 3 * 1024 + 8 * 1024
    small, items = together(ALIKE * 50)
    dcp.find_items(small, items)
    assert small.read < 1.1 * len(small.content["f"])


def test_items_come_in_any_order_and_from_several_files() -> None:
    one, items = together(ALIKE, "one")
    other, others = together(ALIKE[::-1], "other")
    files = MemoryFiles(one.content | other.content)
    mixed = [i for pair in zip(items, others[::-1], strict=True) for i in pair][::-1]
    assert [p.extent.file for p in compared(files, mixed)] == [i.file for i in mixed]
    assert [p.checksum for p in compared(files, mixed)] == [
        in_full(files, i).checksum for i in mixed
    ]


def test_what_is_no_archive_of_a_tensor_is_corrupt() -> None:
    out = io.BytesIO()
    torch.save({"a": 1}, out)
    for blob in (out.getvalue(), b"x" * 2000, b""):
        files, items = together([ALIKE[0], blob])
        with pytest.raises(Corrupt):
            dcp.find_items(files, items)
