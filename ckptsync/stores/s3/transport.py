"""Send botocore's requests within the bandwidth limit; those that stand still fail.

botocore asks ("before-send") whether somebody else sends a request; here we do, with a body that is
read in small pieces. What comes back is read in small pieces, too, and no more of it than S3 would
send is ever given to botocore's XML parser.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from ckptsync.errors import CkptsyncError
from ckptsync.stores import progress_signs
from ckptsync.stores.limits import Limits, RateLimiter, limit

STEP = 64 << 10
"""Bytes that are sent at once.

Fewer than these in `Limits.stall` seconds, in either direction, are no transfer.
"""
# bytes of an answer that is not a file: a page of 1,000 names takes 4 MiB at the very most
MOST = 8 << 20
_TAGS = 400_000  # of an answer in XML: a page of 1,000 names has 20,000
_RESULT = re.compile(rb"\s*(?:<\?[^>]*\?>\s*)?<(?:\w+:)?(?:\w+Result|Error)\b")


class Lost(Exception):
    """The connection was not made, or ended early; ``error`` is the network's or urllib3's."""

    def __init__(self, host: str, error: Exception) -> None:
        super().__init__(str(error))
        self.host, self.error = host, error


class NotS3(Exception):
    """An answer that no S3 server gives: it says what is wrong with it."""


def attach(client: Any, http: Any, limits: Limits) -> None:
    """Have all requests of a client of botocore's go through here, over the session ``http``."""

    def send(request: Any, event_name: str, **_: Any) -> Any:
        """Return the answer, of which a file is not read yet.

        Raises Lost, NotS3, and Transient where the process is about to end.
        """
        operation = event_name.rpartition(".")[2]
        if request.body:
            request.body = _Sending(request.body, limits.pace)
        # a server may have to copy all parts; older botocores have no such setting
        if operation == "CompleteMultipartUpload" and getattr(request, "context", None) is not None:
            request.context["read_timeout"] = 2 * limits.stall
        is_file, request.stream_output = request.stream_output, True
        host = urlsplit(request.url).netloc
        try:
            answer = http.send(request)
        except Exception as e:
            raise _lost(host, e) from e
        received = _Received(answer.raw, host, limits)
        if is_file and answer.status_code in (200, 206):
            answer.raw = received
            return answer
        data = received.read_all()
        answer.raw = SimpleNamespace(stream=lambda **_: iter((data,)))
        if answer.status_code < 300:
            if operation.startswith(("List", "Create", "Complete")) and not _RESULT.match(data):
                start = data[:40].decode(errors="replace")
                raise NotS3(f"expected a result, got {start or 'nothing'}")
            if b"<!" in data or data.count(b"<") > _TAGS:
                raise NotS3("it is an attack on XML parsers")
        return answer

    client.meta.events.register("before-send.s3", send)


class _Sending:
    """A request's body for urllib3, within the bandwidth limit.

    Each time it is sent from its first byte: botocore follows a bucket to its region.
    """

    def __init__(self, data: Any, pace: RateLimiter) -> None:
        self._data, self._pace = data, pace

    def __iter__(self) -> Iterator[memoryview]:
        for part in limit([self._data], self._pace):
            for at in range(0, len(part), STEP):
                piece = part[at : at + STEP]
                progress_signs.count_sent(len(piece))
                yield piece

    def seek(self, at: int) -> None:
        """Do nothing: botocore calls this before it sends the body again."""


class _Received:
    """The body of an answer; a transfer that stands still raises Lost.

    Time that it waits for the bandwidth limit does not count.
    """

    def __init__(self, raw: Any, host: str, limits: Limits) -> None:
        self._raw, self._host, self._limits = raw, host, limits
        # urllib3 before 2.2 waits for all that is asked for
        self._read_some: Any = getattr(raw, "read1", raw.read)
        self._spent, self._moved = 0.0, 0

    def read(self, most: int) -> bytes:
        """Return the bytes that have come, one at least and ``most`` at most; none at the end."""
        start = time.monotonic()
        try:
            if self._spent > self._limits.stall:
                raise TimeoutError  # noqa: TRY301
            data: bytes = self._read_some(min(most, self._limits.pace.piece))
            if not data and getattr(self._raw, "length_remaining", None):
                raise http.client.IncompleteRead(b"", self._raw.length_remaining)  # noqa: TRY301
        except Exception as e:
            self.close()
            raise _lost(self._host, e) from e
        self._moved += len(data)
        self._spent += time.monotonic() - start
        if self._moved >= STEP:
            self._spent, self._moved = 0.0, 0
        # what is not taken from the socket is not sent to it: the window closes
        self._limits.pace.take(len(data))
        return data

    def read_all(self) -> bytes:
        """Return all of it; raises Lost if it has no end."""
        whole = bytearray()
        while data := self.read(STEP):
            whole += data
            if len(whole) > MOST:
                self.close()
                raise Lost(self._host, http.client.HTTPException("an answer without an end"))
        return bytes(whole)

    def close(self) -> None:
        """The connection is not used again, unless all was read."""
        self._raw.close()


def _lost(host: str, e: BaseException) -> CkptsyncError | Lost:
    """The error beneath those that botocore and urllib3 wrap around it."""
    while not isinstance(e, CkptsyncError):
        causes = [getattr(e, "kwargs", {}).get("error"), *e.args, e.__cause__]
        inner = next((each for each in causes if isinstance(each, BaseException)), None)
        if inner is None:
            return Lost(host, e if isinstance(e, Exception) else OSError(str(e)))
        e = inner
    return e
