"""Checksums of parts: what is sent with them, what the server says of them, and what they say of a whole file.

Every part goes with its CRC32, which AWS and most others check before they answer, and say so.  One that does not gets Content-MD5 with what follows,
which S3 always had, and its tag for the first part is held against our MD5.  The CRC32 of the whole is made of those of the parts, and checked when
they are put together ("full object", docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html).
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass

from ckptsync.crc import joined
from ckptsync.digest import crc32

CRC = "x-amz-checksum-crc32"
_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Sum:
    """Of one part: its size, its CRC32, and the tag that the server gave it."""

    size: int
    crc: int
    tag: str


def header(crc: int) -> str:
    """A CRC32 as S3 writes it."""
    return b64encode(crc.to_bytes(4, "big")).decode()


def crc_of(data: bytes | memoryview) -> int:
    """The CRC32 of a part."""
    return crc32(data)


def md5_of(data: bytes | memoryview) -> bytes:
    """What Content-MD5 and most tags are made of."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def plain(tag: str) -> str:
    """A tag without its quotes."""
    return tag.strip().strip('"')


def is_md5(tag: str) -> bool:
    """Whether a tag can be an MD5; where files are encrypted with keys of KMS, or the client's, it looks like one and is none."""
    return _MD5.fullmatch(plain(tag)) is not None


def whole_crc(sums: Iterable[Sum]) -> int:
    """The CRC32 of all parts, in order."""
    crc = 0
    for each in sums:
        crc = joined(crc, each.crc, each.size)
    return crc


def whole_tag(tags: Iterable[str]) -> str:
    """The tag that a file of these parts has, if each of theirs is an MD5; nothing otherwise."""
    found = [plain(tag) for tag in tags]
    if not all(map(is_md5, found)):
        return ""
    return f"{hashlib.md5(b''.join(map(bytes.fromhex, found)), usedforsecurity=False).hexdigest()}-{len(found)}"
