"""Libraries as a command: ``python -m benchmarks.carry LIBRARY up|down DIRECTORY URL``.

LIBRARY is ``store`` (our store alone: no scan, no manifest, no digest), ``boto3`` (upload_file and
download_file, eight files at once) or ``s3fs`` (put and get).
"""

# ruff: noqa: PLC0415  each process imports what it needs alone

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.contestants import LOCATION

AT_ONCE = 8


def main() -> None:
    """Upload or download all files."""
    library, direction, directory, url = sys.argv[1:]
    {"store": _store, "boto3": _boto3, "s3fs": _s3fs}[library](direction, Path(directory), url)


def _store(direction: str, directory: Path, url: str) -> None:
    from ckptsync.stores.contract import About
    from ckptsync.stores.opening import open_any
    from ckptsync.stores.parallel_download import StoredFile, download
    from ckptsync.stores.posix.store import PosixStore

    store = open_any(url, _options())
    if direction == "down":
        directory.mkdir()
        downloads = [
            StoredFile(e.name, e.name.removeprefix(f"{LOCATION}/"), e.size, None)
            for e in store.names(f"{LOCATION}/")
        ]
        download(store, PosixStore(str(directory)), downloads)
        return

    def send(path: Path) -> None:
        store.write(
            f"{LOCATION}/{path.relative_to(directory)}", _chunks(path), About(path.stat().st_size)
        )

    _each((path for path in sorted(directory.rglob("*")) if path.is_file()), send)


def _boto3(direction: str, directory: Path, url: str) -> None:
    import boto3  # type: ignore[import-not-found,unused-ignore]

    client = boto3.client("s3")
    bucket = url.removeprefix("s3://").partition("/")[0]
    prefix = url.removeprefix("s3://").partition("/")[2]
    if direction == "up":
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        _each(
            files,
            lambda path: client.upload_file(
                str(path), bucket, f"{prefix}/{path.relative_to(directory)}".lstrip("/")
            ),
        )
        return
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=prefix and f"{prefix}/"
    )
    names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def get(name: str) -> None:
        path = directory / name.removeprefix(prefix).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, name, str(path))

    _each(names, get)


def _s3fs(direction: str, directory: Path, url: str) -> None:
    import s3fs

    files = s3fs.S3FileSystem()
    if direction == "up":
        files.put(f"{directory}/", f"{url.removeprefix('s3://')}/", recursive=True)
    else:
        files.get(f"{url.removeprefix('s3://')}/", f"{directory}/", recursive=True)


def _options() -> dict[str, Any]:
    """Return the options that the commands read, too."""
    options: dict[str, Any] = json.loads(os.environ.get("CKPTSYNC_STORAGE_OPTIONS", "{}"))
    return options


def _chunks(path: Path) -> Iterable[memoryview]:
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def _each(items: Iterable[Any], do: Callable[[Any], None]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(do, items):
            pass


if __name__ == "__main__":
    main()
