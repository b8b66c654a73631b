"""Read and check the header of a safetensors file, or write one.

`tensors` checks everything that a header can get wrong, so that callers use its extents without
checks of their own.

Format: 8 bytes little-endian header length, JSON ``{name: {dtype, shape, data_offsets}}``, then the
bytes, indexed from 0 to the end of the file without holes
(https://github.com/huggingface/safetensors, *Format*).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import msgspec

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, MOST_AXES, PACKED_BITS
from ckptsync.tensors import Copy, Extent, Files, Part, Shape, Tensor, read
from ckptsync.typed_json import Count, Decoder

MAX_HEADER = 100_000_000  # the reference implementation's own limit


def header_size(files: Files, name: str) -> int:
    """Return how many bytes precede the first tensor, by the file's first 8 bytes.

    Raise Corrupt if the file has fewer, or if its header is longer than `MAX_HEADER`.
    """
    size = files.sizes()[name]
    if size < 8:
        raise Corrupt(f"{name}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(read(files, Extent(name, 0, 8)), "little")
    if length > min(MAX_HEADER, size - 8):
        raise Corrupt(f"{name}: header of {length} bytes in a file of {size}")
    return 8 + length


def tensors(files: Files, name: str) -> tuple[Tensor, ...]:
    """Return every tensor of one file, in the order of their bytes; only the header is read.

    Raise Corrupt if the header is damaged or does not fit the file's size, Unsupported if a dtype
    is one of `PACKED_BITS`, whose elements share bytes.
    """
    return contents(files, name)[0]


def contents(files: Files, name: str) -> tuple[tuple[Tensor, ...], Mapping[str, str]]:
    """Return `tensors`, and the free-form ``__metadata__``, empty if there is none.

    Both are cached: do not change them. Raises as `tensors`.
    """
    base = header_size(files, name)
    return _contents(read(files, Extent(name, 8, base - 8)), name, files.sizes()[name])


def _is_utf_8(data: bytes) -> bool:
    """Return whether all bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=32)  # a source is read once to choose it, and once to merge it
def _contents(
    data: bytes, file: str, file_size: int
) -> tuple[tuple[Tensor, ...], Mapping[str, str]]:
    """Return tensors and metadata of the header ``data`` of ``file``, of ``file_size`` bytes.

    Raises as `tensors`.
    """
    base = 8 + len(data)
    header = {name: bytes(value) for name, value in _HEADER.decode(data, f"{file}: header").items()}
    expected = sum(value.count(_OFFSETS) for value in header.values()) + ("data_offsets" in header)
    if data.count(_OFFSETS) != expected or data.count(b'"__metadata__"') > 1:
        raise Corrupt(f"{file}: header: duplicate name")  # msgspec would take the last one
    if not _is_utf_8(data):  # msgspec does not decode the fields that it skips
        raise Corrupt(f"{file}: header: not UTF-8")
    free = _FREE.decode(header.pop("__metadata__", b"null"), f"{file}: __metadata__") or {}
    rows = sorted(_row(file, name, entry) for name, entry in header.items())
    end_before = 0
    for start, end, name, dtype, shape in rows:
        size = (
            prod(shape) * ITEMSIZE[dtype]
            if dtype in ITEMSIZE
            else -(-prod(shape) * PACKED_BITS[dtype] // 8)
        )
        if start != end_before or end - start != size:
            raise Corrupt(
                f"{file}: {name} at {start}..{end}, {end_before}..{end_before + size} expected"
            )
        end_before = end
    if base + end_before != file_size:
        raise Corrupt(f"{file}: {file_size} bytes, {base + end_before} expected by its header")
    packed = next((row for row in rows if row[3] in PACKED_BITS), None)
    if packed:
        raise Unsupported(
            f"{file}: {packed[2]} is {packed[3]}, whose elements share bytes",
            hint="use the model as it is, or save it dequantised",
        )
    return tuple(_tensor(file, base, row) for row in rows), free


Row = tuple[int, int, str, str, Shape]


class _HeaderEntry(msgspec.Struct):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


_OFFSETS = b'"data_offsets"'
# A header of 95 MB could hold lists that take 2.5 GB, so only the fields of a header are built.
_HEADER: Decoder[dict[str, msgspec.Raw]] = Decoder(
    dict[str, msgspec.Raw], "an object of tensors", MAX_HEADER
)
_ROW = Decoder(_HeaderEntry, "a tensor's dtype, shape and data_offsets", MAX_HEADER)
_FREE: Decoder[dict[str, str] | None] = Decoder(dict[str, str] | None, "text by names", MAX_HEADER)  # type: ignore[arg-type]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise ValueError if a name is repeated."""
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        raise ValueError("duplicate name")
    return by_name


def _row(file: str, name: str, entry: bytes) -> Row:
    """Return start, end, name, dtype and shape of a header's entry; raise Corrupt if wrong."""
    fields = _ROW.decode(entry, f"{file}: {name!r:.200}")
    if entry.count(b'"dtype"') > 1 or entry.count(b'"shape"') > 1 or entry.count(_OFFSETS) > 1:
        raise Corrupt(f"{file}: {name!r:.200}: duplicate name")
    if (fields.dtype not in ITEMSIZE and fields.dtype not in PACKED_BITS) or len(
        fields.shape
    ) > MOST_AXES:
        raise Corrupt(
            f"{file}: {name} has dtype {fields.dtype!r:.40} and shape {fields.shape!r:.100}"
        )
    return *fields.data_offsets, name, fields.dtype, fields.shape


def _tensor(file: str, base: int, row: Row) -> Tensor:
    """Return the tensor of a row of ``file``, whose offsets count from its byte ``base``."""
    start, end, name, dtype, shape = row
    part = Part((0,) * len(shape), shape, Extent(file, base + start, end - start))
    return Tensor(name, dtype, shape, (Copy(dtype, shape, (part,)),))


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def encode_header(rows: Iterable[tuple[str, str, Shape]]) -> bytes:
    """Return the length field and header for tensors ``(name, dtype, shape)``, in this order.

    The header is padded with spaces to a multiple of 8 bytes. It has `format: pt`, because older
    transformers refuse files without it.
    """
    lines = ['"__metadata__":{"format":"pt"}']
    offset = 0
    for name, dtype, shape in rows:
        size = prod(shape) * ITEMSIZE[dtype]
        sizes = ",".join(map(str, shape))
        lines.append(
            f'{_quoted(name)}:{{"dtype":"{dtype}","shape":[{sizes}],'
            f'"data_offsets":[{offset},{offset + size}]}}'
        )
        offset += size
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-(8 + len(text)) % 8)
    return len(text).to_bytes(8, "little") + text
