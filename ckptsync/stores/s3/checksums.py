"""What S3 says of an object's bytes: tags and CRC32s, of parts and of the whole.

A tag proves that bytes are the same where it is made of MD5s; a CRC32 proves a difference only.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from ckptsync.digest import crc32, crc32_combine

_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PartSum:
    """The size and CRC32 of a part or a whole file, and the tag that the server gave it.

    The tag of a whole file is empty where those of its parts are no MD5s.
    """

    size: int
    crc: int
    tag: str


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What is under a key.

    ``tag``: empty unless it is made of MD5s. ``crc``: base64, of the whole; empty if the server has
    none.
    """

    size: int
    tag: str
    crc: str

    def is_same(self, whole: PartSum) -> bool | None:
        """Return whether these are the bytes; None if that cannot be told."""
        if self.size != whole.size or (self.crc and self.crc != base64_of(whole.crc)):
            return False
        if self.tag and plain(self.tag) == whole.tag:
            return True
        return False if is_md5(self.tag) and is_md5(whole.tag) else None

    def may_be(self, whole: PartSum) -> bool:
        """Return whether size and a checksum agree, and nothing says otherwise."""
        same = self.is_same(whole)
        return self.crc != "" if same is None else same


def sum_of(data: memoryview) -> PartSum:
    """Return the sums of bytes, with the tag that a server gives them."""
    return PartSum(len(data), crc32(data), md5(data).hex())


def whole(parts: Sequence[PartSum]) -> PartSum:
    """Return the sums of a file that was sent in these parts."""
    crc, tags = 0, [plain(each.tag) for each in parts]
    for each in parts:
        crc = crc32_combine(crc, each.crc, each.size)
    tag = ""
    if all(map(is_md5, tags)):
        tag = f"{md5(b''.join(map(bytes.fromhex, tags))).hex()}-{len(tags)}"
    return PartSum(sum(each.size for each in parts), crc, tag)


def base64_of(crc: int) -> str:
    """Return a CRC32 as S3 writes it."""
    return b64encode(crc.to_bytes(4, "big")).decode()


def md5(data: bytes | memoryview) -> bytes:
    """Return the MD5, of which Content-MD5 and most tags are made."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def plain(tag: str) -> str:
    """Return a tag without its quotes."""
    return tag.strip().strip('"')


def is_md5(tag: str) -> bool:
    """Return whether a tag looks like the MD5 of an object that was sent in one piece."""
    return _MD5.fullmatch(plain(tag)) is not None
