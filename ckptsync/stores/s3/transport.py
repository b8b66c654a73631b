"""Send botocore's requests within the bandwidth limit; end those that stand still.

botocore reads and writes whole bodies, without a limit and as slowly as a server likes. Its public
event "before-send" lets us send each request ourselves: bodies pass in small pieces, each counted
against the bandwidth and against `Limits.stall`. Answers that are not S3's, or too large, never
reach botocore's XML parser.
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
"""Bytes that are sent at once; a transfer of fewer in `Limits.stall` seconds stands still."""
# bytes of an answer that is not a file, at most: a page of 1,000 names takes up to 4 MiB
MOST = 8 << 20
_TAGS = 400_000  # tags of an answer in XML, at most: a page of 1,000 names has 20,000
_RESULT = re.compile(rb"\s*(?:<\?[^>]*\?>\s*)?<(?:\w+:)?(?:\w+Result|Error)\b")


class Lost(Exception):
    """The connection was not made, or ended early; ``error`` is the network's or urllib3's."""

    def __init__(self, host: str, error: Exception) -> None:
        super().__init__(str(error))
        self.host, self.error = host, error


class NotS3(Exception):
    """An answer that no S3 server gives; the text says what is wrong with it."""


def attach(client: Any, http: Any, limits: Limits) -> None:
    """Send all requests of a botocore client through this module, over the session ``http``."""

    def send(request: Any, event_name: str, **_: Any) -> Any:
        """Send a request; return its answer. A file's body is not read yet, any other is.

        Raise Lost, NotS3, and Transient if the process is about to end.
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
        body = _Received(answer.raw, host, limits)
        if is_file and answer.status_code in (200, 206):
            answer.raw = body
            return answer
        data = body.read_all()
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

    Each iteration sends it from its first byte: botocore sends again to the bucket's region.
    """

    def __init__(self, data: Any, pace: RateLimiter) -> None:
        self._data, self._pace = data, pace

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the body in pieces, each when the bandwidth allows it."""
        for part in limit([self._data], self._pace):
            for start in range(0, len(part), STEP):
                piece = part[start : start + STEP]
                progress_signs.count_sent(len(piece))
                yield piece

    def seek(self, position: int) -> None:
        """Do nothing: botocore calls this before it sends the body again."""


class _Received:
    """The body of an answer; reading raises Lost if the transfer stands still.

    Time that it waits for the bandwidth limit does not count.
    """

    def __init__(self, raw: Any, host: str, limits: Limits) -> None:
        self._raw, self._host, self._limits = raw, host, limits
        # `read` of urllib3 before 2.2 waits for all requested bytes
        self._read_some: Any = getattr(raw, "read1", raw.read)
        self._spent, self._new_bytes = 0.0, 0

    def read(self, most: int) -> bytes:
        """Return the next bytes: at least one and at most ``most``; none at the end.

        Wait afterwards as the bandwidth limit says. Raise Lost, after which the body is closed;
        Transient if the process is to end during the wait.
        """
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
        self._new_bytes += len(data)
        self._spent += time.monotonic() - start
        if self._new_bytes >= STEP:
            self._spent, self._new_bytes = 0.0, 0
        # bytes stay in the socket meanwhile, so TCP's window closes, and the server waits
        self._limits.pace.take(len(data))
        return data

    def read_all(self) -> bytes:
        """Return the whole body; raise Lost if it is larger than `MOST`."""
        whole = bytearray()
        while data := self.read(STEP):
            whole += data
            if len(whole) > MOST:
                self.close()
                raise Lost(self._host, http.client.HTTPException("an answer without an end"))
        return bytes(whole)

    def close(self) -> None:
        """Close the body; the connection is used again only if all was read."""
        self._raw.close()


def _lost(host: str, e: BaseException) -> CkptsyncError | Lost:
    """Return the innermost error of those that botocore and urllib3 wrap around it, as Lost.

    A CkptsyncError is returned as it is.
    """
    while not isinstance(e, CkptsyncError):
        causes = [getattr(e, "kwargs", {}).get("error"), *e.args, e.__cause__]
        inner = next((each for each in causes if isinstance(each, BaseException)), None)
        if inner is None:
            return Lost(host, e if isinstance(e, Exception) else OSError(str(e)))
        e = inner
    return e
