"""Doors that other machines speak through: answers of S3 servers and of SFTP servers that are not
what was asked for.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ckptsync.errors import Exists
from ckptsync.safe_names import checked_path
from ckptsync.stores.contract import About, Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.sftp import protocol
from ckptsync.stores.urls import Remote
from tests.campaigns.fuzz import Case, Door, Wrong, by_dice
from tests.campaigns.fuzz_changes import NAMES, changed_bytes
from tests.support.sftp_stores import served

CONTENT = random.Random(5).randbytes(150_000)
_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'


# what is asked of a store


def _names(store: Store) -> None:
    for entry in store.names("run/"):
        checked_path(entry.name)
        if not entry.name.startswith("run/") or entry.size < 0 or entry.mtime != entry.mtime:
            raise Wrong(f"lists {entry!r:.300}")


def _dirs(store: Store) -> None:
    for name in store.dirs("run/"):
        if checked_path(name) != name or "/" in name:
            raise Wrong(f"lists the directory {name!r:.300}")


def _size(store: Store) -> None:
    if not 0 <= store.size("run/a") < 1 << 64:
        raise Wrong("a size that cannot be")


def _read(store: Store) -> None:
    out = bytearray(50_000)
    store.read_into("run/a", 1000, memoryview(out))
    if out != CONTENT[1000:51_000]:
        raise Wrong("other bytes are read than the server has")


def _write(store: Store) -> None:
    store.write("run/b", [CONTENT[:1000]])


def _create(store: Store) -> None:
    with contextlib.suppress(Exists):
        store.create("run/b", [CONTENT[:1000]])


def _large(store: Store) -> None:
    if isinstance(store, S3Store):
        store.least = 40_000
    store.write("run/c", [CONTENT[:70_000], CONTENT[70_000:]], About(len(CONTENT), "a node's"))


OPERATIONS: Mapping[str, Callable[[Store], None]] = {
    "names": _names,
    "dirs": _dirs,
    "size": _size,
    "read": _read,
    "write": _write,
    "create": _create,
    "large": _large,
    "delete": lambda store: store.delete("run/a"),
}


# S3

_ENTRY = (
    "<Contents><Key>pre/run/{}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><ETag>"
    "&quot;{}&quot;</ETag><Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)
_LISTING = (
    f"{_HEAD}<ListBucketResult"
    " xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Name>bucket</Name>"
    "<Prefix>pre/run/</Prefix><KeyCount>2</KeyCount><MaxKeys>1000</MaxKeys>"
    f"<IsTruncated>false</IsTruncated>{_ENTRY.format('a', 'e', 5)}{_ENTRY.format('b/c', 'f', 0)}"
    "<CommonPrefixes><Prefix>pre/run/b/</Prefix></CommonPrefixes></ListBucketResult>"
)
_UPLOADS = (
    f"{_HEAD}<ListMultipartUploadsResult><Bucket>bucket</Bucket><IsTruncated>false</IsTruncated>"
    "<Upload><Key>pre/run/c</Key><UploadId>u1</UploadId><Initiated>2026-01-02T03:04:05.000Z"
    "</Initiated></Upload></ListMultipartUploadsResult>"
)
_PARTS = (
    f"{_HEAD}<ListPartsResult><Bucket>bucket</Bucket><Key>pre/run/c</Key><UploadId>u1</UploadId>"
    "<IsTruncated>false</IsTruncated><Part><PartNumber>1</PartNumber><ETag>&quot;p&quot;</ETag>"
    "<Size>40000</Size><LastModified>2026-01-02T03:04:05.000Z</LastModified></Part>"
    "</ListPartsResult>"
)
_BEGUN = (
    f"{_HEAD}<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>pre/run/c</Key>"
    "<UploadId>u2</UploadId></InitiateMultipartUploadResult>"
)
_ENDED = (
    f"{_HEAD}<CompleteMultipartUploadResult><Location>x</Location><Bucket>bucket</Bucket>"
    "<Key>pre/run/c</Key><ETag>&quot;e-4&quot;</ETag></CompleteMultipartUploadResult>"
)
_ERROR = (
    f"{_HEAD}<Error><Code>SlowDown</Code><Message>m</Message><Endpoint>@OTHER@</Endpoint>"
    "<Bucket>bucket</Bucket><RequestId>r</RequestId></Error>"
)
_BODIES = (_LISTING, _UPLOADS, _PARTS, _BEGUN, _ENDED, _ERROR)
_DOCTYPE = (
    '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c'
    ' "&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;"><!ENTITY e'
    ' "&d;&d;&d;&d;&d;&d;&d;&d;"><!ENTITY f "&e;&e;&e;&e;&e;&e;&e;&e;">]>'
)
_TEXTS = (*NAMES, "0", "-1", "9" * 30, "1e9", "٣", "true", "false", "maybe", "2026-99-99T00:00:00Z",
    "9999-12-31T23:59:59.999Z", "0000-00-00", "pre/run/../../x", "pre/run/", "/", "pre/other",
    "x" * 200_000, "&f;", "Thu, 99 Foo 2026 00:00:00 GMT", "Sun, 06 Nov 1994 08:49:37 GMT",
    "@OTHER@/bucket/pre/run/a", "//127.0.0.2/x", "bytes 0-1/2", "bytes */*",
    "bytes 1000-50999/150000", "bytes 0-49999/150000", "chunked", "gzip", "close", "inf", "nan",
    "1e999")  # fmt: skip
_HEADERS = ("Content-Length", "Content-Range", "Content-Encoding", "Transfer-Encoding",
    "Retry-After", "Date", "Last-Modified", "ETag", "Location", "Connection", "x-amz-bucket-region",
    "x-amz-request-id", "x-amz-checksum-crc32c", "x-amz-checksum-type", "x-amz-mp-parts-count",
    "Content-Type")  # fmt: skip


def _make_s3(dice: random.Random) -> Case:
    """``changes``: to the nth answer."""
    changes = [
        [dice.choice((0, 0, 0, 1, 2, 3, 4)), *_change(dice)]
        for _ in range(dice.choice((1, 1, 2, 3)))
    ]
    return {
        "operation": dice.choice(sorted(OPERATIONS)),
        "changes": changes,
        "patience": dice.choice((0.0, 0.0, 0.0, 0.3)),
    }


def _change(dice: random.Random) -> tuple[str, Any]:
    kind = dice.randrange(10)
    text = "".join(c for c in dice.choice(_TEXTS) if c not in "\r\n")
    if kind == 0:
        return "status", dice.choice((100, 101, 199, 200, 201, 204, 206, 301, 302, 303, 304, 307,
            308, 400, 401, 403, 404, 405, 408, 409, 411, 412, 416, 429, 500, 501, 503, 504, 505,
            599, 600, 999))  # fmt: skip
    if kind == 1:
        return "redirect", dice.choice((301, 302, 307, 308))
    if kind <= 3:
        return "header", [dice.choice(_HEADERS), text]
    if kind == 4:
        return "error", dice.choice(("AccessDenied", "NoSuchKey", "NoSuchBucket", "NoSuchUpload",
            "SlowDown", "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
            "RequestTimeTooSkewed", "InvalidRange", "EntityTooLarge", "PreconditionFailed", "",
            text))  # fmt: skip
    if kind == 5:
        return "raw", dice.choice((b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 \xff OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\n" * 3000, b"x" * 300_000))  # fmt: skip
    if kind == 6:
        return "cut", dice.random()
    if kind == 7:
        return "endless", dice.choice(("same", "new"))
    body = dice.choice(_BODIES)
    if kind == 8:
        return "body", changed_bytes(body.encode(), dice)
    return "body", _changed_xml(body, dice).encode("utf-8", "surrogatepass")


def _changed_xml(body: str, dice: random.Random) -> str:
    elements = re.findall(r"<(\w+)>([^<]*)</\1>", body)
    name, value = dice.choice(elements)
    old, kind = f"<{name}>{value}</{name}>", dice.randrange(8)
    if kind <= 3:
        text = dice.choice(_TEXTS)
        return body.replace(old, f"<{name}>{text.replace('<', '')}</{name}>")
    if kind == 4:
        return body.replace(old, "")
    if kind == 5:
        return body.replace(old, old * dice.choice((2, 20_000)))
    if kind == 6:
        return body.replace(old, "<a>" * 50_000 + "</a>" * 50_000)
    return (
        (" " * dice.choice((0, 2000)) + _DOCTYPE)
        .join(body.partition("\n")[::2])
        .replace(f">{value}<", ">&f;<")
    )


def _answer(
    method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """What an honest server would say."""
    if "uploads" in query and method == "GET":
        return 200, {}, _UPLOADS.encode()
    if "uploads" in query:
        return 200, {}, _BEGUN.encode()
    if "uploadId" in query and method == "GET":
        return 200, {}, _PARTS.encode()
    if "uploadId" in query and method == "POST":
        return 200, {}, _ENDED.encode()
    if method == "PUT":
        return 200, {"ETag": '"p"'}, b""
    if method == "DELETE":
        return 204, {}, b""
    if not key or "list-type" in query:
        return 200, {}, _LISTING.encode()
    about = {"ETag": '"e"', "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
    if found:
        start, end = int(found[1]), min(int(found[2] or len(CONTENT)), len(CONTENT) - 1)
        return (
            206,
            {**about, "Content-Range": f"bytes {start}-{end}/{len(CONTENT)}"},
            CONTENT[start : end + 1],
        )
    return 200, about, CONTENT


class _Server:
    """Serves one case on 127.0.0.1, and notes who gives his key to 127.0.0.2."""

    def __init__(self, changes: list[list[Any]]) -> None:
        self.betrayed, self._changes, self._count = "", changes, 0
        self._lock = threading.Lock()
        self._listening = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._listening[0].getsockname()[1]
        self._listening.append(socket.create_server(("127.0.0.2", self.port)))
        self._open: list[socket.socket] = []
        for at in self._listening:
            threading.Thread(target=self._accept, args=(at,), daemon=True).start()

    def close(self) -> None:
        for each in (*self._listening, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, at: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = at.accept()
                self._open.append(connection)
                threading.Thread(
                    target=self._serve, args=(connection, at is not self._listening[0]), daemon=True
                ).start()

    def _serve(self, connection: socket.socket, is_other: bool) -> None:  # noqa: FBT001
        with (
            contextlib.suppress(OSError, ValueError),
            connection,
            connection.makefile("rb") as file,
        ):
            while line := file.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (line := file.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                if headers.get("expect"):
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                file.read(int(headers.get("content-length") or 0))
                if is_other and ("authorization" in headers or "X-Amz-Signature" in path):
                    self.betrayed = f"{method} {path} with {headers.get('authorization')}"
                split = urlsplit(path)
                query = dict(parse_qsl(split.query, keep_blank_values=True))
                key = unquote(split.path).removeprefix("/bucket").removeprefix("/")
                data, is_last = self._said(method, _answer(method, key, query, headers))
                connection.sendall(data)
                if is_last:
                    return

    def _said(self, method: str, answer: tuple[int, dict[str, str], bytes]) -> tuple[bytes, bool]:
        with self._lock:
            number, self._count = self._count, self._count + 1
        status, headers, body = answer
        cut, is_last = 1.0, False
        for at, kind, value in self._changes:
            if kind == "endless" and b"ListBucketResult" in body:
                token = "t" if value == "same" else f"t{number}"
                body = body.replace(b"<IsTruncated>false", b"<IsTruncated>true").replace(
                    b"</Name>",
                    f"</Name><NextContinuationToken>{token}</NextContinuationToken>".encode(),
                )
            if at != number:
                continue
            if kind == "status":
                status = value
            elif kind == "header":
                headers, is_last = {**headers, value[0]: value[1]}, True
            elif kind == "error":
                status = {
                    "NoSuchKey": 404,
                    "SlowDown": 503,
                    "InvalidRange": 416,
                    "PermanentRedirect": 301,
                }.get(value, 403)
                body = _ERROR.replace("SlowDown", value).encode("utf-8", "surrogatepass")
            elif kind == "redirect":
                status, headers, body = (
                    value,
                    {"Location": "@OTHER@/bucket/pre/run/a"},
                    _ERROR.replace("SlowDown", "TemporaryRedirect").encode(),
                )
            elif kind == "body":
                body = value
            elif kind == "raw":
                return value, True
            elif kind == "cut":
                cut, is_last = value, True
        said = {"Content-Length": str(len(body)), **headers}
        lines = "".join(f"{name}: {text}\r\n" for name, text in said.items())
        data = f"HTTP/1.1 {status} Words\r\n{lines}\r\n".encode("utf-8", "surrogatepass") + (
            b"" if method == "HEAD" or status in (204, 304) else body
        )
        data = data.replace(b"@OTHER@", f"http://127.0.0.2:{self.port}".encode())
        return data[: int(len(data) * cut)], is_last


def _run_s3(case: Case, home: Path) -> str:
    server = _Server(case["changes"])
    options = {
        "key": "AKIDEXAMPLE",
        "secret": "verysecret",
        "endpoint_url": f"http://127.0.0.1:{server.port}",
    }
    try:
        store = S3Store(
            Remote("s3", "bucket/pre"), options, Limits(patience=case["patience"], stall=1.0)
        )
        try:
            OPERATIONS[case["operation"]](store)
        except Wrong:
            if not any(
                kind in ("body", "raw", "header", "redirect") for _, kind, _ in case["changes"]
            ):  # else the server lies, and nobody could know
                raise
    finally:
        server.close()
        if server.betrayed:
            raise Wrong(f"gives a signature to another host: {server.betrayed}")
    return "done"


# SFTP


def _make_sftp(dice: random.Random) -> Case:
    """``changes``: number of the packet, and what of it is replaced by what.

    Whether its length says so.
    """
    changes = []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        insert = dice.choice((b"", b"\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0",
            b"\0\0\0\0", bytes([dice.randrange(99, 107)]), bytes([201]), dice.randbytes(4),
            dice.randbytes(30), dice.choice(NAMES).encode("utf-8", "replace")))  # fmt: skip
        remove = dice.choice((len(insert), len(insert), 0, 1, 4, 1 << 20))
        changes.append(
            [
                dice.randrange(12),
                dice.choice((0, 1, 5, 5, 9, 9, 13, dice.randrange(60))),
                remove,
                insert.hex(),
                dice.randrange(4) > 0,
            ]
        )
    return {"operation": dice.choice(sorted(OPERATIONS)), "changes": changes}


def _run_sftp(case: Case, home: Path) -> str:
    root = home / "store" / "run"
    (root / "b").mkdir(parents=True)
    (root / "a").write_bytes(CONTENT)
    (home / "store" / "changes").write_text(json.dumps(case["changes"]))
    protocol.FSYNC_PATIENCE = 1.0  # it is waited for long while it syncs
    store = served(
        home / "store", f"changes={home}/store/changes", limits=Limits(patience=0.0, stall=1.0)
    )
    # a server that lies of names or bytes cannot be known: manifests say what there is
    with contextlib.suppress(Wrong):
        OPERATIONS[case["operation"]](store)
    return "done"


DOORS: Mapping[str, Door] = {
    "s3-answers": Door(by_dice(_make_s3), _run_s3),
    "sftp-answers": Door(by_dice(_make_sftp), _run_sftp, ("store",)),
}
