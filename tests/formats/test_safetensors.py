"""Headers against the safetensors library, and against what must not pass the door."""

from __future__ import annotations

import contextlib
import tracemalloc
from math import prod
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.safetensors import contents, encode_header, tensors
from ckptsync.tensors import read
from tests.hostile.headers import HEADERS
from tests.support.files_in_memory import MemoryFiles, raw_safetensors, safetensors_file

NUMPY = ("bool", "u1", "i1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8")
NAMES = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ROWS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(ITEMSIZE)), SHAPES), max_size=5)
GOOD = {"a": ("F32", (2,), b"12345678"), "b": ("BF16", (), b"xy")}


def entry(start: Any, end: Any, dtype: Any = "U8", shape: Any = (4,)) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [start, end],
    }


def read_all(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    files = MemoryFiles({"m": data})
    return {
        t.name: (t.dtype, t.shape, read(files, t.copies[0].parts[0].extent))
        for t in tensors(files, "m")
    }


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(NUMPY), SHAPES), max_size=5), st.booleans())
def test_what_the_library_writes_is_read(
    rows: dict[str, tuple[str, tuple[int, ...]]],
    more: bool,  # noqa: FBT001
) -> None:
    arrays = {n: np.arange(prod(s)).astype(d).reshape(s) for n, (d, s) in rows.items()}
    data = safetensors.numpy.save(arrays, {"format": "np"} if more else None)
    found = read_all(data)
    assert {n: v[1:] for n, v in found.items()} == {
        n: (a.shape, a.tobytes()) for n, a in arrays.items()
    }
    assert contents(MemoryFiles({"m": data}), "m")[1] == ({"format": "np"} if more else {})


@given(ROWS)
def test_the_library_reads_what_is_written(rows: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    sizes = {n: prod(s) * ITEMSIZE[d] for n, (d, s) in rows.items()}
    header = encode_header((n, d, s) for n, (d, s) in rows.items())
    data = header + bytes(k % 251 for k in range(sum(sizes.values())))
    assert len(header) % 8 == 0
    found = {
        n: (v["dtype"], tuple(v["shape"]), bytes(v["data"]))
        for n, v in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }
    assert found == read_all(data)
    assert contents(MemoryFiles({"m": data}), "m")[1] == {"format": "pt"}


def test_a_file_cut_anywhere_or_too_long_is_corrupt() -> None:
    data = safetensors_file(GOOD)
    assert read_all(data) == GOOD
    for size in range(len(data)):
        with pytest.raises(Corrupt, match="m: "):
            read_all(data[:size])
    with pytest.raises(Corrupt, match="expected by its header"):
        read_all(data + b"\0")


@pytest.mark.parametrize(("header", "data"), HEADERS.values(), ids=HEADERS)
def test_a_bad_header_is_corrupt(header: object, data: bytes) -> None:
    for more in (b"", b"12345"):
        with pytest.raises(Corrupt, match="m: "):
            read_all(raw_safetensors(header, data + more))


def test_tensors_come_in_the_order_of_their_bytes_whatever_else_is_in_the_header() -> None:
    header = {
        "late": entry(4, 8) | {"zz": [1]},
        "__metadata__": None,
        "early": entry(0, 4),
        "data_offsets": entry(4, 4, shape=(0,)),
    }
    assert list(read_all(raw_safetensors(header, bytes(8)))) == ["early", "data_offsets", "late"]


@pytest.mark.parametrize(
    "place",
    [
        b'{"a":%s}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"zz":%s}}',
        b'{"__metadata__":%s}',
    ],
)
def test_a_header_takes_memory_in_proportion_to_its_length(place: bytes) -> None:
    data = raw_safetensors(place % (b"[" + b"[]," * 1_000_000 + b"0]"), bytes(4))
    tracemalloc.start()
    try:
        with contextlib.suppress(Corrupt):
            read_all(data)
        # as values it takes 26 times as much
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("dtype", "elements", "size"), [("F4", 8, 4), ("F6_E2M3", 4, 3), ("F6_E3M2", 4, 3)]
)
def test_elements_that_share_bytes_are_unsupported_by_name_and_cut_files_of_them_corrupt(
    dtype: str, elements: int, size: int
) -> None:
    data = raw_safetensors({"a": entry(0, size, dtype, (elements,))}, bytes(size))
    with pytest.raises(Unsupported, match=f"a is {dtype}"):
        read_all(data)
    with pytest.raises(Corrupt, match="expected by its header"):
        read_all(data[:-1])


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 41])
def test_a_header_longer_than_its_file_is_never_asked_for(length: int) -> None:
    files = MemoryFiles({"m": length.to_bytes(8, "little") + bytes(40)})
    with pytest.raises(Corrupt, match="header of"):
        tensors(files, "m")
    assert files.read == 8
