from __future__ import annotations

import hashlib
import zlib

from ckptsync.stores.s3.sums import Sum, crc_of, header, is_md5, md5_of, plain, whole_crc, whole_tag


def test_the_crc_of_parts_is_that_of_the_whole() -> None:
    pieces = [b"a" * 1000, b"", b"b" * 77, b"c"]
    sums = [Sum(len(p), crc_of(p), "") for p in pieces]
    assert whole_crc(sums) == zlib.crc32(b"".join(pieces))
    assert header(zlib.crc32(b"x" * 100)) == "Xg5djw=="  # as SeaweedFS and AWS say it


def test_the_tag_of_parts_is_the_md5_of_their_md5s() -> None:
    tags = [f'"{md5_of(p).hex()}"' for p in (b"a", b"b")]
    assert whole_tag(tags) == hashlib.md5(md5_of(b"a") + md5_of(b"b")).hexdigest() + "-2"
    assert whole_tag([*tags, '"opaque"']) == ""


def test_a_tag_that_can_be_no_md5_is_none() -> None:
    assert is_md5('"0123456789abcdef0123456789abcdef"')
    assert not is_md5('"0123456789abcdef0123456789abcdef-3"')
    assert not is_md5("")
    assert plain(' "x" ') == "x"
