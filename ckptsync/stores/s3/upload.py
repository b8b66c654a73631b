"""Write a key of S3: replace it, or create it and never replace it.

Whether a server keeps to ``If-None-Match: *`` cannot be asked, and some ignore what they do not know. AWS does (since 2024); of another it is seen
when it refuses the first time, or when the same bytes are sent twice after the first small file: the second time must be refused. Until then, and where it does
not, a name is looked at before it is written, which leaves a moment for somebody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ckptsync.digest import crc32
from ckptsync.errors import Exists, StoreError
from ckptsync.stores.parts import Part, Upload
from ckptsync.stores.s3.bucket import Answer, Bucket, Found, Sum, md5
from ckptsync.stores.s3.errors import Unable
from ckptsync.stores.s3.multipart import Multipart, Unfinished

NEW = {"IfNoneMatch": "*"}
_BYTES = {"ContentType": "application/octet-stream"}
_CHEAP = 64 << 10  # bytes that are sent sooner than it is asked whether they are there

log = logging.getLogger(__name__)


class Conditions:
    """What is known of a server: ``held`` is None until it is seen whether it keeps to conditions."""

    def __init__(self, url: str, *, held: bool | None) -> None:
        self._url, self.held = url, held

    def found(self, *, held: bool) -> None:
        """Note what was seen."""
        if self.held is None and not held:
            log.warning(
                "%s: this server does not know conditional writes: two nodes that write one name at once may replace each other's",
                self._url,
            )
        self.held = held


class Replacing:
    """A `Target`: a key that is written whether or not it is there.

    ``most``: parts that the file has, at most. ``left``: returns the unfinished uploads that may be continued.
    """

    def __init__(self, bucket: Bucket, key: str, most: int, left: Callable[[], Sequence[Unfinished]]) -> None:
        self._bucket, self._key, self._most, self._left = bucket, key, most, left

    def put_whole(self, data: memoryview) -> None:
        """As `Target` says."""
        self._put(data)

    def begin(self) -> Upload:
        """As `Target` says."""
        return Multipart(self._bucket, self._key, {}, self._left(), self._most)

    def _put(self, data: memoryview) -> None:
        self._bucket.persistence.call(lambda: self._bucket.send("put_object", self._key, data, **_BYTES))


class Creating(Replacing):
    """A `Target`: a key that must not be there yet."""

    def __init__(
        self, bucket: Bucket, key: str, most: int, left: Callable[[], Sequence[Unfinished]], conditions: Conditions
    ) -> None:
        super().__init__(bucket, key, most, left)
        self._conditions = conditions

    def put_whole(self, data: memoryview) -> None:
        """As `Target` says."""
        if (not self._conditions.held or len(data) > _CHEAP) and (found := self._bucket.found(self._key)):
            raise self._taken(found, data)
        if self._conditions.held is False:
            self._put(data)
            return
        try:
            self._put_new(data)
        except Unable:
            self._conditions.found(held=False)
            self._put(data)
        else:
            self._learn(data)

    def begin(self) -> Upload:
        """As `Target` says."""
        if found := self._bucket.found(self._key):
            return Compared(self._bucket.url(self._key), found)
        condition = {} if self._conditions.held is False else NEW
        return Multipart(self._bucket, self._key, condition, self._left(), self._most)

    def _put_new(self, data: memoryview) -> None:
        tries = 0

        def once() -> Sum:
            nonlocal tries
            tries += 1
            return self._bucket.send("put_object", self._key, data, **_BYTES, **NEW)

        try:
            self._bucket.persistence.call(once)
        except Exists as e:
            self._conditions.found(held=True)
            error = self._taken(self._bucket.found(self._key), data)
            if tries > 1 and error.is_same:
                return  # the answer to an earlier try was lost
            raise error from e

    def _learn(self, data: memoryview) -> None:
        """See whether the same is refused now; if it is not, nothing has changed."""
        if self._conditions.held is None and len(data) <= _CHEAP:
            try:
                self._bucket.send("put_object", self._key, data, **_BYTES, **NEW)
            except Exists:
                self._conditions.found(held=True)
            except StoreError:
                return  # not learnt: the file is written all the same
            else:
                self._conditions.found(held=False)

    def _taken(self, found: Found | None, data: memoryview) -> Exists:
        same = found.is_whole(data) if found else None
        if found and same is None:
            same = self._is_read_back(data)
        return Exists(f"{self._bucket.url(self._key)}: already there", is_same=same)

    def _is_read_back(self, data: memoryview) -> bool | None:
        """Where no checksum can be compared: the bytes themselves, of at most one part."""

        def is_same(answer: Answer) -> bool:
            body, at = answer["Body"], 0
            while (piece := body.read(1 << 20)) and data[at : at + len(piece)] == piece:
                at += len(piece)
            body.close()
            return not piece and at == len(data)

        try:
            return bool(self._bucket.ask("get_object", self._key, is_same, Range=f"bytes=0-{len(data)}"))
        except StoreError:
            return None


class Compared:
    """An `Upload` for a name that is taken: nothing is sent; the end tells whether these bytes are what is there."""

    def __init__(self, url: str, found: Found) -> None:
        self._url, self._found = url, found
        self._sums: dict[int, Sum] = {}

    def is_there(self, part: Part) -> bool:
        """Nothing of it is to be sent."""
        self._sums[part.number] = Sum(len(part.data), crc32(part.data), md5(part.data).hex())
        return True

    def put(self, part: Part) -> None:
        """Never called."""
        raise AssertionError(part.number)

    def commit(self, size: int) -> None:
        """Raises Exists."""
        assert size >= 0
        sums = [self._sums[number] for number in range(1, len(self._sums) + 1)]
        raise Exists(f"{self._url}: already there", is_same=self._found.is_made_of(sums))

    def abandon(self) -> None:
        """There is nothing to remove."""
