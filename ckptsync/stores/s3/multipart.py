"""Multipart uploads: continue what an earlier try began, complete it, remove abandoned ones.

Which upload is continued
    S3 keeps no word of ours with an unfinished upload that a later process could read: its metadata
    is not listed, and a part that is not completed makes some servers refuse. So an upload is known
    by what it has. The first of our parts that is looked for decides: an upload that has other
    bytes under that number is another file's, or another save's, and is left alone; one that has
    the same bytes is taken; one that has not got so far, or lost just that part, is taken if
    nothing speaks against it. An upload without parts is not taken: there is nothing to gain.

Why two writers under one key never make a mixture
    Both may take the same upload, and each may send parts that replace the other's. But each
    completes with the tags that it was given for its own bytes, or that it has compared with its
    own bytes: the server completes exactly those parts, or refuses (`InvalidPart`) because another
    part is there now. Who is refused tries again later, finds parts that differ, and sends these.
    Where both had the same bytes, the first one completes; the other is told that the upload is
    gone, looks, and sees by the tag that his bytes are there.

When the answer to CompleteMultipartUpload is lost
    the next try is told that the upload is gone (or, by some, success), or that the name is taken.
    What is under the key is compared: tag, checksum, size.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from ckptsync.digest import crc32
from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores.part_upload import MOST, FilePart
from ckptsync.stores.s3.checksums import (
    PartSum,
    StoredObject,
    base64_of,
    is_md5,
    md5,
    plain,
    sum_of,
    whole,
)
from ckptsync.stores.s3.error_codes import Mismatch, Unable, UploadGone
from ckptsync.stores.s3.requests import Answer, Bucket, seconds, server_time, size_of, text
from ckptsync.stores.s3.transport import NotS3

DAY = 24 * 3600.0
STALE = 7 * DAY  # without a new part: nobody is at work on it

log = logging.getLogger(__name__)


class SentPart(NamedTuple):
    """A part of an unfinished upload. ``crc`` is base64, or empty."""

    number: int
    size: int
    tag: str
    mtime: float
    crc: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that is not completed.

    ``since``, ``now``: seconds of the server's clock; ``since`` is infinite if untold.

    ``algorithm`` and ``kind`` of its checksums may be untold.
    """

    key: str
    id: str
    since: float
    now: float = field(compare=False)
    algorithm: str = ""
    kind: str = ""
    parts: tuple[SentPart, ...] = ()

    @property
    def idle(self) -> float:
        """Seconds since something happened to it."""
        return self.now - max([self.since, *(part.mtime for part in self.parts)])

    def agrees(self, part: FilePart, most: int) -> bool | None:
        """Return whether it has this part, these bytes.

        None if it has no part of this number, and nothing else speaks against it.

        ``most``: parts that the file has; with others beyond them it is another file's.
        """
        # whose completion needs what we do not keep
        is_composite = self.algorithm == "CRC32" and self.kind != "FULL_OBJECT"
        if is_composite or any(each.number > most for each in self.parts):
            return False
        there = [each for each in self.parts if each.number == part.number]
        return any(is_same(each, part) for each in there) if there else None


def is_same(sent: SentPart, part: FilePart) -> bool:
    """Return whether the server has these bytes, by its checksum or its tag.

    The tag is compared only if there is no checksum, and the tag can be an MD5.
    """
    if sent.size != len(part.data):
        return False
    if sent.crc:
        return sent.crc == base64_of(crc32(part.data))
    return is_md5(sent.tag) and plain(sent.tag) == md5(part.data).hex()


def unfinished(bucket: Bucket, key: str) -> list[Unfinished]:
    """Return the unfinished uploads of a key.

    None, and a warning, if nobody may list them: then nothing is continued.
    """
    # the latter is AWS's own, where none was asked for
    known = ("", "CRC32" if bucket.takes_crc else "CRC64NVME")
    try:
        begun = [each for each in _begun(bucket, key) if each.key == key]
        listed = (_with_parts(bucket, each) for each in begun if each.algorithm in known)
        return [found for found in listed if found]
    except Transient:
        raise
    except StoreError as e:
        log.warning(
            "%s: unfinished uploads cannot be listed, so none is continued: %s", bucket.url(key), e
        )
        return []


def remove_stale(bucket: Bucket, prefix: str) -> None:
    """Remove abandoned uploads below ``prefix``, if it is one of our stores.

    Every upload that was begun there is then ours.
    """
    try:
        if bucket.found(f"{prefix}{STORE_FILE}") is None:
            return
        for begun in _begun(bucket, prefix):
            if begun.idle > STALE and (found := _with_parts(bucket, begun)) and found.idle > STALE:
                log.info(
                    "%s: removing an upload that was given up %.0f days ago",
                    bucket.url(found.key),
                    found.idle / DAY,
                )
                _remove(bucket, found.key, found.id)
    except StoreError as e:  # it costs money, and nothing else
        log.warning("%s: uploads that were given up cannot be removed: %s", bucket.url(prefix), e)


class Multipart:
    """A `PartUpload`.

    ``condition``: parameters of the request that completes it; ``left``: what earlier tries have
    left; ``most``: parts of the file.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        condition: Mapping[str, str],
        left: Sequence[Unfinished],
        most: int,
    ) -> None:
        self._bucket, self._key, self._condition, self._most = bucket, key, condition, most
        self._left = sorted(left, key=lambda upload: len(upload.parts), reverse=True)
        self._lock = threading.Lock()
        self._id = ""
        self._is_new, self._is_ours, self._has_crc = bool(condition), False, False
        self._taken: Unfinished | None = None
        self._sums: dict[int, PartSum] = {}

    def is_there(self, part: FilePart) -> bool:
        self._choose(part)
        for sent in self._taken.parts if self._taken else ():
            if sent.number == part.number and is_same(sent, part):
                self._sums[part.number] = PartSum(sent.size, crc32(part.data), sent.tag)
                return True
        return False

    def put(self, part: FilePart) -> None:
        self._choose(part)
        about = {"PartNumber": part.number, "UploadId": self._id}
        try:
            self._sums[part.number] = self._bucket.persistence.call(
                lambda: self._bucket.send("upload_part", self._key, part.data, **about)
            )
        except UploadGone as e:
            raise _removed(e) from e

    def commit(self, size: int) -> None:
        parts = ordered(self._sums)
        sums, tries = whole(parts), 0
        assert sums.size == size
        parameters: dict[str, Any] = {"UploadId": self._id, "MpuObjectSize": size}
        if self._has_crc:
            parameters |= {"ChecksumCRC32": base64_of(sums.crc), "ChecksumType": "FULL_OBJECT"}
        parameters["MultipartUpload"] = {
            "Parts": [{"PartNumber": n, "ETag": each.tag} for n, each in enumerate(parts, 1)]
        }

        def once() -> Answer:
            nonlocal tries
            tries += 1
            return self._bucket.call(
                "complete_multipart_upload", self._key, **parameters, **self._condition
            )

        try:
            answer = self._bucket.persistence.call(once)
        except Mismatch as e:
            raise Transient(str(e), hint=e.hint) from e
        except (UploadGone, Exists) as e:
            self._check_stored(e, sums, is_repeated=tries > 1)
            return
        except Unable:
            if not self._condition:
                raise
            # A server that knows no conditions: nobody else's file is replaced but one that appears
            # in this very moment.
            self._condition = {}
            if found := self._bucket.found(self._key):
                raise self._taken_by(found, sums) from None
            self.commit(size)
            return
        crc = answer.get("ChecksumCRC32")
        if crc not in (None, base64_of(sums.crc)) and answer.get("ChecksumType") == "FULL_OBJECT":
            raise StoreError(
                f"{self._bucket.url(self._key)}: the server assembled different bytes than"
                " ckptsync uploaded"
            )

    def abandon(self) -> None:
        """Remove the upload, unless another process has begun it: it may still be at work."""
        if self._id and self._is_ours:
            _remove(self._bucket, self._key, self._id)

    def _choose(self, part: FilePart) -> None:
        """Decide once which unfinished upload is continued, or begin one."""
        with self._lock:
            if self._id:
                return
            same, maybe = [], []
            for upload in self._left:
                agrees = upload.agrees(part, self._most)
                if agrees:
                    same.append(upload)
                elif agrees is None and upload.parts:
                    maybe.append(upload)
            self._taken = next(iter([*same, *maybe]), None)
            if self._taken:
                self._id, self._has_crc = self._taken.id, self._taken.algorithm == "CRC32"
            else:
                self._begin()

    def _begin(self) -> None:
        parameters = {"ContentType": "application/octet-stream"}
        if self._bucket.takes_crc:
            parameters |= {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
        self._id, kind = self._bucket.ask(
            "create_multipart_upload",
            self._key,
            lambda answer: (_upload_id(answer), answer.get("ChecksumType")),
            **parameters,
        )
        self._is_ours, self._has_crc = True, kind == "FULL_OBJECT"

    def _check_stored(self, e: StoreError, sums: PartSum, *, is_repeated: bool) -> None:
        """Return if these bytes are stored already; raise StoreError otherwise.

        The upload is gone, or the name is taken: by an earlier try of ours whose answer was lost,
        or by another writer.
        """
        found = self._bucket.found(self._key)
        if found and found.may_be(sums) and (is_repeated or not self._is_new):
            return
        if found and self._is_new:
            raise self._taken_by(found, sums) from e
        raise _removed(e) from e

    def _taken_by(self, found: StoredObject, sums: PartSum) -> Exists:
        self._is_ours = True  # whoever began the upload: nobody can complete it any more
        return taken(self._bucket.url(self._key), found, sums)


class ExistingObject:
    """A `PartUpload` for a name that is taken: nothing is sent.

    The end tells whether these bytes are what is there.
    """

    def __init__(self, url: str, found: StoredObject) -> None:
        self._url, self._found = url, found
        self._sums: dict[int, PartSum] = {}

    def is_there(self, part: FilePart) -> bool:
        """Nothing of it is to be sent."""
        self._sums[part.number] = sum_of(part.data)
        return True

    def put(self, part: FilePart) -> None:
        """Never called."""
        raise AssertionError(part.number)

    def commit(self, size: int) -> None:
        """Raises Exists."""
        assert size >= 0
        raise taken(self._url, self._found, whole(ordered(self._sums)))

    def abandon(self) -> None:
        """There is nothing to remove."""


def taken(url: str, found: StoredObject | None, sums: PartSum) -> Exists:
    """Return the error for a name that is taken, which says whether these bytes are there."""
    return Exists(f"{url}: already there", is_same=found.is_same(sums) if found else None)


def ordered(sums: Mapping[int, PartSum]) -> list[PartSum]:
    """Return the sums of parts 1, 2, …"""
    return [sums[number] for number in range(1, len(sums) + 1)]


def _removed(e: StoreError) -> StoreError:
    return Transient(
        str(e),
        hint=(
            "another writer of this name has completed or removed the upload; the next try begins"
            " anew"
        ),
    )


def _remove(bucket: Bucket, key: str, upload: str) -> None:
    """Remove an upload and its parts. Removing what is not there is no error."""
    with contextlib.suppress(UploadGone, NotFound):
        bucket.ask("abort_multipart_upload", key, UploadId=upload)


def _begun(bucket: Bucket, prefix: str) -> Iterator[Unfinished]:
    """Yield the uploads of keys that start with ``prefix``, without their parts."""

    def read(answer: Answer) -> list[Unfinished]:
        unquote = unquote_plus if answer.get("EncodingType") == "url" else str
        return [
            Unfinished(
                unquote(text(each, "Key")),
                _upload_id(each),
                seconds(text(each, "Initiated")) or math.inf,
                server_time(answer),
                text(each, "ChecksumAlgorithm"),
                text(each, "ChecksumType"),
            )
            for each in answer.get("Uploads", ())
        ]

    markers = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
    for page in bucket.pages(
        "list_multipart_uploads", "", markers, read, Prefix=prefix, EncodingType="url"
    ):
        yield from page


def _with_parts(bucket: Bucket, begun: Unfinished) -> Unfinished | None:
    """Return an upload with its parts; None if it is gone meanwhile."""
    now = begun.now

    def read(answer: Answer) -> list[SentPart]:
        nonlocal now
        now = server_time(answer)
        return [_sent_part(each) for each in answer.get("Parts", ())]

    pages = bucket.pages(
        "list_parts",
        begun.key,
        {"NextPartNumberMarker": "PartNumberMarker"},
        read,
        MOST,
        UploadId=begun.id,
    )
    try:
        parts = tuple(part for page in pages for part in page)
    except (UploadGone, NotFound):
        return None
    return replace(begun, parts=parts, now=now)


def _sent_part(each: Answer) -> SentPart:
    mtime = seconds(text(each, "LastModified"))
    return SentPart(
        size_of(each["PartNumber"]),
        size_of(each["Size"]),
        text(each, "ETag"),
        mtime,
        text(each, "ChecksumCRC32"),
    )


def _upload_id(answer: Answer) -> str:
    """Return an upload's identity.

    Raise NotS3 if there is none: a request without it would be about the file itself.
    """
    if found := text(answer, "UploadId"):
        return found
    raise NotS3("UploadId is missing")
