"""The three kinds of store that scenarios run on, seen without the product: a directory, a bucket,
a directory behind SSH.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tests.support.seaweedfs import weed
from tests.support.sshd import sshd

KINDS = ("path", "s3", "sftp")


class Store(Protocol):
    """A store as an outsider sees it.

    Names are relative to it; `environment` is what a user exports to reach it.
    """

    url: str
    environment: Mapping[str, str]

    def names(self) -> list[str]:
        """All files, sorted."""

    def read(self, name: str) -> bytes:
        """The bytes of one; raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """Put a file there, or other bytes in its place."""

    def delete(self, name: str) -> None:
        """Remove a file."""

    def identity(self, name: str) -> str:
        """Changes when, and only when, somebody writes the file again."""


class Directory:
    """A directory of this machine, named by a path or by an SFTP URL."""

    def __init__(self, root: Path, url: str, environment: Mapping[str, str]) -> None:
        self.root, self.url, self.environment = root, url, environment

    def names(self) -> list[str]:
        return sorted(
            p.relative_to(self.root).as_posix()
            for p in self.root.rglob("*")
            if p.is_file() and not _is_draft(p)
        )

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    def identity(self, name: str) -> str:
        found = (self.root / name).stat()
        return f"{found.st_ino} {found.st_mtime_ns}"


class Bucket:
    """A prefix of a bucket of SeaweedFS."""

    def __init__(self) -> None:
        self._server = weed()
        self._bucket = self._server.bucket()
        self.url = f"s3://{self._bucket}/store"
        options = self._server.options()
        self.environment: Mapping[str, str] = {
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "CKPTSYNC_STORAGE_OPTIONS": json.dumps({"endpoint_url": options["endpoint_url"]}),
        }

    def names(self) -> list[str]:
        pages = (
            self._server.client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=self._bucket, Prefix="store/")
        )
        return sorted(
            entry["Key"].removeprefix("store/")
            for page in pages
            for entry in page.get("Contents", ())
        )

    def read(self, name: str) -> bytes:
        client = self._server.client()
        try:
            return bytes(client.get_object(Bucket=self._bucket, Key=f"store/{name}")["Body"].read())
        except client.exceptions.NoSuchKey:
            raise FileNotFoundError(name) from None

    def write(self, name: str, data: bytes) -> None:
        self._server.client().put_object(Bucket=self._bucket, Key=f"store/{name}", Body=data)

    def delete(self, name: str) -> None:
        self._server.client().delete_object(Bucket=self._bucket, Key=f"store/{name}")

    def identity(self, name: str) -> str:
        head = self._server.client().head_object(Bucket=self._bucket, Key=f"store/{name}")
        return f"{head['ETag']} {head['LastModified'].timestamp()}"


def store_of(kind: str, home: Path) -> Store:
    """A new, empty store."""
    if kind == "s3":
        return Bucket()
    root = home / "store"
    root.mkdir()
    if kind == "path":
        return Directory(root, str(root), {})
    server = sshd()
    options = json.dumps(dict(server.options))
    return Directory(root, server.url(root), {"CKPTSYNC_STORAGE_OPTIONS": options})


def remove(store: Store) -> None:
    """With all that is in it: scenarios leave nothing behind on a disk."""
    if isinstance(store, Directory):
        shutil.rmtree(store.root, ignore_errors=True)


def _is_draft(path: Path) -> bool:
    """An unfinished write, which no reader lists."""
    return path.name.endswith(".part") or "/.ckptsync/unfinished/" in path.as_posix()
