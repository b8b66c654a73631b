"""A store in an S3 bucket, on AWS or a compatible server: ``s3://bucket/prefix``."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptsync.errors import Corrupt, Exists, NotFound, StoreError, Transient
from ckptsync.safe_names import checked_path
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, checked_prefix, too_short
from ckptsync.stores.limits import Limits
from ckptsync.stores.part_upload import MIB, MOST, PART, UploadPool, part_size
from ckptsync.stores.retry import Persistence
from ckptsync.stores.s3.client import BucketAccess
from ckptsync.stores.s3.error_codes import Denied, NoSuchRange, not_s3
from ckptsync.stores.s3.multipart_upload import KeyTarget, Unfinished, remove_stale, unfinished
from ckptsync.stores.s3.requests import Answer, Bucket, seconds, size_of, text
from ckptsync.stores.urls import Remote
from ckptsync.tensors import Extent

# RFC 9110, section 14.4
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII)
PAGE = 1000  # keys of a listing, at most: S3's own limit
# bytes of a part where memory is short: S3 takes parts of 5 MiB, and each costs a request
SMALLEST = 8 << 20


class S3Store:
    """Retries by itself what fails transiently, piece by piece.

    Raises ConfigError where options, credentials or the bucket are wrong.
    """

    late = 0.0

    def __init__(
        self, remote: Remote, options: Mapping[str, Any] | None = None, limits: Limits | None = None
    ) -> None:
        self.url = remote.url
        limits = limits or Limits()
        self.least = min(PART, max(SMALLEST, limits.memory // 4 // MIB * MIB))
        """Bytes of a part, at least: of little memory, too, one is filled while another is sent.

        Uploads begun with another are not found.
        """
        access = BucketAccess(remote, options or {}, limits)
        self._prefix, self._is_aws = access.prefix, access.is_aws
        self.bucket = Bucket(access, Persistence(limits.patience))
        # elsewhere a server may refuse a name that is there, and yet let two create it that end at
        # one moment (SeaweedFS 4 does, with multipart uploads)
        self.is_exclusive = self._is_aws
        self._lock = threading.Lock()
        self._pool = UploadPool(limits.threads, limits.memory)
        self._has_removed = False

    def names(self, prefix: str) -> Iterator[Entry]:
        entries = self._listed(self._prefix + checked_prefix(prefix))
        yield from (
            entries if self._is_aws else sorted(entries)
        )  # others list directory by directory

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        yield from self._listed(
            self._prefix + checked_prefix(prefix),
            **({"StartAfter": self._prefix + after} if after else {}),
        )

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        base = self._prefix + checked_prefix(prefix)

        def read(answer: Answer) -> list[str]:
            files = [text(each, "Key") for each in answer.get("Contents", ())]
            return files + [text(each, "Prefix") for each in answer.get("CommonPrefixes", ())]

        keys = self.bucket.listed(
            "list_objects_v2", "", read, Prefix=base + start, MaxKeys=PAGE, Delimiter="/"
        )
        below = {key.removeprefix(base)[:-1] for key in keys if key.endswith("/")}
        return sorted(filter(_is_name, below))

    def size(self, name: str) -> int:
        try:
            return int(self.bucket.head(self._key(name))["ContentLength"])
        except Denied as e:
            raise self._absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if not out.nbytes:
            self.size(name)
            return
        self.stream(Extent(name, start, out.nbytes), out.cast("B"), lambda _: None)

    def stream(
        self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]
    ) -> None:
        with contextlib.closing(_RangeRead(self, extent)) as reading:
            for at in range(0, extent.size, len(buffer)):
                view = buffer[: min(len(buffer), extent.size - at)]
                reading.fill(view)
                take(view)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._send(name, chunks, about, is_new=False)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._send(name, chunks, about, is_new=True)

    def delete(self, name: str) -> None:
        try:
            self.bucket.ask("delete_object", self._key(name))
        except NotFound:
            return  # as it should be

    def _key(self, name: str) -> str:
        key = self._prefix + checked_path(name)
        if len(key.encode()) > 1024:
            raise StoreError(
                f"{self.url}/{name}: a key of {len(key.encode())} bytes, S3 takes at most 1024"
            )
        return key

    def _send(self, name: str, chunks: Iterable[Chunk], about: About, *, is_new: bool) -> None:
        key = self._key(name)
        most = -(-about.size // part_size(about.size, least=self.least)) if about.size else MOST
        left = (lambda: self._list_unfinished(key)) if about.origin else list
        target = KeyTarget(self.bucket, key, most, left, is_new)
        self._pool.send(target, chunks, about, self.least)

    def _list_unfinished(self, key: str) -> list[Unfinished]:
        """Return the unfinished uploads of a key.

        The first call in the life of a store also removes stale ones of the whole store.
        """
        with self._lock:
            has_removed, self._has_removed = self._has_removed, True
        if not has_removed:
            # if it fails, another time will do
            remove_stale(Bucket(self.bucket.access, Persistence(0)), self._prefix)
        return unfinished(self.bucket, key)

    def _listed(self, prefix: str, **parameters: Any) -> Iterator[Entry]:
        def read(answer: Answer) -> list[tuple[str, int, float]]:
            return [
                (
                    text(each, "Key"),
                    size_of(each.get("Size", 0)),
                    seconds(text(each, "LastModified")),
                )
                for each in answer.get("Contents", ())
            ]

        cut = len(self._prefix)
        for key, size, mtime in self.bucket.listed(
            "list_objects_v2", "", read, Prefix=prefix, MaxKeys=PAGE, **parameters
        ):
            if key.startswith(prefix) and _is_name(key[cut:]):
                yield Entry(key[cut:], size, mtime)

    def open_range(self, name: str, start: int, end: int, tag: str) -> tuple[str, Any]:
        """Return the tag and the body of an answer with bytes from ``start`` to ``end``.

        ``tag``: of the file that the first bytes were of; "" if there are none yet.
        """
        try:
            answer = self.bucket.call(
                "get_object",
                self._key(name),
                Range=f"bytes={start}-{end - 1}",
                **({"IfMatch": tag} if tag else {}),
            )
        except Denied as e:
            raise self._absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e
        except NoSuchRange as e:
            raise too_short(name, self.size(name), start, end - start) from e
        except Exists as e:  # 412
            raise StoreError(
                f"{self.url}/{name}: replaced while it was read", hint="try again"
            ) from e
        try:
            self._check_range(name, start, end, answer)
        except BaseException:
            answer["Body"].close()
            raise
        return str(answer.get("ETag", "")), answer["Body"]

    def _check_range(self, name: str, start: int, end: int, answer: Answer) -> None:
        """Raise unless the answer has the requested range; call this before using its bytes."""
        given, length = answer.get("ContentRange"), answer.get("ContentLength")
        if answer["ResponseMetadata"]["HTTPStatusCode"] == 200 and given is None:
            if start:
                raise StoreError(
                    f"{self.url}/{name}: the server ignores ranges",
                    hint="look for a proxy on the way",
                )
            whole = length
        else:
            found_range = _RANGE.fullmatch(given or "")
            count = int(found_range[2]) - int(found_range[1]) + 1 if found_range else 0
            if (
                not found_range
                or int(found_range[1]) != start
                or not start <= int(found_range[2]) < end
                or length not in (None, count)
            ):
                sent = (given or "no Content-Range")[:100]
                raise not_s3(
                    f"{self.url}/{name}",
                    (f"asked for bytes {start}-{end - 1}, the server sent {sent}"),
                )
            whole = None if found_range[3] == "*" else int(found_range[3])
        if whole is not None and whole < end:
            raise too_short(name, whole, start, end - start)

    def _absent(self, name: str) -> NotFound | None:
        """The error, if a listing has no such name; what may not be read is another matter.

        S3 says 404 only to who may list the whole bucket, 403 to others
        (docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html, "Permissions").
        """
        try:
            # in order: a name comes before those that begin with it
            first = next(self._listed(self._key(name)), None)
        except Denied:
            return None
        return None if first and first.name == name else NotFound(f"{name}: not in {self.url}")


class _RangeRead:
    """Reads a range front to back; a connection that broke off continues where it ended.

    It continues only if it is still the same file.
    """

    def __init__(self, store: S3Store, extent: Extent) -> None:
        self._store, self._bucket, self._extent = store, store.bucket, extent
        self._done, self._tag = 0, ""
        self._body: Any = None

    def fill(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes."""
        first = self._done

        def once() -> None:
            while left := first + len(view) - self._done:
                data = self._receive(left)
                view[len(view) - left : len(view) - left + len(data)] = data
                self._done += len(data)

        self._bucket.persistence.call(once)

    def _receive(self, most: int) -> bytes:
        name, start, size = self._extent.file, self._extent.start, self._extent.size
        if self._body is None:
            self._tag, self._body = self._store.open_range(
                name, start + self._done, start + size, self._tag
            )
        url = self._bucket.url(self._bucket.access.prefix + name)
        try:
            data: bytes = self._bucket.understood(url, lambda: self._body.read(most))
        except Transient as e:
            why = f": {e}"
        else:
            why = ""
            if data:
                return data
        self.close()
        raise Transient(f"{url}: {self._done} of {size} bytes came{why}")

    def close(self) -> None:
        """Close the response; what was not read is dropped."""
        if self._body is not None:
            self._body.close()
            self._body = None


def _is_name(name: str) -> bool:
    """Keys that no file could have, and those that stand for directories, are no names."""
    try:
        return bool(checked_path(name))
    except Corrupt:
        return False  # the question was whether it is refused
