"""Writing one key of S3, as `stores.parts` wants it: whole, or as a multipart upload that an earlier try may have begun.

Which upload is continued
    S3 keeps no word of ours with an unfinished upload that a later process could read: its metadata is not listed, and a part that is not
    completed makes some servers refuse.  So an upload is known by what it has.  The first of our parts that is looked for decides: an upload that
    has other bytes under that number is another file's, or another save's, and is left alone; one that has the same bytes is taken; one that has
    not got so far, or lost just that part, is taken if nothing speaks against it.  An upload without parts is taken if an hour old only.

Why two writers under one key never make a mixture
    Both may take the same upload, and each may send parts that replace the other's.  But each completes with the tags that it was given for its own
    bytes, or that it has compared with its own bytes: the server completes exactly those parts, or refuses (`InvalidPart`) because another part is there
    now.  Who is refused tries again later, finds parts that differ, and sends these.  Where both had the same bytes, the first one completes; the
    other is told that the upload is gone, looks, and sees by the tag that his bytes are there.

When the answer to CompleteMultipartUpload is lost
    the next try is told that the upload is gone (or, by some, success), or that the name is taken.  What is under the key is compared: tag, checksum, size.
"""

from __future__ import annotations

import contextlib
import threading

from ckptsync.errors import Exists, StoreError, Transient
from ckptsync.stores.parts import Part
from ckptsync.stores.s3.bucket import Ask
from ckptsync.stores.s3.errors import Denied, Gone, Mismatch, Unable
from ckptsync.stores.s3.orphans import GIVEN_UP, HOUR, Orphan, is_same, remove
from ckptsync.stores.s3.put import Found, Sender
from ckptsync.stores.s3.sums import CRC, Sum, crc_of, header, whole_crc
from ckptsync.stores.s3.xml import completion, text, tree, upload_id

_COMPLETE = 2.0  # times the usual silence: a server may have to copy all parts, and AWS sends spaces meanwhile


class Multipart:
    """An `Upload`.  ``condition``: headers of the request that completes it; ``left``: what earlier tries have left; ``most``: parts of the file."""

    def __init__(self, sender: Sender, key: str, condition: dict[str, str], left: list[Orphan], most: int) -> None:
        self._sender, self._key, self._condition, self._most = sender, key, condition, most
        self._left = sorted(left, key=lambda orphan: len(orphan.stored), reverse=True)
        self._lock = threading.Lock()
        self._id = ""
        self._is_new, self._is_ours, self._has_crc = bool(condition), False, False
        self._taken: Orphan | None = None
        self._sums: dict[int, Sum] = {}

    def is_there(self, part: Part) -> bool:
        """As `Upload` says."""
        self._choose(part)
        for stored in self._taken.stored if self._taken else ():
            if stored.number == part.number and is_same(stored, part):
                self._sums[part.number] = Sum(stored.size, crc_of(part.data), stored.tag)
                return True
        return False

    def put(self, part: Part) -> None:
        """As `Upload` says."""
        self._choose(part)
        query = [("partNumber", str(part.number)), ("uploadId", self._id)]
        try:
            self._sums[part.number] = self._sender.keep_trying(
                lambda: self._sender.send("UploadPart", self._key, query, {}, part.data)
            )
        except Gone as e:
            raise self._removed(e) from e

    def commit(self, size: int) -> None:
        """As `Upload` says."""
        sums = self._ordered()
        assert sum(each.size for each in sums) == size
        headers = {**self._condition, "x-amz-mp-object-size": str(size), "Content-Type": "application/xml"}
        if self._has_crc:
            headers |= {CRC: header(whole_crc(sums)), "x-amz-checksum-type": "FULL_OBJECT"}
        body = completion((number, each.tag) for number, each in enumerate(sums, 1))
        ask = Ask("CompleteMultipartUpload", self._key, [("uploadId", self._id)], headers, body, _COMPLETE)
        tries = 0

        def once() -> bytes:
            nonlocal tries
            tries += 1
            body = self._sender.bucket.ask(ask).body
            tree(
                body, self._sender.bucket.url(self._key), "CompleteMultipartUploadResult"
            )  # not so: was it done? the next try tells
            return body

        try:
            self._check(self._sender.keep_trying(once), sums)
        except Mismatch as e:
            raise Transient(str(e), hint=e.hint) from e
        except (Gone, Exists) as e:
            self._settle(e, sums, is_repeated=tries > 1)
        except Unable:
            if not self._condition:
                raise
            self._commit_anyway(size)

    def _commit_anyway(self, size: int) -> None:
        """A server that knows no conditions: nobody else's file is replaced but one that appears in this very moment."""
        self._condition = {}
        if found := self._sender.found(self._key):
            raise self._taken_by(found, self._ordered())
        self.commit(size)

    def abandon(self) -> None:
        """As `Upload` says; but what another process has begun may still be its."""
        if self._id and self._is_ours:
            remove(self._sender, self._key, self._id)

    def _choose(self, part: Part) -> None:
        with self._lock:
            if self._id:
                return
            verdicts = [(orphan, orphan.agrees(part, self._most)) for orphan in self._left]
            for orphan, agrees in verdicts:
                if agrees is False and orphan.idle > GIVEN_UP:
                    with contextlib.suppress(Denied):  # it hinders nothing, and the bucket's lifecycle rule may remove it
                        remove(self._sender, self._key, orphan.begun.id)
            same = [orphan for orphan, agrees in verdicts if agrees]
            maybe = [o for o, agrees in verdicts if agrees is None and (o.stored or o.idle > HOUR)]
            self._taken = next(iter([*same, *maybe]), None)
            if self._taken:
                self._id, self._has_crc = self._taken.begun.id, self._taken.begun.algorithm == "CRC32"
            else:
                self._begin()

    def _begin(self) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        if self._sender.takes_crc:
            headers |= {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._sender.ask(Ask("CreateMultipartUpload", self._key, [("uploads", "")], headers))
        what = self._sender.bucket.url(self._key)
        self._id = upload_id(tree(answer.body, what, "InitiateMultipartUploadResult"), what)
        self._is_ours = True
        self._has_crc = answer.headers.get("x-amz-checksum-type") == "FULL_OBJECT"

    def _check(self, body: bytes, sums: list[Sum]) -> None:
        """What the server has put together, where it says so."""
        root = tree(body, self._sender.bucket.url(self._key))
        crc = text(root, "ChecksumCRC32")
        if crc and text(root, "ChecksumType") == "FULL_OBJECT" and crc != header(whole_crc(sums)):
            raise StoreError(f"{self._sender.bucket.url(self._key)}: the server has put other bytes together than were sent")

    def _settle(self, e: StoreError, sums: list[Sum], *, is_repeated: bool) -> None:
        """The upload is gone, or the name taken: by an earlier try of ours whose answer was lost, or by somebody else."""
        found = self._sender.found(self._key)
        if found and found.may_be(sums) and (is_repeated or not self._is_new):
            return
        if found and self._is_new:
            raise self._taken_by(found, sums) from e
        raise self._removed(e) from e

    def _taken_by(self, found: Found, sums: list[Sum]) -> Exists:
        self._is_ours = True  # whoever began the upload: nobody can complete it any more
        return Exists(f"{self._sender.bucket.url(self._key)}: already there", is_same=found.is_made_of(sums))

    def _removed(self, e: StoreError) -> StoreError:
        return Transient(str(e), hint="another writer of this name has completed or removed the upload; the next try begins anew")

    def _ordered(self) -> list[Sum]:
        return [self._sums[number] for number in range(1, len(self._sums) + 1)]
