"""The servers of the transfers, both on this machine: SeaweedFS for S3, OpenSSH for SFTP."""

# ruff: noqa: PLC0415  each process imports what it needs alone

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

PIECE = 8 << 20
_MISLEADING = ("AWS_", "S3_", "RCLONE_", "PYTHONDONTWRITEBYTECODE")
Digests = Mapping[str, str]


def plain_environment() -> dict[str, str]:
    """Return the environment without what sends a client elsewhere, or makes one slower.

    A bundle of certificates breaks rclone.  Where Python may not keep compiled modules, it would
    compile ckptsync at each start, which never happens where ckptsync is installed.
    """
    return {key: value for key, value in os.environ.items() if not key.startswith(_MISLEADING)}


@dataclass(frozen=True)
class Place:
    """Somewhere to put files.

    ``environment`` has what clients need, ``ssh`` is the command of those that take one; ``files``
    is the directory behind it, where there is one.
    """

    url: str
    pid: int
    environment: Mapping[str, str]
    files: Path | None = None
    ssh: tuple[str, ...] = ()

    def below(self, name: str) -> str:
        """Return the URL of a name."""
        return f"{self.url}/{name}"

    def digests(self) -> Digests:
        """Return name → BLAKE3 of everything here, read with another library than ours."""
        return digests(self.files) if self.files else _digests_of_bucket(self)

    def clear(self) -> None:
        """Delete all that is here, so that the server has its room again."""
        if self.files:
            shutil.rmtree(self.files)
        else:
            client(self).delete_bucket(Bucket=self.url.rpartition("/")[2])


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Any]:
    """Yield a function that makes an empty bucket on a server whose data lie in ``folder``."""
    environment = {**os.environ, "TMPDIR": str(folder), "GOMEMLIMIT": "2GiB"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.seaweedfs"], stdin=-1, stdout=-1, env=environment
    ) as server:
        assert server.stdout
        assert server.stdin
        answer = json.loads(server.stdout.readline())
        shared = {
            "AWS_ACCESS_KEY_ID": answer["key"],
            "AWS_SECRET_ACCESS_KEY": answer["secret"],
            "AWS_ENDPOINT_URL": answer["endpoint_url"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "S3_ENDPOINT_URL": answer["endpoint_url"],
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CONFIG_S_TYPE": "s3",
            "RCLONE_CONFIG_S_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_S_ENV_AUTH": "true",
            "RCLONE_CONFIG_S_ENDPOINT": answer["endpoint_url"],
        }

        def fresh() -> Place:
            place = Place(f"s3://bench-{secrets.token_hex(6)}", answer["pid"], shared)
            client(place).create_bucket(Bucket=place.url.rpartition("/")[2])
            return place

        try:
            yield fresh
        finally:
            server.stdin.close()


@contextlib.contextmanager
def sftp(folder: Path) -> Iterator[Any]:
    """Yield a function that makes an empty directory in ``folder``, behind an SSH server."""
    from tests.support.sshd import Sshd

    server = Sshd()
    try:
        config = folder / "ssh_config"
        config.write_text(
            "Host *\n"
            f"  Port {server.port}\n"
            f"  IdentityFile {server.key}\n"
            "  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {server.known_hosts}\n"
            "  StrictHostKeyChecking yes\n"
        )

        environment = {"CKPTSYNC_STORAGE_OPTIONS": json.dumps(dict(server.options))}

        def fresh() -> Place:
            files = folder / f"served-{secrets.token_hex(6)}"
            files.mkdir()
            assert server._process  # noqa: SLF001
            return Place(
                server.url(files),
                server._process.pid,  # noqa: SLF001
                environment,
                files,
                ("ssh", "-F", str(config)),
            )

        yield fresh
    finally:
        server.close()


def client(place: Place) -> Any:
    """Return a client of botocore, with nothing of ours."""
    import botocore.session
    from botocore.config import Config

    environment = place.environment
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 3}),
    )


def digests(folder: Path) -> Digests:
    """Return relative path → BLAKE3 of every file below."""
    return {
        str(path.relative_to(folder)): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _digest(path: Path) -> str:
    hasher, buffer = blake3(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def _digests_of_bucket(place: Place) -> Digests:
    s3, bucket = client(place), place.url.rpartition("/")[2]
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def digest(name: str) -> str:
        hasher = blake3()
        for piece in s3.get_object(Bucket=bucket, Key=name)["Body"].iter_chunks(PIECE):
            hasher.update(piece)
        return hasher.hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
