"""HTTP/1.1 answers: the head, and the body as the head frames it (RFC 9112).

Why not http.client's: it reads heads with the parser of e-mails, which takes a large part of the time that a small file takes
(`benchmarks/clients.py` has both).  Its errors are used.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader

_LINE, _LINES = 64 << 10, 200  # bytes of a line, and lines of a head, at most
_INTERIM = 8  # answers before the answer (100 Continue), at most


class Cut(http.client.HTTPException):
    """An answer ended before its end."""


class Headers(Mapping[str, str]):
    """By name, in whatever case it is asked for.  Of several headers of one name the first counts."""

    def __init__(self) -> None:
        self._all: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self._all[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str, value: str) -> str:
        """What counts."""
        return self._all.setdefault(name, value)

    def extend(self, name: str, value: str) -> None:
        """A line that goes on."""
        self._all[name] += f" {value}"


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before a body.  ``is_last``: the connection ends with the body."""

    status: int
    headers: Headers
    is_last: bool


def head(file: BufferedReader) -> Head:
    """The next answer's; raises HTTPException, OSError."""
    for _ in range(_INTERIM):
        found = _head(file)
        if found.status >= 200:
            return found
    raise http.client.BadStatusLine("too many answers before the answer")


def _head(file: BufferedReader) -> Head:
    if not (come := file.peek(1)):
        raise http.client.RemoteDisconnected("the server closed the connection")
    size = come.find(b"\r\n\r\n") + 4  # most often all of it has come
    first, *lines = file.read(size)[:-4].decode("latin-1").split("\r\n") if size > 3 else (_line(file), *_lines(file))
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if (
        not version.startswith("HTTP/1.")
        or not (status.isascii() and status.isdigit() and len(status) == 3)
        or rest[3:4] not in ("", " ")
    ):
        raise http.client.BadStatusLine(first[:100])
    headers = _headers(lines)
    words = headers.get("Connection", "").lower()
    return Head(int(status), headers, "close" in words or (version == "HTTP/1.0" and "keep-alive" not in words))


def _headers(lines: Iterable[str]) -> Headers:
    headers, last = Headers(), ""
    for number, line in enumerate(lines):
        if number == _LINES:
            raise http.client.HTTPException(f"more than {_LINES} lines in a head")
        name, colon, value = line.partition(":")
        if line[:1] in (" ", "\t") and last:
            headers.extend(last, line.strip())  # obsolete, and still said
            continue
        last, value = name.lower(), value.strip()
        if not colon or not last or last != last.strip():
            raise http.client.HTTPException(f"no header: {line[:100]!r}")
        if headers.add(last, value) != value and last in ("content-length", "transfer-encoding"):
            raise http.client.HTTPException(f"two lengths: {line[:100]!r}")
    if not re.fullmatch("[0-9]{1,19}", length := headers.get("Content-Length", "0")):
        raise http.client.HTTPException(f"no length: {length[:40]!r}")
    return headers


def _lines(file: BufferedReader) -> Iterator[str]:
    """Up to an empty one."""
    while line := _line(file):
        yield line


def _line(file: BufferedReader) -> str:
    """Without its end."""
    line = file.readline(_LINE + 1)
    if not line.endswith(b"\n"):
        raise http.client.LineTooLong("header line") if len(line) > _LINE else Cut("a head broke off")
    return line.decode("latin-1").rstrip("\r\n")


class Body:
    """The bytes after a head.  ``left``: those announced that have not come; None where only the end tells.  ``is_over``: all have come."""

    def __init__(self, file: BufferedReader, head: Head, method: str) -> None:
        self._file = file
        self._is_chunked = "chunked" in head.headers.get("Transfer-Encoding", "").lower()
        self.left = 0 if method == "HEAD" or head.status in (204, 304) else None if self._is_chunked else _length(head)
        self.is_over = self.left == 0
        self.ends_connection = head.is_last or (self.left is None and not self._is_chunked)
        self._chunk: int | None = None  # bytes of it that have not come

    def read_into(self, out: memoryview) -> int:
        """Some of it, at least a byte; 0 at its end, or where the connection ends.  Raises OSError, HTTPException."""
        if self.is_over or (self._is_chunked and not self._chunk and not self._begin_chunk()):
            return 0
        most = self._chunk if self._is_chunked else self.left
        count = self._file.readinto1(out if most is None or most >= len(out) else out[:most])
        if self._chunk is not None:
            self._chunk -= count
            if not count:
                raise Cut("a chunk broke off")
        elif self.left is not None:
            self.left -= count
        self.is_over = self.is_over or self.left == 0 or not count
        return count

    def _begin_chunk(self) -> bool:
        """Whether there is another one (RFC 9112, section 7.1)."""
        if self._chunk == 0 and _line(self._file):
            raise http.client.HTTPException("a chunk is longer than it said")
        size = _line(self._file).partition(";")[0].strip()
        if not re.fullmatch("[0-9A-Fa-f]{1,16}", size):
            raise Cut(f"no length of a chunk: {size[:20]!r}")
        self._chunk = int(size, 16)
        if self._chunk == 0:
            _headers(_lines(self._file))
            self.is_over = True
        return not self.is_over


def _length(head: Head) -> int | None:
    said = head.headers.get("Content-Length")
    return None if said is None else int(said)
