"""Write a key of S3, whole or in parts: replace it, or create it and never replace it.

An upload can be killed after hours, other writers may use the same key, and any answer may be lost.
So a later process recognises an unfinished upload by the checksums of its parts, and the server
itself compares tags when an upload is completed.

Whether a server supports ``If-None-Match: *``
    Servers do not say, and some ignore conditions. AWS supports it (since 2024); of another server
    it is known when it refuses the first time, or when the same bytes are sent twice after the
    first small file: the second time must be refused. Until then, and on servers without it, a name
    is looked up before it is written, so another writer may create it in between.

Which upload is continued
    S3 keeps no data of ours with an unfinished upload that a later process could read: its metadata
    is not listed, and a part that is not completed makes some servers refuse. So an upload is
    recognised by its parts. The first of our parts that is looked up decides. An upload with other
    bytes under that number belongs to another file or save, and is not touched. One with the same
    bytes is continued. One that lacks just that part, or has no part yet, is continued if nothing
    contradicts: so an upload that was killed before its first part is not left behind.

Why two writers of one key never make a mixture
    Both may continue the same upload, and each may send parts that replace the other's. But each
    completes with the tags of its own bytes: the server completes exactly those parts, or refuses
    (`InvalidPart`) because another part has replaced one. The refused writer tries again later,
    finds parts that differ, and sends its own. If both had the same bytes, the first one completes;
    the other is told that the upload is gone, looks up the key, and sees its bytes there by the
    tag.

When the answer to CompleteMultipartUpload is lost
    The next try is told that the upload is gone (or, by some servers, success), or that the name is
    taken. The object under the key is compared: tag, checksum, size.
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
    seconds,
    server_time,
    size_of,
    sum_of,
    sum_parts,
    text,
    unquoted,
)
from ckptsync.stores.s3.transport import NotS3

NEW = {"IfNoneMatch": "*"}
DAY = 24 * 3600.0
_BYTES = {"ContentType": "application/octet-stream"}
_CHEAP = 64 << 10  # bytes: a smaller file is sent without looking the name up before

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyTarget:
    """A `PartTarget`: a key that is written.

    ``most``: parts that the file has, at most. ``list_unfinished``: returns the unfinished uploads
    that may be continued. ``is_new``: the key must not exist yet.
    """

    bucket: Bucket
    key: str
    most: int
    list_unfinished: Callable[[], Sequence[Unfinished]]
    is_new: bool

    def put_whole(self, data: memoryview) -> None:
        """Store a small file by one request.

        Raise Exists if the key is to be new and exists, with whether it has the same bytes. Without
        conditional writes, or above `_CHEAP` bytes, the key is looked up before. The first small
        file also tests the server (`_probe_conditional_writes`).
        """
        bucket = self.bucket
        if self.is_new:
            is_looked_up = not bucket.keeps_conditions or len(data) > _CHEAP
            if is_looked_up and (stored := bucket.find(self.key)):
                raise _taken(bucket.url(self.key), stored, sum_of(data))
            if bucket.keeps_conditions is not False:
                try:
                    self._put_new(data)
                except Unable:
                    self._set_keeps_conditions(keeps=False)
                else:
                    self._probe_conditional_writes(data)
                    return
        bucket.persistence.call(lambda: self._put(data))

    def begin(self) -> Multipart:
        """Return an upload in parts; nothing was sent yet, but unfinished uploads were listed.

        If the key is to be new and exists, the upload only compares.
        """
        stored = self.bucket.find(self.key) if self.is_new else None
        return Multipart(self, [] if stored else self.list_unfinished(), stored)

    def _put(self, data: memoryview, **condition: str) -> PartSum:
        """Send the whole file once, under a condition or none; return its sums."""
        return self.bucket.send("put_object", self.key, data, **_BYTES, **condition)

    def _put_new(self, data: memoryview) -> None:
        """Send the whole file if the key does not exist; raise Exists if it does.

        It is no error if an earlier try of this call has stored these bytes, and its answer was
        lost. Raise Unable without conditional writes; after Exists they are known to work.
        """
        tries = 0

        def once() -> PartSum:
            """Send the file, and count the try."""
            nonlocal tries
            tries += 1
            return self._put(data, **NEW)

        try:
            self.bucket.persistence.call(once)
        except Exists as e:
            self._set_keeps_conditions(keeps=True)
            error = _taken(self.bucket.url(self.key), self.bucket.find(self.key), sum_of(data))
            if tries > 1 and error.is_same:
                return  # the answer to an earlier try was lost
            raise error from e

    def _probe_conditional_writes(self, data: memoryview) -> None:
        """Send a small file again, to test whether the server supports conditional writes.

        Only if that is not known. If the server refuses, it supports them; another error tells
        nothing.
        """
        if self.bucket.keeps_conditions is None and len(data) <= _CHEAP:
            try:
                self._put(data, **NEW)
            except Exists:
                self._set_keeps_conditions(keeps=True)
            except StoreError:
                return  # not learnt: the file is written all the same
            else:
                self._set_keeps_conditions(keeps=False)

    def _set_keeps_conditions(self, *, keeps: bool) -> None:
        """Set whether the server supports conditional writes; warn once if it does not."""
        if self.bucket.keeps_conditions is None and not keeps:
            log.warning(
                "%s: this server does not support conditional writes: two nodes that write the"
                " same name at once may overwrite each other's file",
                self.bucket.url(""),
            )
        self.bucket.keeps_conditions = keeps


class Multipart:
    """A `PartUpload`, which may continue one of the ``unfinished`` uploads of earlier tries.

    ``stored``: the object under a key that must be new. Then nothing is sent, and `commit` raises
    Exists with whether the parts are the same bytes.
    """

    def __init__(
        self, target: KeyTarget, unfinished: Sequence[Unfinished], stored: StoredObject | None
    ) -> None:
        self._bucket, self._key, self._most = target.bucket, target.key, target.most
        is_conditional = target.is_new and target.bucket.keeps_conditions is not False
        self._is_new, self._condition = is_conditional, NEW if is_conditional else {}
        self._unfinished = sorted(unfinished, key=lambda upload: len(upload.parts), reverse=True)
        self._stored = stored
        self._lock = threading.Lock()
        self._id = ""
        self._is_ours, self._has_crc = False, False
        self._sent_parts: Sequence[SentPart] = ()
        self._sums: dict[int, PartSum] = {}

    def reuse_part(self, part: FilePart) -> bool:
        """Return True, and count a part as sent, if the upload has a part with its checksum.

        True for every part, without a request, if the key is ``stored`` already. Else the first
        call chooses an unfinished upload to continue, or begins one. Raise as `Bucket.ask`.
        """
        if self._stored:
            self._sums[part.number] = sum_of(part.data)
            return True
        self._choose_upload(part)
        for sent_part in self._sent_parts:
            if sent_part.number == part.number and is_same(sent_part, part):
                self._sums[part.number] = PartSum(sent_part.size, crc32(part.data), sent_part.tag)
                return True
        return False

    def put(self, part: FilePart) -> None:
        """Send a part, with retries; raise Transient if another writer has ended the upload."""
        about = {"PartNumber": part.number, "UploadId": self._id}
        try:
            self._sums[part.number] = self._bucket.persistence.call(
                lambda: self._bucket.send("upload_part", self._key, part.data, **about)
            )
        except UploadGone as e:
            raise _removed(e) from e

    def commit(self, size: int) -> None:
        """Complete the upload, all of whose parts are sent, so that the key has these bytes.

        If the server knows no conditions, the key is looked up: a file that appears just then is
        replaced.

        Raises:
            Exists: the key must be new, and exists.
            Transient: another writer has replaced a part, or ended the upload; the next try may
                succeed.
            StoreError: the server assembled other bytes.

        """
        parts = [self._sums[number] for number in range(1, len(self._sums) + 1)]
        sums, tries = sum_parts(parts), 0
        assert sums.size == size
        if self._stored:
            raise _taken(self._bucket.url(self._key), self._stored, sums)
        parameters: dict[str, Any] = {"UploadId": self._id, "MpuObjectSize": size}
        if self._has_crc:
            parameters |= {"ChecksumCRC32": base64_of(sums.crc), "ChecksumType": "FULL_OBJECT"}
        parameters["MultipartUpload"] = {
            "Parts": [{"PartNumber": n, "ETag": each.tag} for n, each in enumerate(parts, 1)]
        }

        def once() -> Answer:
            """Complete the upload, and count the try."""
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
            if stored := self._bucket.find(self._key):
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
        """Remove the upload if this process began it; another one's writer may still be at work."""
        if self._id and self._is_ours:
            _remove(self._bucket, self._key, self._id)

    def _choose_upload(self, part: FilePart) -> None:
        """Set once which unfinished upload is continued, or begin a new one.

        One that has ``part`` is preferred to one that may belong to the file (`Unfinished.agrees`).
        """
        with self._lock:
            if self._id:
                return
            candidates = [(upload, upload.agrees(part, self._most)) for upload in self._unfinished]
            matching = [upload for upload, agrees in candidates if agrees]
            possible = [upload for upload, agrees in candidates if agrees is None]
            for upload in [*matching, *possible]:
                self._id, self._sent_parts = upload.id, upload.parts
                self._has_crc = upload.algorithm == "CRC32"
                return
            self._create_upload()

    def _create_upload(self) -> None:
        """Begin a new upload, with CRC32s where the server knows them."""
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
        """Return if these bytes are stored already; a new key only if the try ``is_repeated``.

        The upload is gone, or the name is taken: by an earlier try of this process whose answer was
        lost, or by another writer. Then raise Exists for a new key that has a file, else Transient.
        """
        stored = self._bucket.find(self._key)
        if stored and stored.may_be(sums) and (is_repeated or not self._is_new):
            return
        if stored and self._is_new:
            raise self._taken_by(stored, sums) from e
        raise _removed(e) from e

    def _taken_by(self, stored: StoredObject, sums: PartSum) -> Exists:
        """Return the error for an existing key; note that `abandon` may remove the upload."""
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
    ``kind`` of its checksums are "" if unknown.
    """

    key: str
    id: str
    age: float = field(compare=False)
    algorithm: str = ""
    kind: str = ""
    parts: tuple[SentPart, ...] = ()

    @property
    def idle(self) -> float:
        """Seconds since it was begun, or since its last part was sent: the fewer."""
        return min([self.age, *(part.age for part in self.parts)])

    def agrees(self, part: FilePart, most: int) -> bool | None:
        """Return whether the unfinished upload has this part with these bytes.

        None if it has no part of this number. False also if it cannot be continued: with a checksum
        of its parts' CRC32s, or with parts beyond ``most``, the number that the file has.
        """
        # to complete such an upload, the checksum of each part would be needed
        is_composite = self.algorithm == "CRC32" and self.kind != "FULL_OBJECT"
        if is_composite or any(each.number > most for each in self.parts):
            return False
        same_number = [each for each in self.parts if each.number == part.number]
        return any(is_same(each, part) for each in same_number) if same_number else None


def is_same(sent_part: SentPart, part: FilePart) -> bool:
    """Return whether the server has these bytes, by its checksum, or else its tag.

    A tag that is no MD5 is never the same.
    """
    if sent_part.size != len(part.data):
        return False
    if sent_part.crc:
        return sent_part.crc == base64_of(crc32(part.data))
    return is_md5(sent_part.tag) and unquoted(sent_part.tag) == md5(part.data).hex()


def list_unfinished(bucket: Bucket, key: str) -> list[Unfinished]:
    """Return the unfinished uploads of a key, with their parts.

    Empty, and a warning is logged, if they may not be listed: then nothing is continued. Raise
    Transient.
    """
    # CRC64NVME is AWS's choice for uploads that name none
    algorithms = ("", "CRC32" if bucket.takes_crc else "CRC64NVME")
    try:
        uploads = [each for each in _list_uploads(bucket, key) if each.key == key]
        with_parts = (_with_parts(bucket, each) for each in uploads if each.algorithm in algorithms)
        return [upload for upload in with_parts if upload]
    except Transient:
        raise
    except StoreError as e:
        log.warning(
            "%s: unfinished uploads cannot be listed, so none is continued: %s", bucket.url(key), e
        )
        return []


def remove_stale(bucket: Bucket, prefix: str) -> None:
    """Remove the uploads below ``prefix`` that are idle for `ABANDONED_AFTER`.

    Only if a store lies there: then every upload was begun by ckptsync. StoreError is logged, not
    raised.
    """
    try:
        if bucket.find(f"{prefix}{STORE_FILE}") is None:
            return
        for listed in _list_uploads(bucket, prefix):
            if listed.age <= ABANDONED_AFTER:
                continue
            upload = _with_parts(bucket, listed)
            if upload and upload.idle > ABANDONED_AFTER:
                log.info(
                    "%s: removing an upload that was given up %.0f days ago",
                    bucket.url(upload.key),
                    upload.idle / DAY,
                )
                _remove(bucket, upload.key, upload.id)
    except StoreError as e:  # it costs money, and nothing else
        log.warning("%s: uploads that were given up cannot be removed: %s", bucket.url(prefix), e)


def _list_uploads(bucket: Bucket, prefix: str) -> Iterator[Unfinished]:
    """Yield the uploads of keys that start with ``prefix``, without parts, page by page."""

    def parse(answer: Answer) -> list[Unfinished]:
        """Return the uploads in one answer."""
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

    return bucket.list_entries(
        "list_multipart_uploads", "", parse, Prefix=prefix, EncodingType="url"
    )


def _with_parts(bucket: Bucket, upload: Unfinished) -> Unfinished | None:
    """Return an upload with its parts; None if it is gone meanwhile."""

    def parse(answer: Answer) -> list[SentPart]:
        """Return the parts in one answer."""
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
        parts = tuple(
            bucket.list_entries("list_parts", upload.key, parse, MOST, UploadId=upload.id)
        )
    except (UploadGone, NotFound):
        return None
    return replace(upload, parts=parts)


def _age(answer: Answer, each: Answer, name: str, *, unknown: float) -> float:
    """Return how long before the answer a moment in it was, in seconds of the server's clock.

    ``unknown``: returned if the answer does not have ``name``.
    """
    moment = seconds(text(each, name))
    return server_time(answer) - moment if moment else unknown


def _upload_id(answer: Answer) -> str:
    """Return an upload's id.

    Raise NotS3 without one: a request without it would act on the object itself.
    """
    if upload := text(answer, "UploadId"):
        return upload
    raise NotS3("UploadId is missing")


def _remove(bucket: Bucket, key: str, upload: str) -> None:
    """Remove an upload and its parts; do nothing if it is gone. Raise StoreError."""
    with contextlib.suppress(UploadGone, NotFound):
        bucket.ask("abort_multipart_upload", key, UploadId=upload)


def _taken(url: str, stored: StoredObject | None, sums: PartSum) -> Exists:
    """Return the error for an existing key, which says whether it has these bytes."""
    return Exists(f"{url}: already there", is_same=stored.is_same(sums) if stored else None)


def _removed(e: StoreError) -> StoreError:
    """Return the error for an upload that another writer has ended."""
    return Transient(
        str(e),
        hint=(
            "another writer of this name has completed or removed the upload; the next try begins"
            " anew"
        ),
    )
