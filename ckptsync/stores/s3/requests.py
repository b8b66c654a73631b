"""Requests to a bucket: repeated until there is an answer, listings by page, checked uploads.

botocore's answers are dictionaries of whatever a server sent, and each request can fail halfway. So
all requests pass one class, `Bucket`, which retries them, turns errors into StoreErrors, and checks
sizes, markers and checksums. S3's statements about an object's bytes are tags and CRC32s, of parts
and of the whole: equal tags prove equal bytes if they are made of MD5s; a CRC32 only proves that
bytes differ.
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
NAMES = 10_000_000  # names of a listing, at most
IDLE = 1000  # pages of a listing without a new name, in a row, at most
LARGEST = 1 << 63  # bytes; sizes are smaller
# fields of an answer that say where the next page begins, and the parameters that request it
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

    ``takes_crc``: the server is sent CRC32s, until an answer shows that it does not know them.
    ``keeps_conditions``: whether the server supports ``If-None-Match: *``: True for AWS, else None
    until an answer shows it.
    """

    def __init__(self, access: BucketAccess, persistence: Persistence) -> None:
        self.access, self.persistence = access, persistence
        self.takes_crc = access.takes_crc
        self.keeps_conditions: bool | None = True if access.is_aws else None
        self._has_answered = self._is_reachable = False

    def url(self, key: str) -> str:
        """Return the URL of a key, or of the bucket, for messages."""
        return f"s3://{self.access.bucket}/{key}" if key else f"s3://{self.access.bucket}"

    def call(self, method: str, key: str = "", **parameters: Any) -> Answer:
        """Send one request, once; return botocore's answer.

        Raise the errors of `error_codes`, and Transient if the same request may succeed. After 400,
        401 and 403 credentials are looked for; if they changed, the error is Transient. (botocore
        follows a bucket to its region.)
        """
        url = self.url(key or parameters.get("Prefix", "").rstrip("/"))
        with self.access.configuring():
            client, keys = self.access.client, self.access.keys()
            parameters = {**self.access.extra_parameters(method), **parameters}
        parameters["Bucket"] = self.access.bucket
        if key:
            parameters["Key"] = key
        send = getattr(client, method)
        try:
            answer: Answer = self.translate_errors(url, lambda: send(**parameters))
        except ClientError as e:
            self._has_answered = True
            error = error_codes.error_of_answer(url, e.operation_name, e.response)
            # 400 is said of a session that has ended
            status = e.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in (400, 401, 403) and self.access.renew(keys):
                error = Transient(f"{error}; credentials were renewed")
            raise error from e
        self._has_answered = True
        return answer

    def translate_errors(self, url: str, do: Callable[[], T]) -> T:
        """Return what ``do`` returns, which uses botocore; raise its errors as StoreErrors.

        ClientError is raised unchanged; errors of configuration are ConfigErrors.
        """
        try:
            return do()
        except (CkptsyncError, ClientError):
            raise
        except Lost as e:
            raise error_codes.error_of_connection(url, e, has_answered=self._has_answered) from e
        except BotoCoreError:
            with self.access.configuring():
                raise
        except Exception as e:  # whatever botocore's parser stumbles over
            raise error_codes.malformed_answer(url, e if isinstance(e, NotS3) else repr(e)) from e
        raise AssertionError

    def ask(
        self,
        method: str,
        key: str = "",
        parse: Callable[[Answer], Any] = lambda answer: answer,
        **parameters: Any,
    ) -> Any:
        """Send a request, again after transient failures; return what ``parse`` returns.

        ``parse`` gets the answer; one that it cannot read counts as a failure. Raise as `call`.
        """

        def once() -> Any:
            """Send the request once, and parse the answer."""
            answer = self.call(method, key, **parameters)
            return self.translate_errors(self.url(key), lambda: parse(answer))

        return self.persistence.call(once)

    def list_entries(
        self,
        method: str,
        key: str,
        parse: Callable[[Answer], Sequence[T]],
        most: int | None = None,
        **parameters: Any,
    ) -> Iterator[T]:
        """Yield all entries of a listing, page by page; ``parse`` returns those of one answer.

        ``most``: entries at most, if not `NAMES`. Raise Transient if a following page cannot be
        requested, or the listing does not end: an entry that was not listed is not absent.
        """
        page_starts, last_entries, count, idle_pages = set(), set(), 0, 0
        markers = _MARKERS[method]
        while True:
            page, next_page = self.ask(
                method,
                key,
                lambda answer: (parse(answer), _next_page(answer, markers)),
                **parameters,
            )
            yield from page
            if not next_page:
                return
            count += len(page)
            idle_pages = 0 if page and page[-1] not in last_entries else idle_pages + 1
            if next_page in page_starts:
                raise error_codes.malformed_answer(
                    self.url(key), "its listing returns the same page again"
                )
            if count > (most or NAMES) or idle_pages > IDLE:
                raise error_codes.malformed_answer(
                    self.url(key),
                    f"its listing does not end: {count} names, {idle_pages} pages that bring"
                    " nothing new",
                )
            page_starts.add(next_page)
            last_entries.update(page[-1:])
            parameters |= dict(zip(markers.values(), next_page, strict=True))

    def send(self, method: str, key: str, data: memoryview, **parameters: Any) -> PartSum:
        """Send bytes, without retries, with a checksum that the server verifies; return their sums.

        The checksum is a CRC32. If the answer confirms neither it nor the MD5, the bytes are sent
        again with Content-MD5, and a CRC32 is not sent to this server any more. Raise as `call`.
        """
        crc = crc32(data)

        def send_with(**checksum: str) -> Answer:
            """Send the bytes with one checksum; raise Transient if the answer has no tag."""
            answer = self.call(method, key, Body=data, **checksum, **parameters)
            if not answer.get("ETag"):
                raise error_codes.malformed_answer(self.url(key), "it has no ETag")
            return answer

        if self.takes_crc:
            answer = send_with(ChecksumCRC32=base64_of(crc))
            is_checked = answer.get("ChecksumCRC32") == base64_of(crc) or self.access.signs_payload
            if not is_checked and data:
                self.takes_crc = False
                is_checked = unquoted(answer["ETag"]) == md5(data).hex()
            if is_checked or not data:
                return PartSum(len(data), crc, answer["ETag"])
        answer = send_with(ContentMD5=b64encode(md5(data)).decode())
        return PartSum(len(data), crc, answer["ETag"])

    def head(self, key: str, **parameters: Any) -> Answer:
        """Return the answer to HEAD, which has a ContentLength; raise NotFound, or as `ask`.

        A refusal of HEAD has no body that would give the reason, nor has a 404 while it is unknown
        whether the bucket exists: then the first byte is requested, whose refusal has one. Raise
        StoreError if the server does not give the length. Records that the bucket can be reached.
        """

        def sized(answer: Answer) -> Answer:
            """Return the answer if its size is valid; raise NotS3."""
            size_of(answer.get("ContentLength", 0))
            return answer

        try:
            answer: Answer = self.ask("head_object", key, sized, **parameters)
        except NotFound:
            if not self._is_reachable:
                self._raise_reason(key)
            raise
        except Transient:
            raise
        except StoreError:
            self._raise_reason(key)
            answer = self.ask("head_object", key, sized, **parameters)
        self._is_reachable = True
        if "ContentLength" not in answer:
            hint = "check that the endpoint is right and an S3 server"
            raise StoreError(f"{self.url(key)}: the server does not say how long it is", hint=hint)
        return answer

    def _raise_reason(self, key: str) -> None:
        """Request the first byte of a key, to raise the error that explains a refusal of HEAD.

        Return if there is no error, or if the answer shows that the bucket can be reached; that is
        recorded.
        """
        try:
            self.ask("get_object", key, lambda answer: answer["Body"].close(), Range="bytes=0-0")
        except (NotFound, error_codes.NoSuchRange):
            self._is_reachable = True  # so HEAD's 404 meant this key

    def find(self, key: str) -> StoredObject | None:
        """Request what can be compared of the object under a key; None if there is none.

        Raise as `head`.
        """
        try:
            answer = self.head(key, ChecksumMode="ENABLED")
        except NotFound:
            return None
        # of encrypted objects a tag only looks like an MD5
        is_encrypted = "SSECustomerAlgorithm" in answer or answer.get(
            "ServerSideEncryption", ""
        ).startswith("aws:kms")
        tag = answer.get("ETag", "")
        is_whole = answer.get("ChecksumType", "" if "-" in tag else "FULL_OBJECT") == "FULL_OBJECT"
        return StoredObject(
            answer["ContentLength"],
            "" if is_encrypted else tag,
            answer.get("ChecksumCRC32", "") if is_whole else "",
        )


def _next_page(answer: Answer, markers: Mapping[str, str]) -> tuple[Any, ...]:
    """Return the values that begin the next page, empty after the last one; raise NotS3."""
    if not answer.get("IsTruncated"):
        return ()
    page_start = tuple(answer.get(marker, "") for marker in markers)
    if not page_start[0] or not all(isinstance(each, str | int) for each in page_start):
        raise NotS3("its listing is truncated, but has no marker of the next page")
    return page_start


def text(answer: Answer, name: str) -> str:
    """Return a text in an answer, "" without one; raise NotS3 for a list (it is there twice)."""
    value = answer.get(name, "")
    if not isinstance(value, str):
        raise NotS3(f"{name} is listed more than once")
    return value


def size_of(size: int) -> int:
    """Return a size that the server gave; raise NotS3 if it is out of range."""
    if not 0 <= size < LARGEST:
        raise NotS3(f"a size is {size}")
    return size


def server_time(answer: Answer) -> float:
    """Return the server's clock when it answered, in seconds since 1970; ours if it is not said."""
    text = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        date = email.utils.parsedate_to_datetime(text)
        if 2000 < date.year < 2100:
            return date.timestamp()
    return time.time()


@lru_cache(1024)  # many files are of the same second
def seconds(moment: str) -> float:
    """Return a time of S3 in whole seconds since 1970 (servers differ in fractions); 0 for ""."""
    return datetime.fromisoformat(moment[:19] + "+00:00").timestamp() if moment else 0.0


@dataclass(frozen=True, slots=True)
class PartSum:
    """The size and CRC32 of a part or a whole file, and the tag that the server gave it.

    The tag of a whole file is empty if those of its parts are no MD5s.
    """

    size: int
    crc: int
    tag: str


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object, with what can be compared.

    ``tag``: empty unless it is made of MD5s. ``crc``: base64, of the whole; empty if the server has
    none.
    """

    size: int
    tag: str
    crc: str

    def is_same(self, sums: PartSum) -> bool | None:
        """Return True if the tags are equal, False if size, CRC32 or MD5 differ, else None."""
        if self.size != sums.size or (self.crc and self.crc != base64_of(sums.crc)):
            return False
        if self.tag and unquoted(self.tag) == sums.tag:
            return True
        return False if is_md5(self.tag) and is_md5(sums.tag) else None

    def may_be(self, sums: PartSum) -> bool:
        """Return whether size and one checksum agree, and no other disagrees."""
        same = self.is_same(sums)
        return self.crc != "" if same is None else same


def sum_of(data: memoryview) -> PartSum:
    """Return the sums of bytes, with the tag that a server would give them."""
    return PartSum(len(data), crc32(data), md5(data).hex())


def sum_parts(parts: Sequence[PartSum]) -> PartSum:
    """Return the sums of a file that was sent in these parts; no tag unless all tags are MD5s."""
    crc, tags = 0, [unquoted(each.tag) for each in parts]
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


def unquoted(tag: str) -> str:
    """Return a tag without its quotes."""
    return tag.strip().strip('"')


def is_md5(tag: str) -> bool:
    """Return whether a tag looks like the MD5 of an object that was sent in one piece."""
    return _MD5.fullmatch(unquoted(tag)) is not None
