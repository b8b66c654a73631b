"""A baseline is what it was when it was written, or refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ckptsync.digest import FileDigest, digest_stream
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.verify.baseline import decode, encode, expected

FILES = [expected(name, digest_stream([data], len(data))) for name, data in {"b/c": b"x" * 10_000, "a": b""}.items()]


def test_what_is_written_is_read_again_in_the_order_of_names() -> None:
    assert decode(encode(FILES), "base") == tuple(sorted(FILES, key=lambda f: f.path))
    assert encode(FILES) == encode(FILES[::-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"format": 1}',
        b'{"format": "1", "files": [], "digest": ""}',
        b'{"format":1,"files":[],"digest":"\xff"}',
        b"[" * 100_000,
    ],
)
def test_what_is_none_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="base: not a baseline"):
        decode(data, "base")


def test_a_digest_that_was_changed_is_seen() -> None:
    told = json.loads(encode(FILES))
    told["files"][0]["size"] += 1
    with pytest.raises(Corrupt, match="not those that it was made of"):
        decode(json.dumps(told).encode(), "base")


@pytest.mark.parametrize(
    "wanted", [replace(FILES[0].wanted, block_size=0), replace(FILES[0].wanted, blocks=()), replace(FILES[0].wanted, digest="x")]
)
def test_a_file_that_cannot_be_is_corrupt(wanted: FileDigest) -> None:
    with pytest.raises(Corrupt, match=r"^base: "):
        decode(encode([expected("f", wanted)]), "base")


def test_a_path_that_leads_elsewhere_is_refused() -> None:
    with pytest.raises(Corrupt):
        decode(encode([expected("../x", FILES[0].wanted)]), "base")


def test_a_newer_one_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="baseline format 2"):
        decode(encode(FILES).replace(b'"format": 1', b'"format": 2'), "base")
