"""A store in an S3 bucket, on AWS or a compatible server: ``s3://bucket/prefix``.

Reading, writing and listing are ours, over one connection a thread (`s3.wire`); where the bucket is and who we are is botocore's to say (`s3.access`).
Files of more than one part are multipart uploads, which the next try finds again (`s3.upload`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ckptsync.errors import Corrupt, Exists, NotFound, StoreError, Transient
from ckptsync.model import Extent
from ckptsync.paths import checked_path
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, checked_prefix
from ckptsync.stores.limits import Limits
from ckptsync.stores.parts import MIB, MOST, PART, Parts, part_size
from ckptsync.stores.retry import Persistence
from ckptsync.stores.s3.access import Access
from ckptsync.stores.s3.bucket import Ask, Bucket
from ckptsync.stores.s3.errors import Denied, NoSuchRange
from ckptsync.stores.s3.listing import Page, page
from ckptsync.stores.s3.orphans import sweep
from ckptsync.stores.s3.put import Sender
from ckptsync.stores.s3.sinks import Into, Refused, Sink, Through
from ckptsync.stores.s3.targets import Conditions, Creating, Goal, Writing
from ckptsync.stores.s3.wire import Answer
from ckptsync.stores.s3.xml import Paging, directories
from ckptsync.stores.urls import Remote

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")  # RFC 9110, section 14.4
PAGE = 1000  # keys of a listing, at most: S3's own limit
SMALLEST = 8 << 20  # bytes of a part where memory is short: S3 takes parts of 5 MiB, and each costs a request


class S3Store:
    """Retries what fails transiently by itself, piece by piece.  Raises ConfigError where options, credentials or the bucket are wrong."""

    late = 0.0

    def __init__(self, remote: Remote, options: Mapping[str, Any] | None = None, limits: Limits | None = None) -> None:
        self.url = remote.url
        self._limits = limits or Limits()
        self.least = _least(self._limits.memory)
        """Bytes of a part, at least; whoever changes it does not find uploads begun with another."""
        access = Access(remote, options or {})
        self._prefix = access.prefix
        self._bucket = Bucket(access, self._limits)
        self._sender = Sender(self._bucket, Persistence(self._limits.patience))
        self._conditions = Conditions(self.url, held=True if self._bucket.is_aws else None)
        # elsewhere a server may refuse a name that is there, and yet let two create it that end at one moment (SeaweedFS 4 does, with multipart uploads)
        self.is_exclusive = self._bucket.is_aws
        self._lock = threading.Lock()
        self._pool: tuple[int, Parts] | None = None
        self._is_swept = False

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        found = self._listed(self._prefix + checked_prefix(prefix))
        yield from found if self._bucket.is_aws else sorted(found)  # others list directory by directory

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        at = self._prefix + checked_prefix(prefix)
        below = (
            found.removeprefix(at)[:-1] for each in self._pages(at + start, {"delimiter": "/"}) for found in directories(each.rest)
        )
        return sorted({name for name in below if _is_name(name)})

    def size(self, name: str) -> int:
        """As the contract says."""
        try:
            answer = self._sender.head(self._key(name))
        except Denied as e:
            raise self._absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e
        return int(answer.headers["Content-Length"])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        if out.nbytes:
            self._read(name, start, Into(out.cast("B")))
        else:
            self.size(name)

    def stream(self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
        """As `stores.stream.stream` says."""
        try:
            if extent.size:
                self._read(extent.file, extent.start, Through(extent.size, buffer, take))
        except Refused as e:
            raise e.error from e.error.__cause__

    def _read(self, name: str, start: int, sink: Sink) -> None:
        """Bytes from ``start`` on into ``sink``; what broke off goes on where it ended, if it is still the same file."""
        tag = ""

        def once() -> None:
            nonlocal tag
            try:
                answer = self._read_some(name, start, sink, {"If-Match": tag} if sink.done and tag else {})
            except Exists as e:  # 412: it was replaced since it was begun
                if not sink.restart():
                    raise StoreError(f"{self.url}/{name}: replaced while it was read", hint="try again") from e
                raise Transient(f"{self.url}/{name}: replaced while it was read") from e
            tag = answer.headers.get("ETag", "")
            if sink.done < sink.size:  # it broke off
                raise Transient(f"{self.url}/{name}: {sink.done} of {sink.size} bytes came")

        self._sender.keep_trying(once)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        key = self._key(name)
        self._parts().send(Writing(self._sender, key, self._goal(about)), chunks, about, self.least)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        key = self._key(name)
        self._parts().send(Creating(self._sender, key, self._goal(about), self._conditions), chunks, about, self.least)

    def delete(self, name: str) -> None:
        """As the contract says."""
        try:
            self._sender.ask(Ask("DeleteObject", self._key(name)))
        except NotFound:
            return  # as it should be

    def _key(self, name: str) -> str:
        key = self._prefix + checked_path(name)
        if len(key.encode()) > 1024:
            raise StoreError(f"{self.url}/{name}: a key of {len(key.encode())} bytes, S3 takes at most 1024")
        return key

    def _parts(self) -> Parts:
        """Threads do not survive a fork: a child has its own."""
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():
                self._pool = os.getpid(), Parts(self._limits.threads, self._limits.memory)
            return self._pool[1]

    def _goal(self, about: About) -> Goal:
        most = -(-about.size // part_size(about.size, least=self.least)) if about.size else MOST
        return Goal(most, bool(about.origin), self._sweep)

    def _sweep(self) -> None:
        """Once in the life of a store."""
        with self._lock:
            is_done, self._is_swept = self._is_swept, True
        if not is_done:
            sweep(Sender(self._bucket, Persistence(0)), self._prefix)  # if it fails, another time will do

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        """As `stores.slices.Sliced` says."""
        start = {"start-after": self._prefix + after} if after else {}
        yield from self._listed(self._prefix + checked_prefix(prefix), start)

    def _listed(self, prefix: str, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Entry]:
        for found in self._pages(prefix, more):
            for each in found.objects:
                name = each.key.removeprefix(self._prefix)
                if each.key.startswith(prefix) and _is_name(name):
                    yield Entry(name, each.size, each.mtime)

    def _pages(self, prefix: str, more: Mapping[str, str]) -> Iterator[Page]:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(PAGE), "encoding-type": "url", **more}
        paging = Paging(self.url, {"NextContinuationToken": "continuation-token"})
        while True:
            ask = Ask("ListObjectsV2", query=tuple(query.items()))
            found = self._sender.read(ask, lambda answer: page(answer.body, self._bucket.url("")))
            yield found
            names = [each.key for each in found.objects] or list(directories(found.rest))
            following = paging.following(found.rest, len(names), names[-1] if names else "")
            if not following:
                return
            query |= following

    def _read_some(self, name: str, at: int, sink: Sink, condition: Mapping[str, str]) -> Answer:
        start, end = at + sink.done, at + sink.size
        ask = Ask("GetObject", self._key(name), headers={"Range": f"bytes={start}-{end - 1}", **condition})

        def begin(status: int, headers: Mapping[str, str]) -> Sink:
            self._check_range(name, (start, end), status, headers)
            return sink

        try:
            return self._bucket.ask(ask, begin)
        except Denied as e:
            raise self._absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e
        except NoSuchRange as e:
            raise self._too_short(name, self.size(name), start, end) from e

    def _check_range(self, name: str, wanted: tuple[int, int], status: int, headers: Mapping[str, str]) -> None:
        """Before the first byte is believed."""
        start, end = wanted
        given, length = headers.get("Content-Range"), headers.get("Content-Length")
        if status == 200 and given is None:
            if start:
                raise StoreError(f"{self.url}/{name}: the server ignores ranges", hint="is a proxy in between?")
            whole = length
        else:
            told = _RANGE.fullmatch(given or "")
            if not told or int(told[1]) != start or not start <= int(told[2]) < end or int(length or _size(told)) != _size(told):
                said = (given or "no Content-Range")[:100]
                raise Transient(
                    f"{self.url}/{name}: bytes {start}-{end - 1} wanted, the server sent {said}", hint="is a proxy in between?"
                )
            whole = told[3]
        if whole not in (None, "*") and int(whole) < end:
            raise self._too_short(name, int(whole), start, end)

    def _absent(self, name: str) -> NotFound | None:
        """The error, if a listing has no such name; what may not be read is another matter.

        S3 says 404 only to who may list the whole bucket, 403 to others (docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html, "Permissions").
        """
        try:
            first = next(self._listed(self._key(name)), None)  # in order: a name comes before those that begin with it
        except Denied:
            return None
        return None if first and first.name == name else NotFound(f"{name}: not in {self.url}")

    def _too_short(self, name: str, size: int, start: int, end: int) -> Corrupt:
        return Corrupt(f"{name}: ends at byte {size}, {end - start} bytes from {start} wanted")


def _least(memory: int) -> int:
    """Of little memory, too, one part is filled while another is sent."""
    return min(PART, max(SMALLEST, memory // 4 // MIB * MIB))


def _is_name(name: str) -> bool:
    """Keys that no file could have, and those that stand for directories, are no names."""
    try:
        return bool(checked_path(name))
    except Corrupt:
        return False  # the question was whether it is refused


def _size(told: re.Match[str]) -> int:
    """Bytes of the range in a Content-Range."""
    return int(told[2]) - int(told[1]) + 1
