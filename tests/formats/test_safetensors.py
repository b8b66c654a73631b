"""Headers against the safetensors library, and against what must not pass the door."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.safetensors import contents, encode_header, tensors
from ckptsync.tensors import read
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


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {
        "late": entry(4, 8),
        "__metadata__": {},
        "early": entry(0, 4),
        "none": entry(4, 4, shape=(0,)),
    }
    found = tensors(MemoryFiles({"m": raw_safetensors(header, bytes(8))}), "m")
    assert [t.name for t in found] == ["early", "none", "late"]


def test_a_file_cut_anywhere_or_too_long_is_corrupt() -> None:
    data = safetensors_file(GOOD)
    assert read_all(data) == GOOD
    for size in range(len(data)):
        with pytest.raises(Corrupt, match="m: "):
            read_all(data[:size])
    with pytest.raises(Corrupt, match="expected by its header"):
        read_all(data + b"\0")


BAD = {
    "hole": {"a": entry(0, 4), "b": entry(5, 9)},
    "hole at the start": {"a": entry(1, 5)},
    "overlap": {"a": entry(0, 4), "b": entry(3, 7)},
    "alias": {"a": entry(0, 4), "b": entry(0, 4)},
    "backwards": {"a": entry(4, 0)},
    "size is not the shape's": {"a": entry(0, 4, shape=(5,))},
    "size is not the element type's": {"a": entry(0, 4, "F32")},
    "dtype unknown": {"a": entry(0, 4, "F33")},
    "dtype is a list": {"a": entry(0, 4, ["U8"])},
    "dtype is an object": {"a": entry(0, 4, {})},
    "dtype is no text": {"a": entry(0, 4, 8)},
    "offset is a float": {"a": entry(0.0, 4.0)},
    "offset is true": {"a": entry(0, json.loads("true"), shape=(1,))},
    "offset is negative": {"a": entry(-4, 0)},
    "offset is text": {"a": entry("0", "4")},
    "offset is null": {"a": entry(None, 4)},
    "shape is a float": {"a": entry(0, 4, shape=[4.0])},
    "shape is negative": {"a": entry(0, 4, shape=[-2, -2])},
    "shape is text": {"a": entry(0, 4, shape="4")},
    "shape is a number": {"a": entry(0, 4, shape=4)},
    "shape is nested": {"a": entry(0, 4, shape=[[4]])},
    "shape overflows": {"a": entry(0, 4, shape=[2**62, 2**62])},
    "a thousand axes": {"a": entry(0, 4, shape=[*[1] * 999, 4])},
    "three offsets": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}},
    "no offsets": {"a": {"dtype": "U8", "shape": [4]}},
    "no object": {"a": [0, 4]},
    "null": {"a": None},
    "a list": [entry(0, 4)],
    "a number": 5,
    "a name twice": (
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
    ),
    "a field twice": b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
    "an offset twice": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,2],"data_offsets":[0,4]}}'
    ),
    "numbers of 4000 digits": (
        b'{"a":{"dtype":"U8","shape":[%s,%s],"data_offsets":[0,4]}}' % (b"9" * 4000, b"9" * 4000)
    ),
    "metadata that is no text": {"__metadata__": {"step": 4}, "a": entry(0, 4)},
    "metadata that is a list": {"__metadata__": ["pt"], "a": entry(0, 4)},
    "metadata twice": (
        b'{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "metadata that is not UTF-8": (
        b'{"__metadata__":{"a":"\xff"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "deep": b"[" * 100_000,
    "deep inside": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not JSON": b"{'a': 1}",
    "not text": b"\xff\xfe{}",
    "NaN": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[NaN,4]}}',
    "a long number": b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
    "nothing": b"",
}


@pytest.mark.parametrize("header", BAD.values(), ids=BAD)
def test_a_bad_header_is_corrupt(header: object) -> None:
    with pytest.raises(Corrupt, match="m: "):
        read_all(raw_safetensors(header, bytes(4)))
    with pytest.raises(Corrupt, match="m: "):
        read_all(raw_safetensors(header, bytes(9)))


def test_no_metadata_may_be_said_to_be_none_and_fields_that_nobody_knows_are_passed_over() -> None:
    data = raw_safetensors(
        {
            "__metadata__": None,
            "a": entry(0, 4) | {"zz": [1]},
            "data_offsets": entry(4, 4, shape=(0,)),
        },
        bytes(4),
    )
    assert list(read_all(data)) == ["a", "data_offsets"]


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


@given(st.data())
def test_one_changed_byte_in_a_header_is_read_or_refused_and_never_crashes(
    data: st.DataObject,
) -> None:
    good = bytearray(safetensors_file(GOOD))
    end = 8 + int.from_bytes(good[:8], "little")
    good[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_all(bytes(good))
    except CkptsyncError:
        return
    assert len(found) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)
PLACES = [
    lambda x: x,
    lambda x: {"a": x},
    lambda x: {"a": entry(0, 4, x)},
    lambda x: {"a": entry(0, 4, shape=x)},
]


@given(JSON, st.sampled_from(PLACES))
def test_any_json_is_read_or_refused_and_never_crashes(
    value: object, place: Callable[[object], object]
) -> None:
    with contextlib.suppress(Corrupt):
        assert len(read_all(raw_safetensors(json.dumps(place(value)).encode(), bytes(4)))) <= 1


@given(st.data())
def test_names_of_any_letters_come_back(data: st.DataObject) -> None:
    name = data.draw(NAMES)
    assert list(read_all(encode_header([(name, "U8", (1,))]) + b"x")) == [name]


def test_a_header_is_the_json_that_python_writes() -> None:
    rows = [('a"\\\n\x00', "F32", (2, 3)), ("ü☃", "BF16", ()), ("model.w", "U8", (0,))]
    written = encode_header(rows)
    expected: dict[str, object] = {"__metadata__": {"format": "pt"}}
    expected |= {rows[0][0]: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    expected |= {rows[1][0]: {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}}
    expected |= {rows[2][0]: {"dtype": "U8", "shape": [0], "data_offsets": [26, 26]}}
    assert (
        written[8:].rstrip(b" ")
        == json.dumps(expected, separators=(",", ":"), ensure_ascii=False).encode()
    )


def test_bytes_that_are_no_utf_8_are_refused_in_a_field_that_nobody_reads_too() -> None:
    header = b'{"a": {"a\xff": [4], "data_offsets": [0, 4], "dtype": "U8", "shape": [4]}}'
    with pytest.raises(Corrupt, match="UTF-8"):
        read_all(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load(len(header).to_bytes(8, "little") + header + bytes(4))
