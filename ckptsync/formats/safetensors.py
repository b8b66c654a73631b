"""safetensors headers: read and checked once at the door, and written.

Format: 8 bytes little-endian header length, JSON ``{name: {dtype, shape, data_offsets}}``, then the bytes, indexed from 0 to
the end of the file without holes (https://github.com/huggingface/safetensors, *Format*).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, MOST_AXES, PACKED_BITS
from ckptsync.model import Copy, Extent, Files, Part, Shape, Tensor, read

MAX_HEADER = 100_000_000  # the reference implementation's own limit


def header_size(files: Files, name: str) -> int:
    """Bytes before the first tensor; raises Corrupt if the file cannot hold that many."""
    size = files.sizes()[name]
    if size < 8:
        raise Corrupt(f"{name}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(read(files, Extent(name, 0, 8)), "little")
    if length > min(MAX_HEADER, size - 8):
        raise Corrupt(f"{name}: header of {length} bytes in a file of {size}")
    return 8 + length


def tensors(files: Files, name: str) -> tuple[Tensor, ...]:
    """Every tensor of one file, in the order of their bytes.  After this nothing needs to be checked again."""
    return contents(files, name)[0]


def contents(files: Files, name: str) -> tuple[tuple[Tensor, ...], Mapping[str, Any]]:
    """The same, and the free-form ``__metadata__``, empty if there is none."""
    base = header_size(files, name)
    return _contents(read(files, Extent(name, 8, base - 8)), name, files.sizes()[name])


@lru_cache(maxsize=32)  # a model is looked at before it is chosen
def _contents(data: bytes, name: str, whole: int) -> tuple[tuple[Tensor, ...], Mapping[str, Any]]:
    base = 8 + len(data)
    header = _header(data, name)
    free = header.pop("__metadata__", {})
    rows = sorted(_row(name, key, entry) for key, entry in header.items())
    at = 0
    for start, end, key, dtype, shape in rows:
        size = prod(shape) * ITEMSIZE[dtype] if dtype in ITEMSIZE else -(-prod(shape) * PACKED_BITS[dtype] // 8)
        if start != at or end - start != size:
            raise Corrupt(f"{name}: {key} at {start}..{end}, {at}..{at + size} expected")
        at = end
    if base + at != whole:
        raise Corrupt(f"{name}: {whole} bytes, {base + at} expected by its header")
    packed = next((row for row in rows if row[3] in PACKED_BITS), None)
    if packed:
        raise Unsupported(f"{name}: {packed[2]} is {packed[3]}, whose elements share bytes", hint="keep the model as it is")
    return tuple(_tensor(name, base, row) for row in rows), free if isinstance(free, dict) else {}


Row = tuple[int, int, str, str, Shape]


def _header(data: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"{name}: header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise Corrupt(f"{name}: header is not an object")
    return header


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (its ``object_pairs_hook``); raises ValueError where two names are one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _row(name: str, key: str, entry: Any) -> Row:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as e:
        raise Corrupt(f"{name}: {key} has no dtype, shape and data_offsets") from e
    numbers: list[Any] = [start, end, *shape] if isinstance(shape, list) and len(shape) <= MOST_AXES else [None]
    if not _is_text(key):
        raise Corrupt(f"{name}: a tensor's name is no text: {key!r:.100}")
    if (
        not isinstance(dtype, str)
        or (dtype not in ITEMSIZE and dtype not in PACKED_BITS)
        or set(map(type, numbers)) != {int}
        or min(numbers) < 0
    ):
        raise Corrupt(f"{name}: {key} has dtype {dtype!r:.40} and numbers {numbers!r:.100}")
    return start, end, key, dtype, tuple(shape)


def _is_text(key: str) -> bool:
    """JSON can spell half a character, which nothing can write again."""
    if key.isascii():
        return True
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tensor(name: str, base: int, row: Row) -> Tensor:
    start, end, key, dtype, shape = row
    part = Part((0,) * len(shape), shape, Extent(name, base + start, end - start))
    return Tensor(key, dtype, shape, (Copy(dtype, shape, (part,)),))


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def encode_header(rows: Iterable[tuple[str, str, Shape]], *, align: int = 8) -> bytes:
    """Length and header for tensors ``(name, dtype, shape)`` whose bytes follow in this order.

    Padded with spaces to ``align`` bytes; `format: pt` because older transformers refuse files without it.
    """
    lines = ['"__metadata__":{"format":"pt"}']
    at = 0
    for name, dtype, shape in rows:
        size = prod(shape) * ITEMSIZE[dtype]
        sizes = ",".join(map(str, shape))
        lines.append(f'{_quoted(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{at},{at + size}]}}')
        at += size
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text
