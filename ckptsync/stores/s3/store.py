"""A store in an S3 bucket, on AWS or a compatible server: ``s3://bucket/prefix``.

S3 is the store contract already, but for details: names become keys below a prefix, a listing may
be out of order on other servers, a read that breaks continues where it ended if the object is still
the same, and 403 may mean that a key is missing.
"""

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
from ckptsync.stores.s3.error_codes import Denied, NoSuchRange, malformed_answer
from ckptsync.stores.s3.multipart_upload import KeyTarget, Unfinished, list_unfinished, remove_stale
from ckptsync.stores.s3.requests import Answer, Bucket, seconds, size_of, text
from ckptsync.stores.urls import Remote
from ckptsync.tensors import Extent

# RFC 9110, section 14.4
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII)
PAGE = 1000  # keys of a page of a listing, at most: S3's limit
# bytes of a part where memory is short: S3 takes parts of 5 MiB, and each costs a request
LEAST_PART = 8 << 20


class S3Store:
    """A store in a bucket; it retries requests itself, so it needs no `Retrying`.

    The constructor raises ConfigError if options or credentials are wrong, Unsupported for a
    directory bucket. Methods also raise ConfigError if the bucket is wrong.
    """

    late = 0.0

    def __init__(
        self, remote: Remote, options: Mapping[str, Any] | None = None, limits: Limits | None = None
    ) -> None:
        self.url = remote.url
        limits = limits or Limits()
        self.least = min(PART, max(LEAST_PART, limits.memory // 4 // MIB * MIB))
        """Bytes of a part, at least; in little memory, too, one is filled while another is sent.

        Unfinished uploads with parts of another size are not continued.
        """
        access = BucketAccess(remote, options or {}, limits)
        self._prefix, self._is_aws = access.prefix, access.is_aws
        self.bucket = Bucket(access, Persistence(limits.patience))
        # elsewhere a server may refuse a name that is there, and yet let two create it that end at
        # one moment (SeaweedFS 4 does, with multipart uploads)
        self.is_exclusive = self._is_aws
        self._lock = threading.Lock()
        self._pool = UploadPool(limits.threads, limits.memory)
        self._has_removed_stale = False

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield the stored files below ``prefix``; all are listed before the first, but on AWS."""
        entries = self._list_entries(self._prefix + checked_prefix(prefix))
        # servers other than AWS list directory by directory
        yield from entries if self._is_aws else sorted(entries)

    def names_after(self, prefix: str, after: str) -> Iterator[Entry]:
        """Yield the files below ``prefix`` behind ``after``, in the server's order.

        See `Sliced.names_after`.
        """
        yield from self._list_entries(
            self._prefix + checked_prefix(prefix),
            **({"StartAfter": self._prefix + after} if after else {}),
        )

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the directories directly below ``prefix`` (see `Store.dirs`)."""
        base = self._prefix + checked_prefix(prefix)

        def parse(answer: Answer) -> list[str]:
            """Return the keys and prefixes of one answer."""
            files = [text(each, "Key") for each in answer.get("Contents", ())]
            return files + [text(each, "Prefix") for each in answer.get("CommonPrefixes", ())]

        keys = self.bucket.list_entries(
            "list_objects_v2", "", parse, Prefix=base + start, MaxKeys=PAGE, Delimiter="/"
        )
        below = {key.removeprefix(base)[:-1] for key in keys if key.endswith("/")}
        return sorted(filter(_is_plain_name, below))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise NotFound, also for 403 if it is not listed."""
        try:
            return int(self.bucket.head(self._key(name))["ContentLength"])
        except Denied as e:
            raise self._not_found_if_absent(name) or e from e
        except NotFound as e:
            raise NotFound(f"{name}: not in {self.url}") from e

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise NotFound, or Corrupt if the file ends before."""
        if not out.nbytes:
            self.size(name)
            return
        self.stream(Extent(name, start, out.nbytes), out.cast("B"), lambda _: None)

    def stream(
        self, extent: Extent, buffer: memoryview, take: Callable[[memoryview], None]
    ) -> None:
        """Call ``take`` with the bytes of ``extent`` front to back, a ``buffer`` at a time.

        One request delivers all of them; after a failure another continues. Raise as `read_into`,
        and StoreError if the object was replaced meanwhile.
        """
        with contextlib.closing(_RangeRead(self, extent)) as reading:
            for position in range(0, extent.size, len(buffer)):
                view = buffer[: min(len(buffer), extent.size - position)]
                reading.fill(view)
                take(view)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store all of the content, or nothing; replace what has the name (see `Store.write`)."""
        self._send(name, chunks, about, is_new=False)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists if the name is taken (see `Store.create`)."""
        self._send(name, chunks, about, is_new=True)

    def delete(self, name: str) -> None:
        """Delete a file; do nothing if it is not there."""
        try:
            self.bucket.ask("delete_object", self._key(name))
        except NotFound:
            return  # as it should be

    def _key(self, name: str) -> str:
        """Return the key of a name; raise StoreError above 1024 bytes, Corrupt if not plain."""
        key = self._prefix + checked_path(name)
        if len(key.encode()) > 1024:
            raise StoreError(
                f"{self.url}/{name}: a key of {len(key.encode())} bytes, S3 takes at most 1024"
            )
        return key

    def _send(self, name: str, chunks: Iterable[Chunk], about: About, *, is_new: bool) -> None:
        """Write ``chunks`` to a key; in parts, with an origin, an unfinished upload continues.

        ``is_new``: raise Exists if the key has a file. Raise StoreError.
        """
        key = self._key(name)
        most_parts = (
            -(-about.size // part_size(about.size, least=self.least)) if about.size else MOST
        )
        list_uploads = (lambda: self._list_unfinished(key)) if about.origin else list
        target = KeyTarget(self.bucket, key, most_parts, list_uploads, is_new)
        self._pool.send(target, chunks, about, self.least)

    def _list_unfinished(self, key: str) -> list[Unfinished]:
        """Return the unfinished uploads of a key.

        The first call of a store also removes stale ones of the whole store; an error of that is
        logged.
        """
        with self._lock:
            has_removed, self._has_removed_stale = self._has_removed_stale, True
        if not has_removed:
            # without retries: if it fails, a later process removes them
            remove_stale(Bucket(self.bucket.access, Persistence(0)), self._prefix)
        return list_unfinished(self.bucket, key)

    def _list_entries(self, prefix: str, **parameters: Any) -> Iterator[Entry]:
        """Yield the files whose keys start with ``prefix``, in the server's order.

        Keys that cannot be names are left out. ``parameters`` are added to each request.
        """

        def parse(answer: Answer) -> list[tuple[str, int, float]]:
            """Return key, size and time of each object in one answer."""
            return [
                (
                    text(each, "Key"),
                    size_of(each.get("Size", 0)),
                    seconds(text(each, "LastModified")),
                )
                for each in answer.get("Contents", ())
            ]

        prefix_length = len(self._prefix)
        for key, size, mtime in self.bucket.list_entries(
            "list_objects_v2", "", parse, Prefix=prefix, MaxKeys=PAGE, **parameters
        ):
            if key.startswith(prefix) and _is_plain_name(key[prefix_length:]):
                yield Entry(key[prefix_length:], size, mtime)

    def open_range(self, name: str, start: int, end: int, tag: str) -> tuple[str, Any]:
        """Request bytes ``start`` to ``end``; return the object's tag and the answer's body.

        The caller closes the body. Tried once. ``tag``: of the object that earlier bytes were read
        from; "" before the first ones. Raise NotFound, Corrupt if the file ends before, StoreError
        if it was replaced, Transient.
        """
        try:
            answer = self.bucket.call(
                "get_object",
                self._key(name),
                Range=f"bytes={start}-{end - 1}",
                **({"IfMatch": tag} if tag else {}),
            )
        except Denied as e:
            raise self._not_found_if_absent(name) or e from e
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
        """Raise unless the answer begins with the requested range; call this before using bytes.

        It may have fewer bytes, and from byte 0 the whole file. Raise Corrupt if the file ends
        before ``end``, StoreError if the server ignores a later ``start``, Transient if it answers
        another range.
        """
        content_range, length = answer.get("ContentRange"), answer.get("ContentLength")
        if answer["ResponseMetadata"]["HTTPStatusCode"] == 200 and content_range is None:
            if start:
                raise StoreError(
                    f"{self.url}/{name}: the server ignores ranges",
                    hint="look for a proxy on the way",
                )
            file_size = length
        else:
            matched = _RANGE.fullmatch(content_range or "")
            count = int(matched[2]) - int(matched[1]) + 1 if matched else 0
            if (
                not matched
                or int(matched[1]) != start
                or not start <= int(matched[2]) < end
                or length not in (None, count)
            ):
                shown_range = (content_range or "no Content-Range")[:100]
                raise malformed_answer(
                    f"{self.url}/{name}",
                    (f"asked for bytes {start}-{end - 1}, the server sent {shown_range}"),
                )
            file_size = None if matched[3] == "*" else int(matched[3])
        if file_size is not None and file_size < end:
            raise too_short(name, file_size, start, end - start)

    def _not_found_if_absent(self, name: str) -> NotFound | None:
        """Return NotFound if a listing shows that the name is absent, else None.

        S3 answers 404 only to those who may list the whole bucket, 403 to others
        (docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html, "Permissions"). None also if
        listing is denied.
        """
        try:
            # in order: a name comes before those that begin with it
            first = next(self._list_entries(self._key(name)), None)
        except Denied:
            return None
        return None if first and first.name == name else NotFound(f"{name}: not in {self.url}")


class _RangeRead:
    """Reads a range front to back; a connection that broke continues where it ended.

    It continues only if the object is still the same.
    """

    def __init__(self, store: S3Store, extent: Extent) -> None:
        self._store, self._bucket, self._extent = store, store.bucket, extent
        self._received, self._tag = 0, ""
        self._body: Any = None

    def fill(self, view: memoryview) -> None:
        """Fill ``view`` with the range's next bytes, over a new connection after a failure.

        Raise as `S3Store.open_range`.
        """
        start = self._received

        def once() -> None:
            """Fill the part of ``view`` that is still missing."""
            while missing := start + len(view) - self._received:
                data = self._receive(missing)
                view[len(view) - missing : len(view) - missing + len(data)] = data
                self._received += len(data)

        self._bucket.persistence.call(once)

    def _receive(self, most: int) -> bytes:
        """Return the next bytes, one to ``most``; request the rest of the range if none is open.

        Raise as `S3Store.open_range`; Transient if no byte came, after which the next call requests
        the rest again.
        """
        name, start, size = self._extent.file, self._extent.start, self._extent.size
        if self._body is None:
            self._tag, self._body = self._store.open_range(
                name, start + self._received, start + size, self._tag
            )
        url = self._bucket.url(self._bucket.access.prefix + name)
        try:
            data: bytes = self._bucket.translate_errors(url, lambda: self._body.read(most))
        except Transient as e:
            why = f": {e}"
        else:
            why = ""
            if data:
                return data
        self.close()
        raise Transient(f"{url}: {self._received} of {size} bytes came{why}")

    def close(self) -> None:
        """Close the answer; bytes that were not read are dropped."""
        if self._body is not None:
            self._body.close()
            self._body = None


def _is_plain_name(name: str) -> bool:
    """Return whether a key is a file's name; those that stand for directories are not."""
    try:
        return bool(checked_path(name))
    except Corrupt:
        return False  # the question was whether it is refused
