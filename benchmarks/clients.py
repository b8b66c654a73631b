"""S3 clients for Python, compared: how the S3 store asks was decided by these figures.

    python -m benchmarks.clients --python /a/venv/bin/python > clients.txt

Against one SeaweedFS on this machine each client, in a process of its own, sends a file of 512 MiB
in parts of 16 MiB with four threads, reads it in ranges of 16 MiB with four threads, and sends and
reads 500 files of 4 KiB.  A client that this Python has not is looked for in those given by
``--python``.  "server" are the CPU seconds of SeaweedFS meanwhile: what has to be checked there
costs there, too.
"""

# ruff: noqa: PLC0415  each process imports one client alone

from __future__ import annotations

import argparse
import hashlib
import http.client
import importlib.util
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

PART, THREADS, SMALL, SMALL_SIZE = 16 << 20, 4, 500, 4096
_LOCAL = threading.local()


class Botocore:
    """botocore's client alone: `upload_part` with bytes, the body of `get_object` read into a
    buffer.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import botocore.config
        import botocore.session

        config = botocore.config.Config(
            max_pool_connections=8,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        )
        self.client = botocore.session.get_session().create_client(
            "s3", config=config, **_credentials(options)
        )
        self.bucket = options["bucket"]

    def up(self, file: Path, key: str) -> None:
        upload = self.client.create_multipart_upload(Bucket=self.bucket, Key=key)["UploadId"]
        put = lambda n, data: self.put_part(key, upload, n, data)  # noqa: E731
        tags = _each_part(file, put)
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
        self.client.complete_multipart_upload(
            Bucket=self.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
        )

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        body = io.BytesIO(data)
        return str(
            self.client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload, PartNumber=number, Body=body
            )["ETag"]
        )

    def down(self, key: str, size: int) -> None:
        def read(start: int, out: memoryview) -> None:
            body = self.client.get_object(
                Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + len(out) - 1}"
            )["Body"]
            done = 0
            while done < len(out):
                done += body.readinto(out[done : done + (256 << 10)])

        _each_range(size, read)

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())


class Rest(Botocore):
    """http.client, a connection a thread; botocore signs.

    Bodies go out and come in through the caller's own memory.
    """

    signed = True
    """Whether the payload's SHA-256 is in the signature, as botocore has it on http://.

    A CRC32 is sent in any case.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        self.host = options["endpoint_url"].removeprefix("http://")
        self.auth = S3SigV4Auth(Credentials(options["key"], options["secret"]), "s3", "us-east-1")
        self.request = AWSRequest

    def headers(
        self, method: str, path: str, headers: dict[str, str], body: bytes | memoryview
    ) -> dict[str, str]:
        headers["X-Amz-Content-SHA256"] = (
            hashlib.sha256(body).hexdigest() if self.signed or not body else "UNSIGNED-PAYLOAD"
        )
        if body:
            headers["x-amz-checksum-crc32"] = b64encode(_crc32(body).to_bytes(4, "big")).decode()
            headers["Content-Length"] = str(len(body))
        request = self.request(method, f"http://{self.host}{path}", headers)
        request.context["payload_signing_enabled"] = False
        self.auth.add_auth(request)
        return dict(request.headers.items())

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        into: memoryview | None = None,
        span: str = "",
    ) -> Any:
        headers = self.headers(method, path, {"Range": span} if span else {}, body)
        connection = _LOCAL.__dict__.setdefault("connection", None) or http.client.HTTPConnection(
            self.host
        )
        _LOCAL.connection = connection
        connection.putrequest(method, path, skip_accept_encoding=True)
        for header, value in headers.items():
            connection.putheader(header, value)
        connection.endheaders()
        for start in range(0, len(body), 256 << 10):
            connection.sock.sendall(body[start : start + (256 << 10)])
        response = connection.getresponse()
        assert response.status < 300, response.read()
        if into is None:
            response.body = response.read()
            return response
        done = 0
        while done < len(into):
            done += response.readinto(into[done : done + (1 << 20)])
        response.read()
        return response

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        return str(
            self.ask(
                "PUT", f"/{self.bucket}/{key}?partNumber={number}&uploadId={quote(upload)}", data
            ).headers["ETag"]
        )

    def down(self, key: str, size: int) -> None:
        def read(start: int, out: memoryview) -> None:
            self.ask(
                "GET",
                f"/{self.bucket}/{key}",
                into=out,
                span=f"bytes={start}-{start + len(out) - 1}",
            )

        _each_range(size, read)

    def put(self, key: str, data: bytes) -> None:
        self.ask("PUT", f"/{self.bucket}/{key}", data)

    def get(self, key: str) -> bytes:
        return bytes(self.ask("GET", f"/{self.bucket}/{key}").body)


class RestUnsigned(Rest):
    """The same, with the CRC32 alone."""

    signed = False


class Urllib3(Rest):
    """The same with urllib3's connections."""

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        into: memoryview | None = None,
        span: str = "",
    ) -> Any:
        import urllib3

        pool = self.__dict__.setdefault("pool", urllib3.PoolManager(maxsize=8))
        headers = self.headers(method, path, {"Range": span} if span else {}, body)
        response = pool.request(
            method,
            f"http://{self.host}{path}",
            headers=headers,
            body=io.BytesIO(body) if body else None,
            preload_content=into is None,
        )
        assert response.status < 300, response.data
        if into is None:
            response.body = response.data
            return response
        done = 0
        while done < len(into):
            done += response.readinto(into[done : done + (1 << 20)])
        response.release_conn()
        return response


class Boto3(Botocore):
    """boto3's transfers, as users call them."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import boto3
        from boto3.s3.transfer import TransferConfig

        self.client = boto3.client("s3", config=self.client.meta.config, **_credentials(options))
        self.config = TransferConfig(multipart_chunksize=PART, max_concurrency=THREADS)

    def up(self, file: Path, key: str) -> None:
        self.client.upload_file(str(file), self.bucket, key, Config=self.config)

    def down(self, key: str, size: int) -> None:  # noqa: ARG002  as the others
        self.client.download_file(self.bucket, key, "/dev/shm/ckptsync-clients", Config=self.config)  # noqa: S108
        Path("/dev/shm/ckptsync-clients").unlink()  # noqa: S108


class S3fs:
    """s3fs, as users call it."""

    def __init__(self, options: dict[str, Any]) -> None:
        import s3fs

        self.fs = s3fs.S3FileSystem(
            key=options["key"], secret=options["secret"], endpoint_url=options["endpoint_url"]
        )
        self.bucket = options["bucket"]

    def up(self, file: Path, key: str) -> None:
        self.fs.put_file(str(file), f"{self.bucket}/{key}", chunksize=PART, max_concurrency=THREADS)

    def down(self, key: str, size: int) -> None:
        def read(start: int, out: memoryview) -> None:
            out[:] = self.fs.cat_file(f"{self.bucket}/{key}", start=start, end=start + len(out))

        _each_range(size, read)

    def put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.bucket}/{key}", data)

    def get(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.bucket}/{key}"))


class Obstore:
    """obstore, as users call it."""

    def __init__(self, options: dict[str, Any]) -> None:
        import obstore
        from obstore.store import S3Store

        self.api = obstore
        self.store = S3Store(
            options["bucket"],
            endpoint=options["endpoint_url"],
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            client_options={"allow_http": True},
        )

    def up(self, file: Path, key: str) -> None:
        self.api.put(
            self.store, key, file, chunk_size=PART, max_concurrency=THREADS, use_multipart=True
        )

    def down(self, key: str, size: int) -> None:
        def read(start: int, out: memoryview) -> None:
            out[:] = memoryview(self.api.get_range(self.store, key, start=start, length=len(out)))

        _each_range(size, read)

    def put(self, key: str, data: bytes) -> None:
        self.api.put(self.store, key, data)

    def get(self, key: str) -> bytes:
        return bytes(self.api.get(self.store, key).bytes())


class Ours:
    """What came of it: the store itself, with whole parts in memory as the others have them."""

    def __init__(self, options: dict[str, Any]) -> None:
        from ckptsync.stores.limits import Limits
        from ckptsync.stores.s3.store import S3Store
        from ckptsync.stores.urls import Remote

        given = {
            "key": options["key"],
            "secret": options["secret"],
            "endpoint_url": options["endpoint_url"],
        }
        self.store = S3Store(Remote("s3", options["bucket"]), given, Limits(threads=THREADS))

    def up(self, file: Path, key: str) -> None:
        from ckptsync.stores.contract import About

        buffer = memoryview(bytearray(1 << 20))
        with file.open("rb", buffering=0) as opened:
            self.store.write(
                key,
                (buffer[:count] for count in iter(lambda: opened.readinto(buffer), 0)),
                About(file.stat().st_size),
            )

    def down(self, key: str, size: int) -> None:
        _each_range(size, lambda start, out: self.store.read_into(key, start, out))

    def put(self, key: str, data: bytes) -> None:
        self.store.write(key, [data])

    def get(self, key: str) -> bytes:
        out = bytearray(SMALL_SIZE)
        self.store.read_into(key, 0, memoryview(out))
        return bytes(out)


CLIENTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "s3fs": (S3fs, "aiobotocore"),
    "boto3": (Boto3, "boto3"),
    "botocore": (Botocore, "botocore"),
    "urllib3, SHA-256 signed": (Urllib3, "botocore"),
    "http.client, SHA-256 signed": (Rest, "botocore"),
    "http.client, CRC32 alone": (RestUnsigned, "botocore"),
    "obstore": (Obstore, "obstore"),
    "ckptsync": (Ours, "ckptsync"),
}


def run_one(name: str, options: dict[str, Any], file: Path, round_: int) -> dict[str, Any]:
    """What one client took, in this process: wall and CPU seconds of each work.

    `server` has its own seconds of each.
    """
    start = time.perf_counter()
    client = CLIENTS[name][0](options)
    result: dict[str, Any] = {"start": time.perf_counter() - start}
    size, tag = file.stat().st_size, f"{name.replace(' ', '-').replace(',', '')}-{round_}"
    small = os.urandom(SMALL_SIZE)
    works: dict[str, Callable[[], object]] = {
        "up": lambda: client.up(file, f"{tag}/large"),
        "down": lambda: client.down(f"{tag}/large", size),
        "put": lambda: _threads(lambda n: client.put(f"{tag}/small/{n}", small), range(SMALL)),
        "get": lambda: _threads(lambda n: client.get(f"{tag}/small/{n}"), range(SMALL)),
    }
    client.put(f"{tag}/first", small)
    for work, do in works.items():
        before = time.perf_counter(), time.process_time(), _cpu_of(options["pid"])
        do()
        after = time.perf_counter(), time.process_time(), _cpu_of(options["pid"])
        result[work] = [b - a for a, b in zip(before, after, strict=True)]
    return {**result, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}


def _crc32(data: bytes | memoryview) -> int:
    if importlib.util.find_spec("isal"):
        from isal.isal_zlib import crc32

        return int(crc32(data))
    return zlib.crc32(data)


def _credentials(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "endpoint_url": options["endpoint_url"],
        "region_name": "us-east-1",
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
    }


def _threads(do: Callable[[Any], Any], over: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(do, over))


def _each_part(file: Path, put: Callable[[int, memoryview], str]) -> list[str]:
    with file.open("rb") as opened:

        def send(start: int) -> str:
            buffer = _LOCAL.__dict__.setdefault("buffer", bytearray(PART))
            count = os.preadv(opened.fileno(), [buffer], start)
            return put(start // PART + 1, memoryview(buffer)[:count])

        return _threads(send, range(0, file.stat().st_size, PART))


def _each_range(size: int, read: Callable[[int, memoryview], None]) -> None:
    def fetch(start: int) -> None:
        buffer = _LOCAL.__dict__.setdefault("buffer", bytearray(PART))
        read(start, memoryview(buffer)[: min(PART, size - start)])

    _threads(fetch, range(0, size, PART))


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _python_with(module: str, pythons: list[str]) -> str | None:
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return next(
        (p for p in pythons if subprocess.run([p, "-c", found], check=False).returncode == 0), None
    )


def _row(name: str, runs: list[dict[str, Any]]) -> str:
    middle = lambda work, n: statistics.median(r[work][n] for r in runs)  # noqa: E731
    cells = [
        f"{middle(w, 0):.2f} / {middle(w, 1):.2f} / {middle(w, 2):.2f}"
        for w in ("up", "down", "put", "get")
    ]
    peak, start = max(r["peak"] for r in runs) >> 20, statistics.median(r["start"] for r in runs)
    return f"| {name} | {' | '.join(cells)} | {peak} | {start:.2f} |"


def main() -> None:
    """Compare them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        help="another Python, with clients that this one has not",
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(
            json.dumps(
                run_one(
                    **json.loads(
                        given.one,
                        object_hook=lambda d: (
                            d | ({"file": Path(d["file"])} if "file" in d else {})
                        ),
                    )
                )
            )
        )
        return
    from tests.support.seaweedfs import weed

    server = weed()
    options = {**server.options(), "bucket": server.bucket(), "pid": server.pid}
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(given.mib):
            file.write(os.urandom(1 << 20))
        file.flush()
        for round_ in range(given.rounds):
            for name, (_, module) in CLIENTS.items():
                if python := _python_with(module, [sys.executable, *given.python]):
                    task = json.dumps(
                        {"name": name, "options": options, "file": file.name, "round_": round_}
                    )
                    done = subprocess.run(
                        [python, __file__, "--one", task], check=True, stdout=subprocess.PIPE
                    )
                    runs.setdefault(name, []).append(json.loads(done.stdout))
    print(
        f"Seconds: wall / CPU of the client / CPU of the server; medians of {given.rounds}"
        " rounds.\n"
    )
    print(
        f"| client | {given.mib} MiB up | down | {SMALL} small files up | down | peak MiB |"
        " start s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, each in runs.items():
        print(_row(name, each))


if __name__ == "__main__":
    main()
