"""Hostile safetensors headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from tests.hostile.attack import CORRUPT, INCOMPLETE, UNSUPPORTED, Attack, Sparse
from tests.support.files_in_memory import raw_safetensors, safetensors_file

FILE = "model.safetensors"


def entry(start: Any, end: Any, shape: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = json.dumps(entry(0, 8, [8])).encode()
HEADERS: dict[str, tuple[object, bytes]] = {
    "hole": ({"a": entry(0, 4, [4]), "b": entry(6, 8, [2])}, b"\0" * 8),
    "hole-at-the-start": ({"a": entry(4, 8, [4])}, b"\0" * 8),
    "hole-at-the-end": ({"a": entry(0, 4, [4])}, b"\0" * 8),
    "overlap": ({"a": entry(0, 5, [5]), "b": entry(4, 8, [4])}, b"\0" * 8),
    "same-bytes-twice": ({"a": entry(0, 8, [8]), "b": entry(0, 8, [8])}, b"\0" * 8),
    "wrong-size": ({"a": entry(0, 8, [7])}, b"\0" * 8),
    "size-of-another-dtype": ({"a": entry(0, 8, [8], "F32")}, b"\0" * 8),
    "behind-the-end": ({"a": entry(0, 1 << 40, [1 << 40])}, b"\0" * 8),
    "end-before-start": ({"a": entry(8, 0, [0])}, b"\0" * 8),
    "negative": ({"a": entry(-8, 0, [8])}, b"\0" * 8),
    "negative-shape": ({"a": entry(0, 8, [-8])}, b"\0" * 8),
    "float-offsets": ({"a": entry(0.0, 8.0, [8])}, b"\0" * 8),
    "overflow": ({"a": entry(0, 8, [2**32, 2**32, 2**32])}, b"\0" * 8),
    "offsets-of-2**64": ({"a": entry(2**64, 2**64 + 8, [8])}, b"\0" * 8),
    "thousand-axes": ({"a": entry(0, 8, [2**63] * 1000)}, b"\0" * 8),
    "zero-and-huge": ({"a": entry(0, 8, [0, 2**63])}, b"\0" * 8),
    "no-dtype": ({"a": {"shape": [8], "data_offsets": [0, 8]}}, b"\0" * 8),
    "unknown-dtype": ({"a": entry(0, 8, [8], "F1024")}, b"\0" * 8),
    "dtype-is-a-list": ({"a": entry(0, 8, [8], ["U8"])}, b"\0" * 8),
    "three-offsets": ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}}, b"\0" * 8),
    "entry-is-null": ({"a": None}, b"\0" * 8),
    "header-is-a-list": ([], b"\0" * 8),
    "duplicate-keys": (b'{"a":%s,"a":%s}' % (GOOD, GOOD), b"\0" * 8),
    "dtype-twice": (b'{"a":' + GOOD[:-1] + b',"dtype":"U8"}}', b"\0" * 8),
    "shape-twice": (b'{"a":' + GOOD[:-1] + b',"shape":[8]}}', b"\0" * 8),
    "offsets-twice": (b'{"a":' + GOOD[:-1] + b',"data_offsets":[0,8]}}', b"\0" * 8),
    "not-json": (b"\x80\x02cposix\nsystem\n.", b""),
    "not-utf8": (b'{"\xff\xfe":1}', b""),
    "json-nan": (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,Infinity]}}', b""),
    "json-cut": (b'{"a":{"dtype":"U8"', b""),
    "two-jsons": (b"{}{}", b""),
    "deep-json": (b"[" * 1_000_000, b""),
    "deep-json-in-a-dict": (b'{"a":' * 1_000_000, b""),
    "number-of-a-million-digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,8]}}',
        b"",
    ),
    "bool-offset": ({"a": entry(0, bool(1), [1])}, b"\0"),
    "metadata-is-a-number": ({"__metadata__": {"step": 4}, "a": entry(0, 8, [8])}, b"\0" * 8),
    "metadata-twice": (b'{"__metadata__":{},"__metadata__":{},"a":%s}' % GOOD, b"\0" * 8),
    "metadata-not-utf8": (b'{"__metadata__":{"a":"\xff"},"a":%s}' % GOOD, b"\0" * 8),
    "unknown-field-not-utf8": (b'{"a":' + GOOD[:-1] + b',"a\xff":[4]}}', b"\0" * 8),
    "nothing": (b"", b"\0" * 8),
    "lone-surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', b"\0" * 8),
}


def attacks(_: str) -> Iterator[Attack]:
    for kind, (header, data) in HEADERS.items():
        file = raw_safetensors(header, data)
        yield Attack(kind, {FILE: file}, (CORRUPT, UNSUPPORTED))
        adapter = {"adapter_model.safetensors": file, "adapter_config.json": b"{}"}
        yield Attack(f"{kind}-in-an-adapter", adapter, (CORRUPT, UNSUPPORTED))
    for length in (9, 100_000_000, 100_000_001, 2**31, 2**63 - 1, 2**64 - 1):
        yield Attack(f"length-{length}", {FILE: struct.pack("<Q", length) + b"{}"}, (CORRUPT,))
    for size in range(8):
        yield Attack(f"{size}-bytes", {FILE: b"\0" * size}, (CORRUPT,))
    for told, size in ((100_000_000, 8 + 100_000_000), (1 << 30, 2 << 30)):
        zeros = Sparse(size, {0: struct.pack("<Q", told)})
        yield Attack(f"header-of-{told}-of-nothing", {FILE: zeros}, (CORRUPT,))
    many = raw_safetensors({f"layer.{i}": entry(0, 0, [0]) for i in range(10_000)}, b"")
    yield Attack("thousands-of-tensors", {FILE: many}, (CORRUPT,), harmless=True)
    codes = (CORRUPT, UNSUPPORTED, INCOMPLETE)
    yield Attack("empty-header", {FILE: raw_safetensors({}, b"")}, codes, harmless=True)
    good = safetensors_file({"a": ("U8", (1,), b"x")})
    two = {f"model-0000{n}-of-00002.safetensors": good for n in (1, 2)}
    yield Attack("same-tensor-in-two-files", two, (CORRUPT,))
