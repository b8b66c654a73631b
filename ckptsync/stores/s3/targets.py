"""Keys that are about to be written: replaced, or created and never replaced.

Whether a server keeps to ``If-None-Match: *`` cannot be asked, and some ignore what they do not know.  AWS does (since 2024); of another it is seen
when it refuses the first time, or when the same bytes are sent twice after the first small file: the second time must be refused.  Until then, and where it does
not, a name is looked at before it is written, which leaves a moment for somebody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckptsync.errors import Exists, StoreError
from ckptsync.stores.parts import Part, Upload
from ckptsync.stores.s3.bucket import Ask
from ckptsync.stores.s3.errors import Unable
from ckptsync.stores.s3.orphans import Orphan, orphans
from ckptsync.stores.s3.put import NEW, Found, Sender
from ckptsync.stores.s3.sinks import Into
from ckptsync.stores.s3.sums import Sum, crc_of, md5_of
from ckptsync.stores.s3.upload import Multipart

_BYTES = {"Content-Type": "application/octet-stream"}
_CHEAP = 64 << 10  # bytes that are sent sooner than it is asked whether they are there

log = logging.getLogger(__name__)


class Conditions:
    """What is known of a server: ``held`` is None until it is seen whether it keeps to conditions."""

    def __init__(self, url: str, *, held: bool | None) -> None:
        self._url, self.held = url, held

    def found(self, *, held: bool) -> None:
        """It was seen."""
        if self.held is None and not held:
            log.warning(
                "%s: this server does not know conditional writes: two nodes that write one name at once may replace each other's",
                self._url,
            )
        self.held = held


@dataclass(frozen=True, slots=True)
class Goal:
    """``most``: parts that the file has, at most.  ``continues``: whether an unfinished upload may be taken up.  ``sweep``: called before it is looked for."""

    most: int
    continues: bool
    sweep: Callable[[], None]


class Writing:
    """A `Target`: a key that is replaced."""

    def __init__(self, sender: Sender, key: str, goal: Goal) -> None:
        self._sender, self._key, self._goal = sender, key, goal

    def put_whole(self, data: memoryview) -> None:
        """As `Target` says."""
        self._put(data, _BYTES)

    def begin(self) -> Upload:
        """As `Target` says."""
        return self._multipart({})

    def _put(self, data: memoryview, headers: dict[str, str]) -> None:
        self._sender.keep_trying(lambda: self._sender.send("PutObject", self._key, (), headers, data))

    def _multipart(self, condition: dict[str, str]) -> Multipart:
        left: list[Orphan] = []
        if self._goal.continues:
            self._goal.sweep()
            left = orphans(self._sender, self._key)
        return Multipart(self._sender, self._key, condition, left, self._goal.most)


class Creating(Writing):
    """A `Target`: a key that must not be there yet."""

    def __init__(self, sender: Sender, key: str, goal: Goal, conditions: Conditions) -> None:
        super().__init__(sender, key, goal)
        self._conditions = conditions

    def put_whole(self, data: memoryview) -> None:
        """As `Target` says."""
        if (not self._conditions.held or len(data) > _CHEAP) and (found := self._sender.found(self._key)):
            raise self._taken(found, data)
        if self._conditions.held is False:
            self._put(data, _BYTES)
            return
        try:
            self._put_new(data)
        except Unable:
            self._conditions.found(held=False)
            self._put(data, _BYTES)
        else:
            self._learn(data)

    def begin(self) -> Upload:
        """As `Target` says."""
        if found := self._sender.found(self._key):
            return Compared(self._sender.bucket.url(self._key), found)
        return self._multipart({} if self._conditions.held is False else NEW)

    def _put_new(self, data: memoryview) -> None:
        tries = 0

        def once() -> Sum:
            nonlocal tries
            tries += 1
            return self._sender.send("PutObject", self._key, (), {**_BYTES, **NEW}, data)

        try:
            self._sender.keep_trying(once)
        except Exists as e:
            self._conditions.found(held=True)
            error = self._taken(self._sender.found(self._key), data)
            if tries > 1 and error.is_same:
                return  # the answer to an earlier try was lost
            raise error from e

    def _learn(self, data: memoryview) -> None:
        """See whether the same is refused now; if it is not, nothing has changed."""
        if self._conditions.held is None and len(data) <= _CHEAP:
            try:
                self._sender.send("PutObject", self._key, (), {**_BYTES, **NEW}, data)
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
        return Exists(f"{self._sender.bucket.url(self._key)}: already there", is_same=same)

    def _is_read_back(self, data: memoryview) -> bool | None:
        """Where no checksum can be compared: the bytes themselves, of at most one part."""
        out = memoryview(bytearray(len(data)))
        try:
            ask = Ask("GetObject", self._key, headers={"Range": f"bytes=0-{len(data)}"})
            return (
                self._sender.keep_trying(lambda: self._sender.bucket.ask(ask, lambda *_: Into(out))).count == len(data)
                and out == data
            )
        except StoreError:
            return None


class Compared:
    """An `Upload` for a name that is taken: nothing is sent; whether these bytes are what is there is told in the end."""

    def __init__(self, url: str, found: Found) -> None:
        self._url, self._found = url, found
        self._sums: dict[int, Sum] = {}

    def is_there(self, part: Part) -> bool:
        """Nothing of it is to be sent."""
        self._sums[part.number] = Sum(len(part.data), crc_of(part.data), md5_of(part.data).hex())
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
