"""Sending bytes to S3 so that the server checks them, and looking at what is there."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptsync.errors import NotFound, StoreError, Transient
from ckptsync.stores.retry import Persistence
from ckptsync.stores.s3.bucket import Ask, Bucket, Query
from ckptsync.stores.s3.errors import NoSuchRange
from ckptsync.stores.s3.sums import CRC, Sum, crc_of, header, is_md5, md5_of, plain, whole_crc, whole_tag
from ckptsync.stores.s3.wire import Answer

T = TypeVar("T")
NEW = {"If-None-Match": "*"}
_SSE = "x-amz-server-side-encryption"


@dataclass(frozen=True, slots=True)
class Found:
    """What is under a key.  ``tag``: where it is made of MD5s, else empty; ``crc``: of the whole, as S3 writes it, where the server has it."""

    size: int
    tag: str
    crc: str

    def is_whole(self, data: memoryview) -> bool | None:
        """Whether these are the bytes; None if that cannot be told."""
        if self.size != len(data) or (self.crc and self.crc != header(crc_of(data))):
            return False
        return plain(self.tag) == md5_of(data).hex() if is_md5(self.tag) else None

    def is_made_of(self, sums: list[Sum]) -> bool | None:
        """Whether it is these parts, each with an MD5 for a tag; None if that cannot be told.  A CRC32 can tell that it is not, and no more."""
        if self.size != sum(each.size for each in sums) or (self.crc and self.crc != header(whole_crc(sums))):
            return False
        return True if self.tag and plain(self.tag) == whole_tag(each.tag for each in sums) else None

    def may_be(self, sums: list[Sum]) -> bool:
        """Whether nothing says otherwise, and the size and a checksum agree."""
        same = self.is_made_of(sums)
        return self.crc != "" if same is None else same


class Sender:
    """One bucket's ways to be sent bytes, and to be asked about them.  Threads may share it."""

    def __init__(self, bucket: Bucket, persistence: Persistence) -> None:
        self.bucket, self._persistence = bucket, persistence
        self._takes_crc = bucket.access.knows_checksums
        self._is_bucket_seen = False

    @property
    def takes_crc(self) -> bool:
        """Whether the server is asked to keep CRC32s: until it is seen that it does not know them."""
        return self._takes_crc

    def keep_trying(self, do: Callable[[], T]) -> T:
        """As `Persistence.call`."""
        return self._persistence.call(do)

    def ask(self, ask: Ask) -> Answer:
        """Ask until there is an answer."""
        return self._persistence.call(lambda: self.bucket.ask(ask))

    def read(self, ask: Ask, reading: Callable[[Answer], T]) -> T:
        """Ask until there is an answer that can be read: a proxy's page may come in its place."""
        return self._persistence.call(lambda: reading(self.bucket.ask(ask)))

    def send(self, operation: str, key: str, query: Query, headers: dict[str, str], data: memoryview) -> Sum:
        """Send once, and be sure that the server has checked what has arrived."""
        crc = crc_of(data)
        if self._takes_crc:
            answer = self._sent(Ask(operation, key, query, {**headers, CRC: header(crc)}, data))
            if answer.headers.get(CRC) == header(crc) or self.bucket.access.signs_payload or not data:
                return Sum(len(data), crc, answer.headers["ETag"])
            self._takes_crc = False
            if plain(answer.headers.get("ETag", "")) == md5_of(data).hex():
                return Sum(len(data), crc, answer.headers["ETag"])
        answer = self._sent(Ask(operation, key, query, {**headers, "Content-MD5": b64encode(md5_of(data)).decode()}, data))
        return Sum(len(data), crc, answer.headers["ETag"])

    def _sent(self, ask: Ask) -> Answer:
        answer = self.bucket.ask(ask)
        if not answer.headers.get("ETag"):
            raise Transient(
                f"{self.bucket.url(ask.key)}: the server's answer has no ETag",
                hint="is this an S3 server? a proxy may have answered",
            )
        return answer

    def head(self, key: str, headers: dict[str, str] | None = None) -> Answer:
        """Of what is there, with a Content-Length; raises NotFound.

        A refusal of HEAD has no body that would say why: then the first byte is asked for, whose refusal has one, and may be learnt from.
        """
        ask = Ask("HeadObject", key, headers=headers)
        try:
            answer = self.ask(ask)
        except NotFound:
            if not self._is_bucket_seen:
                self._ask_why(key)
            raise
        except Transient:
            raise
        except StoreError:
            self._ask_why(key)
            answer = self.ask(ask)
        self._is_bucket_seen = True
        if "Content-Length" not in answer.headers:
            hint = "is this an S3 server, and the endpoint right?"
            raise StoreError(f"{self.bucket.url(key)}: the server does not say how long it is", hint=hint)
        return answer

    def _ask_why(self, key: str) -> None:
        try:
            self.ask(Ask("GetObject", key, headers={"Range": "bytes=0-0"}))
        except (NotFound, NoSuchRange):
            self._is_bucket_seen = True  # and the answer to HEAD meant what it said

    def found(self, key: str) -> Found | None:
        """What is there, with what can be compared; None if there is nothing."""
        try:
            headers = self.head(key, {"x-amz-checksum-mode": "ENABLED"}).headers
        except NotFound:
            return None
        hides = headers.get(_SSE, "").startswith("aws:kms") or f"{_SSE}-customer-algorithm" in headers
        tag = headers.get("ETag", "")
        is_whole = headers.get("x-amz-checksum-type", "" if "-" in tag else "FULL_OBJECT") == "FULL_OBJECT"
        return Found(int(headers["Content-Length"]), "" if hides else tag, headers.get(CRC, "") if is_whole else "")
