"""Write a key of S3: replace it, or create it and never replace it.

Whether a server keeps to ``If-None-Match: *`` cannot be asked, and some ignore what they do not
know. AWS does (since 2024); of another it is seen when it refuses the first time, or when the same
bytes are sent twice after the first small file: the second time must be refused. Until then, and
where it does not, a name is looked at before it is written, which leaves a moment for somebody
else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptsync.errors import Exists, StoreError
from ckptsync.stores.part_upload import PartUpload
from ckptsync.stores.s3.checksums import PartSum, sum_of
from ckptsync.stores.s3.error_codes import Unable
from ckptsync.stores.s3.multipart import ExistingObject, Multipart, Unfinished, taken
from ckptsync.stores.s3.requests import Bucket

NEW = {"IfNoneMatch": "*"}
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
        if self.is_new:
            if not self.bucket.keeps_conditions or len(data) > _CHEAP:
                self._check_free(data)
            if self.bucket.keeps_conditions is not False:
                try:
                    self._put_new(data)
                except Unable:
                    self._note(keeps=False)
                else:
                    self._learn(data)
                    return
        self.bucket.persistence.call(lambda: self._put(data))

    def begin(self) -> PartUpload:
        if self.is_new and (found := self.bucket.found(self.key)):
            return ExistingObject(self.bucket.url(self.key), found)
        condition = NEW if self.is_new and self.bucket.keeps_conditions is not False else {}
        return Multipart(self.bucket, self.key, condition, self.left(), self.most)

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
            error = taken(self.bucket.url(self.key), self.bucket.found(self.key), sum_of(data))
            if tries > 1 and error.is_same:
                return  # the answer to an earlier try was lost
            raise error from e

    def _check_free(self, data: memoryview) -> None:
        if found := self.bucket.found(self.key):
            raise taken(self.bucket.url(self.key), found, sum_of(data))

    def _learn(self, data: memoryview) -> None:
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
