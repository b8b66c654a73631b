"""Where campaigns write: a directory, SeaweedFS and OpenSSH, these two behind proxies that count
what passes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from ckptsync.stores.part_upload import PART
from ckptsync.stores.sftp.draft import PART as SFTP_PART
from tests.support.fault_proxy import HttpProxy, TcpProxy
from tests.support.network_faults import UP
from tests.support.waiting import until


class Location(Protocol):
    """A kind of store, and in it ever new empty ones.

    ``part``: bytes that may be sent again for each thread.  ``extra``: bytes that are counted for
    each byte of a file, and for each connection. ``orphaned``: bytes of a temporary file, never
    listed, that a killed write of a small file may leave; 0: uploads without a part.
    """

    kind: str
    url: str
    options: Mapping[str, object]
    part: int
    extra: tuple[float, int]
    orphaned: int

    def fresh(self) -> None:
        """Let ``url`` be an empty store's; the one before is thrown away."""
        ...

    def kept(self) -> int:
        """Bytes that the server was given since `fresh`, by whomever."""
        ...

    def sent(self) -> int:
        """Bytes that were sent, ever: for differences around something that this process does."""
        ...

    def everything(self) -> Mapping[str, int]:
        """Names and sizes of all that lies there, whatever ckptsync may call it, and of uploads
        that are unfinished.
        """
        ...

    def passed(self, count: int, timeout: float) -> bool:
        """Wait until the server has been given so many bytes since `fresh`."""
        ...


class Directory:
    """A local directory."""

    # orphaned: a record's, which nobody writes again
    kind, part, extra, orphaned = "posix", 1 << 20, (0.0, 0), 64 << 10
    options: Mapping[str, object] = {}

    def __init__(self, home: Path) -> None:
        self.path, self._roots = home, (home / str(n) for n in itertools.count())
        self.url = ""
        self.fresh()

    def fresh(self) -> None:
        if self.url:
            shutil.rmtree(self.path)
        self.path = next(self._roots)
        self.path.mkdir(parents=True)
        self.url = str(self.path)

    def kept(self) -> int:
        return sum({found.st_ino: found.st_size for _, found in self._files()}.values())

    def sent(self) -> int:
        """What this process has written to whatever file."""
        [line] = [
            line
            for line in Path("/proc/self/io").read_text().splitlines()
            if line.startswith("wchar")
        ]
        return int(line.split()[1])

    def everything(self) -> Mapping[str, int]:
        return {name: found.st_size for name, found in self._files()}

    def passed(self, count: int, timeout: float) -> bool:
        return until(lambda: self.kept() >= count, timeout, 0.002)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for path in self.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # named, or removed, since it was listed
                if path.is_file():
                    yield str(path.relative_to(self.path)), path.stat()


class Bucket:
    """SeaweedFS's S3."""

    kind, part, extra, orphaned = "s3", PART, (0.0, 0), 0

    def __init__(self) -> None:
        from tests.support.seaweedfs import weed

        self._weed = weed()
        self.proxy = HttpProxy(("127.0.0.1", self._weed.port))
        self.options: Mapping[str, object] = self._weed.options(
            endpoint=f"http://127.0.0.1:{self.proxy.port}"
        )
        self._bucket = self.url = ""
        self.fresh()

    def fresh(self) -> None:
        if self._bucket:
            # SeaweedFS takes its objects with it, and gives their room back
            self._weed.client().delete_bucket(Bucket=self._bucket)
        self._bucket = self._weed.bucket()
        self.url = f"s3://{self._bucket}/some/where"
        self.proxy.forget()

    def kept(self) -> int:
        """Bodies of parts and of small files."""
        return self.proxy.bytes["UploadPart up"] + self.proxy.bytes["PutObject up"]

    sent = kept

    def everything(self) -> Mapping[str, int]:
        client: Any = self._weed.client()
        sizes = {
            one["Key"].removeprefix("some/where/"): one["Size"]
            for one in client.list_objects_v2(Bucket=self._bucket).get("Contents", [])
        }
        for one in client.list_multipart_uploads(Bucket=self._bucket).get("Uploads", []):
            parts = client.list_parts(
                Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"]
            ).get("Parts", [])
            sizes[f"upload {one['UploadId']} of {one['Key']}"] = sum(part["Size"] for part in parts)
        return sizes

    def passed(self, count: int, timeout: float) -> bool:
        return self.proxy.passed(count, timeout)


class Host(Directory):
    """The same directory behind OpenSSH."""

    kind, part, extra, orphaned = "sftp", SFTP_PART, (0.05, 64 << 10), SFTP_PART

    def __init__(self, home: Path) -> None:
        from tests.support.sshd import sshd

        server = sshd()
        self.proxy = TcpProxy(("127.0.0.1", server.port))
        home.mkdir(parents=True)
        known = home / "known_hosts"
        known.write_text(
            server.known_hosts.read_text().replace(f":{server.port} ", f":{self.proxy.port} ")
        )
        self.options = server.options_with(known_hosts=known)
        self._user = server.user
        super().__init__(home / "root")

    def fresh(self) -> None:
        super().fresh()
        self.url = f"sftp://{self._user}@127.0.0.1:{self.proxy.port}{self.path}"
        self.proxy.forget()

    def kept(self) -> int:
        """All that went up, with what SSH adds."""
        return self.proxy.bytes[UP]

    sent = kept

    def passed(self, count: int, timeout: float) -> bool:
        return self.proxy.passed(count, timeout)


@contextlib.contextmanager
def location(kind: str, home: Path) -> Iterator[Location]:
    """One of a kind: posix, s3 or sftp."""
    if kind == "posix":
        yield Directory(home / kind)
        return
    found = Bucket() if kind == "s3" else Host(home / kind)
    with closing(found.proxy):
        yield found
