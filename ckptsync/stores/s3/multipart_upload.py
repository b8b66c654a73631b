"""Write a key of S3, whole or in parts: replace it, or create it and never replace it.

Whether a server keeps to ``If-None-Match: *``
    cannot be asked, and some ignore what they do not know. AWS does (since 2024); of another it is
    seen when it refuses the first time, or when the same bytes are sent twice after the first small
    file: the second time must be refused. Until then, and where it does not, a name is looked at
    before it is written, which leaves a moment for somebody else.

Which upload is continued
    S3 keeps no word of ours with an unfinished upload that a later process could read: its metadata
    is not listed, and a part that is not completed makes some servers refuse. So an upload is known
    by what it has. The first of our parts that is looked for decides: an upload that has other
    bytes under that number is another file's, or another save's, and is left alone; one that has
    the same bytes is taken; one that has not got so far, lost just that part, or has no part yet,
    is taken if nothing speaks against it: an upload that was killed before its first part is
    not left behind.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_plus

from ckptsync.digest import crc32
from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores.contract import ABANDONED_AFTER
from ckptsync.stores.part_upload import MOST, FilePart
from ckptsync.stores.s3.error_codes import Mismatch, Unable, UploadGone
from ckptsync.stores.s3.requests import (
    Answer,
    Bucket,
    PartSum,
    StoredObject,
    base64_of,
    is_md5,
    md5,
    plain,
    seconds,
    server_time,
    size_of,
    sum_of,
    text,
    whole,
)
from ckptsync.stores.s3.transport import NotS3

NEW = {"IfNoneMatch": "*"}
DAY = 24 * 3600.0
_BYTES = {"ContentType": "application/octet-stream"}
_CHEAP = 64 << 10  # bytes that are sent sooner than it is asked whether they are there

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyTarget:
    """A `PartTarget`: a key that is written.

    ``most``: parts that the file has, at most. ``left``: returns the unfinished uploads that may be
    continued. ``is_new``: it must not be there yet.
    """

    bucket: Bucket
    key: str
    most: int
    left: Callable[[], Sequence[Unfinished]]
    is_new: bool

    def put_whole(self, data: memoryview) -> None:
        bucket = self.bucket
        if self.is_new:
            is_looked_at = not bucket.keeps_conditions or len(data) > _CHEAP
            if is_looked_at and (stored := bucket.found(self.key)):
                raise _taken(bucket.url(self.key), stored, sum_of(data))
            if bucket.keeps_conditions is not False:
                try:
                    self._put_new(data)
                except Unable:
                    self._note(keeps=False)
                else:
                    self._probe_conditional_writes(data)
                    return
        bucket.persistence.call(lambda: self._put(data))

    def begin(self) -> Multipart:
        stored = self.bucket.found(self.key) if self.is_new else None
        return Multipart(self, [] if stored else self.left(), stored)

    def _put(self, data: memoryview, **condition: str) -> PartSum:
        return self.bucket.send("put_object", self.key, data, **_BYTES, **condition)

    def _put_new(self, data: memoryview) -> None:
        tries = 0

        def once() -> PartSum:
            nonlocal tries
            tries += 1
            return self._put(data, **NEW)

        try:
            self.bucket.persistence.call(once)
        except Exists as e:
            self._note(keeps=True)
            error = _taken(self.bucket.url(self.key), self.bucket.found(self.key), sum_of(data))
            if tries > 1 and error.is_same:
                return  # the answer to an earlier try was lost
            raise error from e

    def _probe_conditional_writes(self, data: memoryview) -> None:
        """Find out whether the server supports conditional writes."""
        if self.bucket.keeps_conditions is None and len(data) <= _CHEAP:
            try:
                self._put(data, **NEW)
            except Exists:
                self._note(keeps=True)
            except StoreError:
                return  # not learnt: the file is written all the same
            else:
                self._note(keeps=False)

    def _note(self, *, keeps: bool) -> None:
        if self.bucket.keeps_conditions is None and not keeps:
            log.warning(
                "%s: this server does not support conditional writes: two nodes that write the"
                " same name at once may overwrite each other's file",
                self.bucket.url(""),
            )
        self.bucket.keeps_conditions = keeps


class Multipart:
    """A `PartUpload`, which may continue what earlier tries have ``left``.

    ``found``: what is under a key that must be new. Then nothing is sent, and `commit` tells
    whether the parts are the same bytes.
    """

    def __init__(
        self, target: KeyTarget, left: Sequence[Unfinished], found: StoredObject | None
    ) -> None:
        self._bucket, self._key, self._most = target.bucket, target.key, target.most
        is_conditional = target.is_new and target.bucket.keeps_conditions is not False
        self._is_new, self._condition = is_conditional, NEW if is_conditional else {}
        self._left = sorted(left, key=lambda upload: len(upload.parts), reverse=True)
        self._found = found
        self._lock = threading.Lock()
        self._id = ""
        self._is_ours, self._has_crc = False, False
        self._there: Sequence[SentPart] = ()
        self._sums: dict[int, PartSum] = {}

    def is_there(self, part: FilePart) -> bool:
        if self._found:
            self._sums[part.number] = sum_of(part.data)
            return True
        self._choose(part)
        for sent in self._there:
            if sent.number == part.number and is_same(sent, part):
                self._sums[part.number] = PartSum(sent.size, crc32(part.data), sent.tag)
                return True
        return False

    def put(self, part: FilePart) -> None:
        about = {"PartNumber": part.number, "UploadId": self._id}
        try:
            self._sums[part.number] = self._bucket.persistence.call(
                lambda: self._bucket.send("upload_part", self._key, part.data, **about)
            )
        except UploadGone as e:
            raise _removed(e) from e

    def commit(self, size: int) -> None:
        parts = [self._sums[number] for number in range(1, len(self._sums) + 1)]
        sums, tries = whole(parts), 0
        assert sums.size == size
        if self._found:
            raise _taken(self._bucket.url(self._key), self._found, sums)
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
            if stored := self._bucket.found(self._key):
                raise self._taken_by(stored, sums) from None
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
            agreeing = [(upload, upload.agrees(part, self._most)) for upload in self._left]
            same = [upload for upload, agrees in agreeing if agrees]
            maybe = [upload for upload, agrees in agreeing if agrees is None]
            for upload in [*same, *maybe]:
                self._id, self._there = upload.id, upload.parts
                self._has_crc = upload.algorithm == "CRC32"
                return
            self._begin()

    def _begin(self) -> None:
        parameters = dict(_BYTES)
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
        stored = self._bucket.found(self._key)
        if stored and stored.may_be(sums) and (is_repeated or not self._is_new):
            return
        if stored and self._is_new:
            raise self._taken_by(stored, sums) from e
        raise _removed(e) from e

    def _taken_by(self, stored: StoredObject, sums: PartSum) -> Exists:
        self._is_ours = True  # whoever began the upload: nobody can complete it any more
        return _taken(self._bucket.url(self._key), stored, sums)


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part of an unfinished upload. ``crc`` is base64, or empty.

    ``age``: seconds since it was sent, by the server's clock; infinite if unknown.
    """

    number: int
    size: int
    tag: str
    age: float = field(compare=False)
    crc: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that is not completed.

    ``age``: seconds since it was begun, by the server's clock; 0 if unknown. ``algorithm`` and
    ``kind`` of its checksums may be unknown.
    """

    key: str
    id: str
    age: float = field(compare=False)
    algorithm: str = ""
    kind: str = ""
    parts: tuple[SentPart, ...] = ()

    @property
    def idle(self) -> float:
        """Seconds since something happened to it."""
        return min([self.age, *(part.age for part in self.parts)])

    def agrees(self, part: FilePart, most: int) -> bool | None:
        """Return whether it has this part, these bytes.

        None if it has no part of this number, and nothing else speaks against it.

        ``most``: parts that the file has; with others beyond them it is another file's.
        """
        # whose completion needs what we do not keep
        is_composite = self.algorithm == "CRC32" and self.kind != "FULL_OBJECT"
        if is_composite or any(each.number > most for each in self.parts):
            return False
        sent = [each for each in self.parts if each.number == part.number]
        return any(is_same(each, part) for each in sent) if sent else None


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
    algorithms = ("", "CRC32" if bucket.takes_crc else "CRC64NVME")
    try:
        begun = [each for each in _begun(bucket, key) if each.key == key]
        listed = (_with_parts(bucket, each) for each in begun if each.algorithm in algorithms)
        return [upload for upload in listed if upload]
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
            if begun.age <= ABANDONED_AFTER:
                continue
            upload = _with_parts(bucket, begun)
            if upload and upload.idle > ABANDONED_AFTER:
                log.info(
                    "%s: removing an upload that was given up %.0f days ago",
                    bucket.url(upload.key),
                    upload.idle / DAY,
                )
                _remove(bucket, upload.key, upload.id)
    except StoreError as e:  # it costs money, and nothing else
        log.warning("%s: uploads that were given up cannot be removed: %s", bucket.url(prefix), e)


def _begun(bucket: Bucket, prefix: str) -> Iterator[Unfinished]:
    """Yield the uploads of keys that start with ``prefix``, without their parts."""

    def read(answer: Answer) -> list[Unfinished]:
        unquote = unquote_plus if answer.get("EncodingType") == "url" else str
        return [
            Unfinished(
                unquote(text(each, "Key")),
                _upload_id(each),
                _age(answer, each, "Initiated", unknown=0.0),
                text(each, "ChecksumAlgorithm"),
                text(each, "ChecksumType"),
            )
            for each in answer.get("Uploads", ())
        ]

    return bucket.listed("list_multipart_uploads", "", read, Prefix=prefix, EncodingType="url")


def _with_parts(bucket: Bucket, begun: Unfinished) -> Unfinished | None:
    """Return an upload with its parts; None if it is gone meanwhile."""

    def read(answer: Answer) -> list[SentPart]:
        return [
            SentPart(
                size_of(each["PartNumber"]),
                size_of(each["Size"]),
                text(each, "ETag"),
                _age(answer, each, "LastModified", unknown=math.inf),
                text(each, "ChecksumCRC32"),
            )
            for each in answer.get("Parts", ())
        ]

    try:
        parts = tuple(bucket.listed("list_parts", begun.key, read, MOST, UploadId=begun.id))
    except (UploadGone, NotFound):
        return None
    return replace(begun, parts=parts)


def _age(answer: Answer, each: Answer, name: str, *, unknown: float) -> float:
    """Return how long ago a moment was when the server answered, in seconds."""
    moment = seconds(text(each, name))
    return server_time(answer) - moment if moment else unknown


def _upload_id(answer: Answer) -> str:
    """Return an upload's identity.

    Raise NotS3 if there is none: a request without it would be about the file itself.
    """
    if upload := text(answer, "UploadId"):
        return upload
    raise NotS3("UploadId is missing")


def _remove(bucket: Bucket, key: str, upload: str) -> None:
    """Remove an upload and its parts. Removing what is not there is no error."""
    with contextlib.suppress(UploadGone, NotFound):
        bucket.ask("abort_multipart_upload", key, UploadId=upload)


def _taken(url: str, stored: StoredObject | None, sums: PartSum) -> Exists:
    """Return the error for a name that is taken, which says whether these bytes are there."""
    return Exists(f"{url}: already there", is_same=stored.is_same(sums) if stored else None)


def _removed(e: StoreError) -> StoreError:
    return Transient(
        str(e),
        hint=(
            "another writer of this name has completed or removed the upload; the next try begins"
            " anew"
        ),
    )
