"""A store in an S3 bucket, on AWS or a compatible server: ``s3://bucket/prefix``."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptsync.errors import Corrupt, Exists, NotFound, StoreError, Transient
from ckptsync.model import Extent
from ckptsync.paths import checked_path
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, checked_prefix
from ckptsync.stores.limits import Limits
from ckptsync.stores.parts import MIB, MOST, PART, Parts, part_size
from ckptsync.stores.retry import Persistence
from ckptsync.stores.s3.bucket import Answer, Bucket, seconds, size_of, text
from ckptsync.stores.s3.client import Access
from ckptsync.stores.s3.errors import Denied, NoSuchRange, not_s3
from ckptsync.stores.s3.multipart import Unfinished, sweep, unfinished
from ckptsync.stores.s3.upload import Conditions, Creating, Replacing
from ckptsync.stores.urls import Remote

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII)  # RFC 9110, section 14.4
PAGE = 1000  # keys of a listing, at most: S3's own limit
SMALLEST = 8 << 20  # bytes of a part where memory is short: S3 takes parts of 5 MiB, and each costs a request


class S3Store:
    """Retries what fails transiently by itself, piece by piece. Raises ConfigError where options, credentials or the bucket are wrong."""

    late = 0.0

    def __init__(self, remote: Remote, options: Mapping[str, Any] | None = None, limits: Limits | None = None) -> None:
        self.url = remote.url
        self._limits = limits or Limits()
        self.least = min(PART, max(SMALLEST, self._limits.memory // 4 // MIB * MIB))
        """Bytes of a part, at least: of little memory, too, one is filled while another is sent. Uploads begun with another are not found."""
        access = Access(remote, options or {}, self._limits)
        self._prefix, self._is_aws = access.prefix, access.is_aws
        self._bucket = Bucket(access, Persistence(self._limits.patience))
        self._conditions = Conditions(self.url, held=True if self._is_aws else None)
        # elsewhere a server may refuse a name that is there, and yet let two create it that end at one moment (SeaweedFS 4 does, with multipart uploads)
        self.is_exclusive = self._is_aws
        self._lock = threading.Lock()
        self._pool: tuple[int, Parts] | None = None
        self._is_swept = False

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        found = self._listed(self._prefix + checked_prefix(prefix))
        yield from found if self._is_aws else sorted(found)  # others list directory by directory

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        """As `stores.capabilities.Sliced` says."""
        yield from self._listed(self._prefix + checked_prefix(prefix), **({"StartAfter": self._prefix + after} if after else {}))

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        at = self._prefix + checked_prefix(prefix)

        def read(answer: Answer) -> list[str]:
            files = [text(each, "Key") for each in answer.get("Contents", ())]
            return files + [text(each, "Prefix") for each in answer.get("CommonPrefixes", ())]

        pages = self._pages(at + start, read, Delimiter="/")
        below = {key.removeprefix(at)[:-1] for page in pages for key in page if key.endswith("/")}
        return sorted(filter(_is_name, below))

    def size(self, name: str) -> int:
        """As the contract says."""
        try:
            return int(self._bucket.head(self._key(name))["ContentLength"])
        except Denied as e:
            raise self._absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        if not out.nbytes:
            self.size(name)
            return
        self._read(name, start, _Sink(out.nbytes, out.cast("B"), lambda _: None))

    def stream(self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
        """As `stores.stream.stream` says."""
        try:
            if extent.size:
                self._read(extent.file, extent.start, _Sink(extent.size, buffer, take))
        except _Refused as e:
            raise e.error from e.error.__cause__

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._parts().send(Replacing(*self._upload(name, about)), chunks, about, self.least)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._parts().send(Creating(*self._upload(name, about), self._conditions), chunks, about, self.least)

    def delete(self, name: str) -> None:
        """As the contract says."""
        try:
            self._bucket.ask("delete_object", self._key(name))
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

    def _upload(self, name: str, about: About) -> tuple[Bucket, str, int, Callable[[], list[Unfinished]]]:
        key = self._key(name)
        most = -(-about.size // part_size(about.size, least=self.least)) if about.size else MOST
        return self._bucket, key, most, (lambda: self._left(key)) if about.origin else list

    def _left(self, key: str) -> list[Unfinished]:
        """What earlier tries have left of a key. Once in the life of a store, what was given up anywhere in it is removed first."""
        with self._lock:
            is_swept, self._is_swept = self._is_swept, True
        if not is_swept:
            sweep(Bucket(self._bucket.access, Persistence(0)), self._prefix)  # if it fails, another time will do
        return unfinished(self._bucket, key)

    def _listed(self, prefix: str, **parameters: str) -> Iterator[Entry]:
        def read(answer: Answer) -> list[Entry]:
            return [
                Entry(text(each, "Key"), size_of(each.get("Size", 0)), seconds(text(each, "LastModified")))
                for each in answer.get("Contents", ())
            ]

        cut = len(self._prefix)
        for page in self._pages(prefix, read, **parameters):
            for key, size, mtime in ((each.name, each.size, each.mtime) for each in page):
                if key.startswith(prefix) and _is_name(key[cut:]):
                    yield Entry(key[cut:], size, mtime)

    def _pages(self, prefix: str, read: Callable[[Answer], list[Any]], **parameters: Any) -> Iterator[Any]:
        markers = {"NextContinuationToken": "ContinuationToken"}
        return self._bucket.pages("list_objects_v2", "", markers, read, Prefix=prefix, MaxKeys=PAGE, **parameters)

    def _read(self, name: str, start: int, sink: _Sink) -> None:
        """Bytes from ``start`` on into ``sink``; what broke off goes on where it ended, if it is still the same file."""
        tag = ""

        def once() -> None:
            nonlocal tag
            try:
                tag = self._read_some(name, start, sink, {"IfMatch": tag} if sink.done and tag else {})
            except Exists as e:  # 412: it was replaced since it was begun
                if not sink.restart():
                    raise StoreError(f"{self.url}/{name}: replaced while it was read", hint="try again") from e
                raise Transient(f"{self.url}/{name}: replaced while it was read") from e
            if sink.done < sink.size:  # it broke off
                raise Transient(f"{self.url}/{name}: {sink.done} of {sink.size} bytes came")

        self._bucket.persistence.call(once)

    def _read_some(self, name: str, at: int, sink: _Sink, condition: Mapping[str, str]) -> str:
        """Bytes of one answer, until it breaks off; raises if it brought none. Returns its tag."""
        start, end, before = at + sink.done, at + sink.size, sink.done
        try:
            answer = self._bucket.call("get_object", self._key(name), Range=f"bytes={start}-{end - 1}", **condition)
        except Denied as e:
            raise self._absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e
        except NoSuchRange as e:
            raise self._too_short(name, self.size(name), start, end) from e
        body = answer["Body"]
        try:
            self._check_range(name, start, end, answer)
            while sink.done < sink.size:
                data = self._bucket.understood(self._bucket.url(self._key(name)), lambda: body.read(sink.room()))
                if not data:
                    break
                sink.put(data)
        except Transient:
            if sink.done == before:
                raise
        finally:
            body.close()
        if sink.done == before:
            raise Transient(f"{self.url}/{name}: 0 of {end - start} bytes came")
        return str(answer.get("ETag", ""))

    def _check_range(self, name: str, start: int, end: int, answer: Answer) -> None:
        """Before the first byte is believed."""
        given, length = answer.get("ContentRange"), answer.get("ContentLength")
        if answer["ResponseMetadata"]["HTTPStatusCode"] == 200 and given is None:
            if start:
                raise StoreError(f"{self.url}/{name}: the server ignores ranges", hint="is a proxy in between?")
            whole = length
        else:
            told = _RANGE.fullmatch(given or "")
            count = int(told[2]) - int(told[1]) + 1 if told else 0
            if not told or int(told[1]) != start or not start <= int(told[2]) < end or length not in (None, count):
                said = (given or "no Content-Range")[:100]
                raise not_s3(f"{self.url}/{name}", f"bytes {start}-{end - 1} wanted, the server sent {said}")
            whole = None if told[3] == "*" else int(told[3])
        if whole is not None and whole < end:
            raise self._too_short(name, whole, start, end)

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


class _Refused(Exception):
    """``take`` raised ``error``: nobody tries that again."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Sink:
    """Bytes of a range on their way into ``buffer``, and from there to ``take``, each time a full one; ``done`` of ``size`` have come."""

    def __init__(self, size: int, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
        self.size, self.done = size, 0
        self._buffer, self._take, self._filled = buffer, take, 0

    def room(self) -> int:
        """Bytes that may come next; never 0 before all have come."""
        return min(len(self._buffer) - self._filled, self.size - self.done)

    def put(self, data: bytes) -> None:
        """What ``take`` raises is raised as `_Refused`."""
        self._buffer[self._filled : self._filled + len(data)] = data
        self.done, self._filled = self.done + len(data), self._filled + len(data)
        if self._filled == len(self._buffer) or self.done == self.size:
            full, self._filled = self._buffer[: self._filled], 0
            try:
                self._take(full)
            except BaseException as e:
                raise _Refused(e) from e

    def restart(self) -> bool:
        """Begin again, as the file was replaced; return whether that is still possible: not once bytes have gone on."""
        if self.done > self._filled:
            return False
        self.done = self._filled = 0
        return True


def _is_name(name: str) -> bool:
    """Keys that no file could have, and those that stand for directories, are no names."""
    try:
        return bool(checked_path(name))
    except Corrupt:
        return False  # the question was whether it is refused
