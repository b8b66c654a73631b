"""Requests to a bucket: repeated until there is an answer, listings by page, checked uploads.

What S3 says of an object's bytes are tags and CRC32s, of parts and of the whole. A tag proves that
bytes are the same where it is made of MD5s; a CRC32 proves a difference only.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from ckptsync.digest import crc32, crc32_combine
from ckptsync.errors import CkptsyncError, NotFound, StoreError, Transient
from ckptsync.stores.retry import Persistence
from ckptsync.stores.s3 import error_codes
from ckptsync.stores.s3.client import BucketAccess
from ckptsync.stores.s3.transport import Lost, NotS3

T = TypeVar("T")
Answer = Mapping[str, Any]
NAMES = 10_000_000  # of a listing, at most
IDLE = 1000  # pages of a listing that bring nothing new, one after the other, at most
LARGEST = 1 << 63
# in an answer, where the next page begins, and the parameters that ask for it
_MARKERS = {
    "list_objects_v2": {"NextContinuationToken": "ContinuationToken"},
    "list_multipart_uploads": {
        "NextKeyMarker": "KeyMarker",
        "NextUploadIdMarker": "UploadIdMarker",
    },
    "list_parts": {"NextPartNumberMarker": "PartNumberMarker"},
}
_MD5 = re.compile(r"[0-9a-f]{32}")


class Bucket:
    """A bucket, as one store uses it. Threads may share it.

    ``takes_crc``: the server is asked to keep CRC32s, until it is seen that it does not know them.
    ``keeps_conditions``: whether the server keeps to ``If-None-Match: *``; None until that is seen.
    """

    def __init__(self, access: BucketAccess, persistence: Persistence) -> None:
        self.access, self.persistence = access, persistence
        self.takes_crc = access.takes_crc
        self.keeps_conditions: bool | None = True if access.is_aws else None
        self._has_answered = self._is_seen = False

    def url(self, key: str) -> str:
        """Return the name of a key in messages."""
        return f"s3://{self.access.bucket}/{key}" if key else f"s3://{self.access.bucket}"

    def call(self, method: str, key: str = "", **parameters: Any) -> Answer:
        """Send one request; raise as `error_codes` says, and Transient where the same may succeed.

        (botocore follows a bucket to its region.)
        """
        url = self.url(key or parameters.get("Prefix", "").rstrip("/"))
        with self.access.configuring():
            client, keys = self.access.client, self.access.keys()
            parameters = {**self.access.additional(method), **parameters}
        parameters["Bucket"] = self.access.bucket
        if key:
            parameters["Key"] = key
        send = getattr(client, method)
        try:
            answer: Answer = self.understood(url, lambda: send(**parameters))
        except ClientError as e:
            self._has_answered = True
            error = error_codes.of_answer(url, e.operation_name, e.response)
            # 400 is said of a session that has ended
            status = e.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in (400, 401, 403) and self.access.renew(keys):
                error = Transient(f"{error}; credentials were renewed")
            raise error from e
        self._has_answered = True
        return answer

    def understood(self, what: str, do: Callable[[], T]) -> T:
        """Return what ``do`` gives, which uses botocore; raise our errors, and ClientError."""
        try:
            return do()
        except (CkptsyncError, ClientError):
            raise
        except Lost as e:
            raise error_codes.of_connection(what, e, has_answered=self._has_answered) from e
        except BotoCoreError:
            with self.access.configuring():
                raise
        except Exception as e:  # whatever botocore's parser stumbles over
            raise error_codes.not_s3(what, e if isinstance(e, NotS3) else repr(e)) from e
        raise AssertionError

    def ask(
        self,
        method: str,
        key: str = "",
        read: Callable[[Answer], Any] = lambda answer: answer,
        **parameters: Any,
    ) -> Any:
        """Call until there is an answer that ``read`` can read; return what it made of it."""

        def once() -> Any:
            answer = self.call(method, key, **parameters)
            return self.understood(self.url(key), lambda: read(answer))

        return self.persistence.call(once)

    def listed(
        self,
        method: str,
        key: str,
        read: Callable[[Answer], Sequence[T]],
        most: int | None = None,
        **parameters: Any,
    ) -> Iterator[T]:
        """Yield all that a listing has; ``read`` returns what is in one answer.

        ``most``: names, if not `NAMES`. Raises Transient where a page follows and cannot be asked
        for, or the listing does not end: what is not seen is not absent.
        """
        starts, lasts, count, idle = set(), set(), 0, 0
        markers = _MARKERS[method]
        while True:
            page, following = self.ask(
                method,
                key,
                lambda answer: (read(answer), _following(answer, markers)),
                **parameters,
            )
            yield from page
            if not following:
                return
            count, idle = count + len(page), 0 if page and page[-1] not in lasts else idle + 1
            if following in starts:
                raise error_codes.not_s3(self.url(key), "its listing returns the same page again")
            if count > (most or NAMES) or idle > IDLE:
                raise error_codes.not_s3(
                    self.url(key),
                    f"its listing does not end: {count} names, {idle} pages that bring nothing new",
                )
            starts.add(following)
            lasts.update(page[-1:])
            parameters |= dict(zip(markers.values(), following, strict=True))

    def send(self, method: str, key: str, data: memoryview, **parameters: Any) -> PartSum:
        """Send bytes once, with a checksum that the server verifies.

        The checksum is a CRC32 that the server confirms, else Content-MD5.
        """
        crc = crc32(data)

        def sent(**checksum: str) -> Answer:
            answer = self.call(method, key, Body=data, **checksum, **parameters)
            if not answer.get("ETag"):
                raise error_codes.not_s3(self.url(key), "it has no ETag")
            return answer

        if self.takes_crc:
            answer = sent(ChecksumCRC32=base64_of(crc))
            is_checked = answer.get("ChecksumCRC32") == base64_of(crc) or self.access.signs_payload
            if not is_checked and data:
                self.takes_crc = False
                is_checked = plain(answer["ETag"]) == md5(data).hex()
            if is_checked or not data:
                return PartSum(len(data), crc, answer["ETag"])
        answer = sent(ContentMD5=b64encode(md5(data)).decode())
        return PartSum(len(data), crc, answer["ETag"])

    def head(self, key: str, **parameters: Any) -> Answer:
        """Return what HEAD says, with a ContentLength; raise NotFound.

        A refusal of HEAD has no body that would say why: then the first byte is asked for, whose
        refusal has one.
        """

        def sized(answer: Answer) -> Answer:
            size_of(answer.get("ContentLength", 0))
            return answer

        try:
            answer: Answer = self.ask("head_object", key, sized, **parameters)
        except NotFound:
            if not self._is_seen:
                self._ask_why(key)
            raise
        except Transient:
            raise
        except StoreError:
            self._ask_why(key)
            answer = self.ask("head_object", key, sized, **parameters)
        self._is_seen = True
        if "ContentLength" not in answer:
            hint = "check that the endpoint is right and an S3 server"
            raise StoreError(f"{self.url(key)}: the server does not say how long it is", hint=hint)
        return answer

    def _ask_why(self, key: str) -> None:
        try:
            self.ask("get_object", key, lambda answer: answer["Body"].close(), Range="bytes=0-0")
        except (NotFound, error_codes.NoSuchRange):
            self._is_seen = True  # and the answer to HEAD meant what it said

    def found(self, key: str) -> StoredObject | None:
        """Return what is there, with what can be compared; None if there is nothing."""
        try:
            answer = self.head(key, ChecksumMode="ENABLED")
        except NotFound:
            return None
        # a tag then only looks like an MD5
        hides = "SSECustomerAlgorithm" in answer or answer.get(
            "ServerSideEncryption", ""
        ).startswith("aws:kms")
        tag = answer.get("ETag", "")
        is_whole = answer.get("ChecksumType", "" if "-" in tag else "FULL_OBJECT") == "FULL_OBJECT"
        return StoredObject(
            answer["ContentLength"],
            "" if hides else tag,
            answer.get("ChecksumCRC32", "") if is_whole else "",
        )


def _following(answer: Answer, markers: Mapping[str, str]) -> tuple[Any, ...]:
    """Return where the next page begins; nothing after the last one."""
    if not answer.get("IsTruncated"):
        return ()
    page_start = tuple(answer.get(marker, "") for marker in markers)
    if not page_start[0] or not all(isinstance(each, str | int) for each in page_start):
        raise NotS3("its listing is truncated, but has no marker of the next page")
    return page_start


def text(answer: Answer, name: str) -> str:
    """Return a text in an answer, or nothing.

    Raise NotS3 where it is there twice, which botocore makes a list.
    """
    value = answer.get(name, "")
    if not isinstance(value, str):
        raise NotS3(f"{name} is listed more than once")
    return value


def size_of(size: int) -> int:
    """Return a size that the server gave; raise NotS3 for one that cannot be."""
    if not 0 <= size < LARGEST:
        raise NotS3(f"a size is {size}")
    return size


def server_time(answer: Answer) -> float:
    """Return the server's clock when it answered; ours if it does not say."""
    text = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        date = email.utils.parsedate_to_datetime(text)
        if 2000 < date.year < 2100:
            return date.timestamp()
    return time.time()


@lru_cache(1024)  # many files are of the same second
def seconds(moment: str) -> float:
    """Return whole seconds since 1970 (servers differ in the digits of fractions).

    0 for no time.
    """
    return datetime.fromisoformat(moment[:19] + "+00:00").timestamp() if moment else 0.0


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
