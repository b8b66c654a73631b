"""Tensors in pickles against torch, which wrote them; and against what no torch would write."""

from __future__ import annotations

import io
import zipfile
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import FROM_TORCH, ITEMSIZE, from_torch
from ckptsync.formats.pickles import Name
from ckptsync.formats.torch_pickle import StoredTensor, dtype_of, is_contiguous
from ckptsync.formats.torch_save import Container, load, load_tensor, part
from ckptsync.tensors import Extent, row_major
from tests.support.files_in_memory import (
    Call,
    Global,
    MemoryFiles,
    StorageId,
    tensor_call,
    torch_pickle,
    torch_zip_file,
)
from tests.support.torch_bytes import raw, saved


def loaded(data: bytes) -> tuple[MemoryFiles, Any, Container]:
    files = MemoryFiles({"m": b"\xcc" * 9 + data})
    value, archive = load(files, Extent("m", 9, len(data)))
    return files, value, archive


def elements(files: MemoryFiles, archive: Container, stored: StoredTensor) -> bytes:
    """The tensor row by row, gathered one element at a time."""
    found, size = part(files, archive, stored), ITEMSIZE[stored.dtype]
    held = files.content["m"][found.extent.start :][: found.extent.size]
    strides = found.strides or row_major(found.sizes)
    starts = (
        sum(i * s for i, s in zip(index, strides, strict=True)) * size
        for index in np.ndindex(*found.sizes)
    )
    return b"".join(held[at : at + size] for at in starts)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any view that torch can save: sliced, permuted, expanded, of a larger storage."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    base = torch.arange(prod(shape) + 5).to(
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
    )
    tensor = base[draw(st.integers(0, 5)) :][: prod(shape)].reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for axis in range(tensor.dim()):
        tensor = tensor.narrow(
            axis,
            low := draw(st.integers(0, tensor.shape[axis])),
            draw(st.integers(0, tensor.shape[axis] - low)),
        )
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if draw(st.booleans()) else tensor


@given(views())
def test_any_view_is_found_as_torch_has_it(tensor: torch.Tensor) -> None:
    files, value, archive = loaded(saved(tensor))
    assert (value.shape, value.dtype, value.numel) == (
        tuple(tensor.shape),
        from_torch(str(tensor.dtype)[6:]),
        tensor.numel(),
    )
    assert elements(files, archive, value) == raw(tensor)
    assert is_contiguous(value) == tensor.is_contiguous()


@pytest.mark.parametrize("name", FROM_TORCH)
def test_every_element_type_is_found(name: str) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(getattr(torch, name))[1:]
    files, value, archive = loaded(saved(tensor))
    assert value.dtype == FROM_TORCH[name]
    assert elements(files, archive, value) == raw(tensor)


def test_parameters_shared_storages_and_plain_values_are_found() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
    files, value, archive = loaded(
        saved(
            {
                "a": weight,
                "b": weight.T,
                "n": 3,
                "size": weight.shape,
                "device": torch.device("cpu"),
            }
        )
    )
    assert (value["n"], value["size"]) == (3, (2, 3))
    assert value["a"].storage == value["b"].storage
    assert elements(files, archive, value["b"]) == raw(weight.T)


def test_the_first_tensor_of_equal_pickles_is_not_taken_for_the_others() -> None:
    one, other = saved(torch.tensor([1.0, 2.0])), saved(torch.tensor([3.0, 4.0]))
    files = MemoryFiles({"m": one + other})
    for at, data, wanted in [(0, one, [1.0, 2.0]), (len(one), other, [3.0, 4.0])]:
        stored, archive = load_tensor(files, Extent("m", at, len(data)))
        assert elements(files, archive, stored) == raw(torch.tensor(wanted))


def pickled(value: object) -> bytes:
    return torch_zip_file({"data.pkl": torch_pickle(value), "data/0": bytes(16), "version": b"3\n"})


FLOATS = StorageId("FloatStorage", "0", 4)
BAD: dict[str, object] = {
    "reaches behind its storage": tensor_call(FLOATS, 1, (4,), (1,)),
    "strides reach behind it": tensor_call(FLOATS, 0, (2, 2), (3, 1)),
    "negative offset": tensor_call(FLOATS, -1, (2,), (1,)),
    "negative shape": tensor_call(FLOATS, 0, (-2,), (1,)),
    "negative strides": tensor_call(FLOATS, 3, (2,), (-1,)),
    "strides of another rank": tensor_call(FLOATS, 0, (2, 2), (1,)),
    "no storage": tensor_call([], 0, (2,), (1,)),  # type: ignore[arg-type]
    "shape of floats": tensor_call(FLOATS, 0, (2.0,), (1,)),  # type: ignore[arg-type]
    "offset of none": tensor_call(FLOATS, None, (2,), (1,)),  # type: ignore[arg-type]
    "a shape that is no tuple": tensor_call(FLOATS, 0, "ab", (1, 1)),  # type: ignore[arg-type]
    "a thousand axes": tensor_call(FLOATS, 0, (1,) * 1000, (1,) * 1000),
    "two arguments": Call(Global("torch._utils", "_rebuild_tensor_v2"), FLOATS, 0),
    "no arguments": Call(Global("torch._utils", "_rebuild_parameter")),
    "a size of no tuple": Call(Global("torch", "Size"), 5),
    "an unhashable order": Call(Global("collections", "OrderedDict"), [[[], 1]]),
    "rebuilt by something else": Call(
        Global("torch._tensor", "_rebuild_from_type_v2"), Global("torch", "device"), 0, (), {}
    ),
    "a storage of a negative size": tensor_call(StorageId("FloatStorage", "0", -4), 0, (0,), (1,)),
    "a storage whose key is a number": tensor_call(StorageId("FloatStorage", 0, 4), 0, (2,), (1,)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_what_no_torch_writes_is_corrupt(value: object) -> None:
    with pytest.raises(Corrupt, match="pickle"):
        loaded(pickled({"w": value}))


@pytest.mark.parametrize("numel", [3, 5])
def test_a_storage_of_another_size_than_its_pickle_says_is_corrupt(numel: int) -> None:
    stored = tensor_call(StorageId("FloatStorage", "0", numel), 0, (3,), (1,))
    files, value, archive = loaded(pickled(stored))
    with pytest.raises(Corrupt, match=f"storage 0 has 16 bytes, {4 * numel} expected"):
        part(files, archive, value)


def test_an_expanded_tensor_that_would_fill_a_disk_is_refused_and_a_small_one_is_not() -> None:
    files, value, archive = loaded(
        pickled(tensor_call(StorageId("FloatStorage", "0", 4), 0, (1 << 30, 4), (0, 1)))
    )
    with pytest.raises(Unsupported, match="whose elements are 16 bytes, repeated"):
        part(files, archive, value)
    files, value, archive = loaded(saved(torch.arange(4.0).expand(5000, 4)))
    assert elements(files, archive, value) == raw(torch.arange(4.0).expand(5000, 4))


def test_a_storage_key_reaches_no_other_record() -> None:
    files, value, archive = loaded(
        pickled(tensor_call(StorageId("FloatStorage", "../data.pkl", 1), 0, (1,), (1,)))
    )
    with pytest.raises(Corrupt, match="no record"):
        part(files, archive, value)


def test_only_torch_names_element_types() -> None:
    assert dtype_of(Name("torch", "bfloat16")) == "BF16"
    for other in (Name("numpy", "float32"), "float32", None):
        with pytest.raises(Corrupt):
            dtype_of(other)


def with_version(record: str, version: bytes) -> bytes:
    """An archive of torch's own, with another version in that record."""
    archive = zipfile.ZipFile(io.BytesIO(saved({"w": torch.ones(3)})))
    records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    del records["version"]
    return torch_zip_file({**records, record: version} if record else records)


VERSIONS = (b"3\n", b"1", b"0", b"10", b"11", b"", b" 3", b"+3", b"-1", b"3x", b"x3", b"\x003")


@pytest.mark.parametrize("record", ["version", ".data/version", ""])
def test_an_archive_is_opened_if_torch_takes_its_version(record: str) -> None:
    for version in (*VERSIONS, b"9" * 30):
        data = with_version(record, version)
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except (RuntimeError, IndexError):
            with pytest.raises((Corrupt, Unsupported), match="version"):
                loaded(data)
        else:
            assert loaded(data)[1].keys() == {"w"}


def test_a_version_whose_bytes_are_damaged_is_corrupt() -> None:
    data = saved({"w": torch.ones(3)})
    with pytest.raises(Corrupt, match="version is b'7"):
        loaded(data.replace(b"3\n", b"7\n"))
