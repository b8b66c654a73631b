"""One request to a bucket, until there is an answer; pages of a listing; bytes that the server checks; what is under a key."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from ckptsync.crc import joined
from ckptsync.digest import crc32
from ckptsync.errors import CkptsyncError, NotFound, StoreError, Transient
from ckptsync.stores.retry import Persistence
from ckptsync.stores.s3 import errors
from ckptsync.stores.s3.client import Access
from ckptsync.stores.s3.transport import Lost, NotS3

T = TypeVar("T")
Answer = Mapping[str, Any]
NAMES = 10_000_000  # of a listing, at most
IDLE = 1000  # pages of a listing that bring nothing new, one after the other, at most
LARGEST = 1 << 63
_SKEW = 30.0  # seconds by which a corrected clock has to differ, for the correction to be news
_OLD_KEYS = frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "RequestExpired"})  # with any status
_MD5 = re.compile(r"[0-9a-f]{32}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sum:
    """The size and CRC32 of a part, and the tag that the server gave it."""

    size: int
    crc: int
    tag: str


@dataclass(frozen=True, slots=True)
class Found:
    """What is under a key. ``tag``: empty unless it is made of MD5s. ``crc``: base64, of the whole; empty if the server has none."""

    size: int
    tag: str
    crc: str

    def is_whole(self, data: memoryview) -> bool | None:
        """Return whether these are the bytes; None if that cannot be told."""
        if self.size != len(data) or (self.crc and self.crc != base64_of(crc32(data))):
            return False
        return plain(self.tag) == md5(data).hex() if is_md5(self.tag) else None

    def is_made_of(self, sums: Sequence[Sum]) -> bool | None:
        """Return whether these are the parts, each with an MD5 for a tag; None if that cannot be told. A CRC32 proves a difference only."""
        if self.size != sum(each.size for each in sums) or (self.crc and self.crc != base64_of(whole_crc(sums))):
            return False
        return True if self.tag and plain(self.tag) == whole_tag(each.tag for each in sums) else None

    def may_be(self, sums: Sequence[Sum]) -> bool:
        """Return whether size and a checksum agree, and nothing says otherwise."""
        same = self.is_made_of(sums)
        return self.crc != "" if same is None else same


class Bucket:
    """A bucket, as one store uses it. Threads may share it.

    ``takes_crc``: the server is asked to keep CRC32s, until it is seen that it does not know them.
    """

    def __init__(self, access: Access, persistence: Persistence) -> None:
        self.access, self.persistence = access, persistence
        self.takes_crc = access.takes_crc
        self._has_answered = self._is_seen = False

    def url(self, key: str) -> str:
        """Return the name of a key in messages."""
        return f"s3://{self.access.bucket}/{key}" if key else f"s3://{self.access.bucket}"

    def call(self, method: str, key: str = "", **parameters: Any) -> Answer:
        """Send one request; raise as `errors` says, and Transient where the same may succeed or the refusal says how to do better."""
        access = self.access
        what = self.url(key or parameters.get("Prefix", "").rstrip("/"))
        with access.configuring():
            client, keys = access.client(), access.keys()
            parameters = {"Bucket": access.bucket, **({"Key": key} if key else {}), **access.additional(method), **parameters}
        try:
            answer: Answer = self.understood(what, lambda: getattr(client, method)(**parameters))
        except ClientError as e:
            self._has_answered = True
            raise self._learned(e.response, keys, errors.of_answer(what, method, e.response)) from e
        self._has_answered = True
        return answer

    def understood(self, what: str, do: Callable[[], T]) -> T:
        """Return what ``do`` gives, which uses botocore; raise our errors, and ClientError."""
        try:
            return do()
        except (CkptsyncError, ClientError):
            raise
        except Lost as e:
            raise errors.of_connection(what, e, has_answered=self._has_answered) from e
        except BotoCoreError:
            with self.access.configuring():
                raise
        except Exception as e:  # whatever botocore's parser stumbles over
            raise errors.not_s3(what, e if isinstance(e, NotS3) else repr(e)) from e
        raise AssertionError

    def ask(self, method: str, key: str = "", read: Callable[[Answer], T] | None = None, **parameters: Any) -> Any:
        """Call until there is an answer that ``read`` can read, and return what it made of it, or the answer."""

        def once() -> Any:
            answer = self.call(method, key, **parameters)
            return self.understood(self.url(key), lambda: read(answer)) if read else answer

        return self.persistence.call(once)

    def pages(
        self,
        method: str,
        key: str,
        markers: Mapping[str, str],
        read: Callable[[Answer], Sequence[T]],
        most: int | None = None,
        **parameters: Any,
    ) -> Iterator[Sequence[T]]:
        """Yield the pages of a listing, each as ``read`` makes it of an answer.

        ``markers``: in an answer, where the next page begins, and the parameters that ask for it. ``most``: names, if not `NAMES`.
        Raises Transient where a page follows and cannot be asked for, or the listing does not end: what is not seen is not absent.
        """
        starts, lasts, count, idle = set(), set(), 0, 0
        while True:
            page, following = self.ask(method, key, lambda answer: (read(answer), _following(answer, markers)), **parameters)
            yield page
            if not following:
                return
            count, idle = count + len(page), 0 if page and page[-1] not in lasts else idle + 1
            if following in starts:
                raise errors.not_s3(self.url(key), "its listing goes on, and says the same place again")
            if count > (most or NAMES) or idle > IDLE:
                raise errors.not_s3(self.url(key), f"its listing does not end: {count} names, {idle} pages that bring nothing new")
            starts.add(following)
            lasts.update(page[-1:])
            parameters |= dict(zip(markers.values(), following, strict=True))

    def send(self, method: str, key: str, data: memoryview, **parameters: Any) -> Sum:
        """Send bytes once, and be sure that the server has checked what arrived: a CRC32 that it confirms, else Content-MD5."""
        crc = crc32(data)
        if self.takes_crc:
            answer = self._stored(method, key, Body=data, ChecksumCRC32=base64_of(crc), **parameters)
            if answer.get("ChecksumCRC32") == base64_of(crc) or self.access.signs_payload or not data:
                return Sum(len(data), crc, answer["ETag"])
            self.takes_crc = False
            if plain(answer["ETag"]) == md5(data).hex():
                return Sum(len(data), crc, answer["ETag"])
        answer = self._stored(method, key, Body=data, ContentMD5=b64encode(md5(data)).decode(), **parameters)
        return Sum(len(data), crc, answer["ETag"])

    def _stored(self, method: str, key: str, **parameters: Any) -> Answer:
        answer = self.call(method, key, **parameters)
        if not answer.get("ETag"):
            raise errors.not_s3(self.url(key), "it has no ETag")
        return answer

    def head(self, key: str, **parameters: Any) -> Answer:
        """Return what HEAD says, with a ContentLength; raise NotFound.

        A refusal of HEAD has no body that would say why: then the first byte is asked for, whose refusal has one.
        """
        try:
            answer: Answer = self.ask("head_object", key, _sized, **parameters)
        except NotFound:
            if not self._is_seen:
                self._ask_why(key)
            raise
        except Transient:
            raise
        except StoreError:
            self._ask_why(key)
            answer = self.ask("head_object", key, _sized, **parameters)
        self._is_seen = True
        if "ContentLength" not in answer:
            hint = "is this an S3 server, and the endpoint right?"
            raise StoreError(f"{self.url(key)}: the server does not say how long it is", hint=hint)
        return answer

    def _ask_why(self, key: str) -> None:
        try:
            self.ask("get_object", key, lambda answer: answer["Body"].close(), Range="bytes=0-0")
        except (NotFound, errors.NoSuchRange):
            self._is_seen = True  # and the answer to HEAD meant what it said

    def found(self, key: str) -> Found | None:
        """Return what is there, with what can be compared; None if there is nothing."""
        try:
            answer = self.head(key, ChecksumMode="ENABLED")
        except NotFound:
            return None
        hides = answer.get("ServerSideEncryption", "").startswith("aws:kms") or "SSECustomerAlgorithm" in answer
        tag = answer.get("ETag", "")
        is_whole = answer.get("ChecksumType", "" if "-" in tag else "FULL_OBJECT") == "FULL_OBJECT"
        return Found(answer["ContentLength"], "" if hides else tag, answer.get("ChecksumCRC32", "") if is_whole else "")

    def _learned(self, answer: Answer, keys: Any, error: CkptsyncError) -> CkptsyncError:
        """Return the error, or a Transient one where the refusal says how to do better. (botocore follows a bucket to its region.)"""
        status, headers, code, _ = errors.told(answer)
        if code == "RequestTimeTooSkewed":
            date = errors.http_date(headers.get("date", ""))
            if date is not None and self.access.correct_clock(skew := date - time.time(), _SKEW):
                host = urlsplit(self.access.root).netloc
                log.warning("this machine's clock is %.0f s behind that of %s, which refuses to be asked so: set it", skew, host)
                return Transient(f"{error}; signing with the server's clock from now on")
        elif (status in (401, 403) or code in _OLD_KEYS) and self.access.renew(keys):
            return Transient(f"{error}; credentials were renewed")
        return error


def _following(answer: Answer, markers: Mapping[str, str]) -> tuple[Any, ...]:
    """Return where the next page begins; nothing after the last one."""
    if not answer.get("IsTruncated"):
        return ()
    found = tuple(answer.get(marker, "") for marker in markers)
    if not found[0] or not all(isinstance(each, str | int) for each in found):
        raise NotS3("its listing goes on, and does not say where")
    return found


def _sized(answer: Answer) -> Answer:
    size_of(answer.get("ContentLength", 0))
    return answer


def text(answer: Answer, name: str) -> str:
    """Return a text in an answer, or nothing; raise NotS3 where it is there twice, which botocore makes a list."""
    found = answer.get(name, "")
    if not isinstance(found, str):
        raise NotS3(f"{name} is there more than once")
    return found


def size_of(told: int) -> int:
    """Return a size that the server gave; raise NotS3 for one that cannot be."""
    if not 0 <= told < LARGEST:
        raise NotS3(f"a size is {told}")
    return told


def server_time(answer: Answer) -> float:
    """Return the server's clock when it answered; ours if it does not say."""
    return errors.http_date(answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")) or time.time()


@lru_cache(1024)  # many files are of the same second
def seconds(moment: str) -> float:
    """Return whole seconds since 1970 (servers differ in the digits of fractions); 0 for no time."""
    return datetime.fromisoformat(moment[:19] + "+00:00").timestamp() if moment else 0.0


def base64_of(crc: int) -> str:
    """Return a CRC32 as S3 writes it."""
    return b64encode(crc.to_bytes(4, "big")).decode()


def md5(data: bytes | memoryview) -> bytes:
    """Return what Content-MD5 and most tags are made of."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def plain(tag: str) -> str:
    """Return a tag without its quotes."""
    return tag.strip().strip('"')


def is_md5(tag: str) -> bool:
    """Return whether a tag can be an MD5; that of a file that is encrypted with a key of KMS, or the client's, only looks like one."""
    return _MD5.fullmatch(plain(tag)) is not None


def whole_crc(sums: Iterable[Sum]) -> int:
    """Return the CRC32 of all parts, in order, for which S3 has the name "full object"."""
    crc = 0
    for each in sums:
        crc = joined(crc, each.crc, each.size)
    return crc


def whole_tag(tags: Iterable[str]) -> str:
    """Return the tag that a file of these parts has, if each of theirs is an MD5; else nothing."""
    found = [plain(tag) for tag in tags]
    if not all(map(is_md5, found)):
        return ""
    return f"{hashlib.md5(b''.join(map(bytes.fromhex, found)), usedforsecurity=False).hexdigest()}-{len(found)}"
