"""Victims that write to a directory, to S3 and over SFTP: files one by one, and `ckptsync push`.

After a death, and with a new object: no file is listed that is not whole; every file that was
acknowledged is there.  Then the same is written again: bytes that the server had been given are
sent again for parts in flight at most; and nothing else is left.

``python -m tests.campaigns.kill_stores JOB`` is the process that writes files: it prints
``ACK <name>`` for each file once the store has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import ckptsync
from ckptsync.errors import Exists
from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import create_store, open_any
from ckptsync.stores.part_upload import PART
from ckptsync.stores.sftp.draft import PART as SFTP_PART
from tests.campaigns.campaign import CKPTSYNC, CLEAN, flags
from tests.campaigns.killing import PATIENCE, Ended, Victim
from tests.support.fault_proxy import HttpProxy, TcpProxy
from tests.support.files_in_memory import contents
from tests.support.network_faults import UP
from tests.support.waiting import until
from tests.support.worker_in_process import push_now

KINDS = ("posix", "s3", "sftp")
DEMO = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2" / "node0" / "checkpoint-4"
MARK = "/ckptsync-campaign/begin"
PIECE = 1 << 20
PARTS = 4  # and a third of a large file
LIMITS = Limits(threads=2, patience=20, stall=10)


class Location(Protocol):
    """A kind of store, and in it ever new empty ones.

    ``part``: bytes that may be sent again for each thread.  ``extra``: bytes that are counted for
    each byte of a file, and for each connection.  ``orphaned``: bytes of a temporary file, never
    listed, that a killed write of a small file may leave; 0: uploads without a part.
    """

    kind: str
    url: str
    options: Mapping[str, object]
    part: int
    extra: tuple[float, int]
    orphaned: int

    def renew(self) -> None:
        """Let ``url`` be an empty store's; the one before is thrown away."""
        ...

    def received(self) -> int:
        """Return the bytes that the server was given since `renew`, by whomever."""
        ...

    def sent(self) -> int:
        """Return bytes that were sent, for differences around what this process does."""
        ...

    def everything(self) -> Mapping[str, int]:
        """Return names and sizes of all that lies there, hidden files and uploads included."""
        ...


class Directory:
    """A local directory."""

    # orphaned: a record's, which nobody writes again
    kind, part, extra, orphaned = "posix", 1 << 20, (0.0, 0), 64 << 10
    options: Mapping[str, object] = {}

    def __init__(self, home: Path) -> None:
        self.path, self._roots = home, (home / str(n) for n in itertools.count())
        self.url = ""
        self.renew()

    def renew(self) -> None:
        if self.url:
            shutil.rmtree(self.path)
        self.path = next(self._roots)
        self.path.mkdir(parents=True)
        self.url = str(self.path)

    def received(self) -> int:
        return sum({status.st_ino: status.st_size for _, status in self._files()}.values())

    def sent(self) -> int:
        """Return what this process has written to whatever file."""
        [line] = [x for x in Path("/proc/self/io").read_text().splitlines() if x[:5] == "wchar"]
        return int(line.split()[1])

    def everything(self) -> Mapping[str, int]:
        return {name: status.st_size for name, status in self._files()}

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for path in self.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # named, or removed, since it was listed
                if path.is_file():
                    yield str(path.relative_to(self.path)), path.stat()


class Bucket:
    """SeaweedFS's S3, behind a proxy that counts."""

    kind, part, extra, orphaned = "s3", PART, (0.0, 0), 0

    def __init__(self) -> None:
        from tests.support.seaweedfs import weed

        self._weed = weed()
        self.proxy = HttpProxy(("127.0.0.1", self._weed.port))
        endpoint = f"http://127.0.0.1:{self.proxy.port}"
        self.options: Mapping[str, object] = self._weed.options(endpoint=endpoint)
        self._bucket = self.url = ""
        self.renew()

    def renew(self) -> None:
        if self._bucket:  # SeaweedFS deletes its objects with it, and gives their room back
            self._weed.client().delete_bucket(Bucket=self._bucket)
        self._bucket = self._weed.bucket()
        self.url = f"s3://{self._bucket}/some/where"
        self.proxy.forget()

    def received(self) -> int:
        """Return the bytes of the bodies of parts and of small files."""
        return self.proxy.bytes["UploadPart up"] + self.proxy.bytes["PutObject up"]

    sent = received

    def everything(self) -> Mapping[str, int]:
        client: Any = self._weed.client()
        bucket = {"Bucket": self._bucket}
        objects = client.list_objects_v2(**bucket).get("Contents", [])
        sizes = {each["Key"].removeprefix("some/where/"): each["Size"] for each in objects}
        for upload in client.list_multipart_uploads(**bucket).get("Uploads", []):
            key = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            parts = client.list_parts(**bucket, **key).get("Parts", [])
            sizes[f"upload of {upload['Key']}"] = sum(part["Size"] for part in parts)
        return sizes


class Host(Directory):
    """The same directory behind OpenSSH, and a proxy that counts."""

    kind, part, extra, orphaned = "sftp", SFTP_PART, (0.05, 64 << 10), SFTP_PART

    def __init__(self, home: Path) -> None:
        from tests.support.sshd import sshd

        server = sshd()
        self.proxy = TcpProxy(("127.0.0.1", server.port))
        home.mkdir(parents=True)
        hosts = home / "known_hosts"
        lines = server.known_hosts.read_text()
        hosts.write_text(lines.replace(f":{server.port} ", f":{self.proxy.port} "))
        self.options = server.options_with(known_hosts=hosts)
        self._user = server.user
        super().__init__(home / "root")

    def renew(self) -> None:
        super().renew()
        self.url = f"sftp://{self._user}@127.0.0.1:{self.proxy.port}{self.path}"
        self.proxy.forget()

    def received(self) -> int:
        """Return all bytes that went up, with what SSH adds."""
        return self.proxy.bytes[UP]

    sent = received


@contextlib.contextmanager
def location(kind: str, home: Path) -> Iterator[Location]:
    """Yield a location of a kind: posix, s3 or sftp."""
    if kind == "posix":
        yield Directory(home / kind)
        return
    remote = Bucket() if kind == "s3" else Host(home / kind)
    with closing(remote.proxy):
        yield remote


@dataclass(frozen=True, slots=True)
class File:
    """A file to write; ``seed`` decides its content, ``how`` is write or create."""

    name: str
    how: str
    seed: int
    size: int

    def content(self) -> bytes:
        """Return all of it."""
        return random.Random(self.seed).randbytes(self.size)

    def put(self, store: Store) -> None:
        """Send it, as a worker does: a name that has these bytes is as good as written."""
        content = memoryview(self.content())
        pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
        about = About(self.size, f"campaign {self.seed} {self.size}")
        try:
            (store.create if self.how == "create" else store.write)(self.name, pieces, about)
        except Exists:
            if read_all(store, self.name) != content:
                raise


OLD = File("run/a", "write", 1, 70_000)
SMALL = (
    File("run/a", "write", 2, 300_000),
    File("run/deep/b", "create", 3, 5_000),
    File("run/deep/c", "write", 4, 0),
)


def large(part: int, seed: int) -> Sequence[File]:
    """Return a file of several parts, the last of them a short one; and a small one after it."""
    size = PARTS * part + part // 3
    return (File("run/big", "create", seed, size), File(OLD.name, "write", seed + 1, 1000))


class StoreVictim(Victim):
    """A process that writes to a location; ``size``: the bytes that it writes."""

    size: int

    def __init__(self, location_: Location, kind: str) -> None:
        self.location, self.name = location_, f"{location_.kind}, {kind}"
        self._before = self._given = 0
        options = {location_.kind: dict(location_.options)} if location_.options else {}
        self.environment = {
            **CLEAN,
            "CKPTSYNC_STORAGE_OPTIONS": json.dumps(options),
            "CKPTSYNC_LIMITS_THREADS": str(LIMITS.threads),
            "CKPTSYNC_LIMITS_PATIENCE": "2m",
        }

    def prepare(self) -> Sequence[str]:
        self.location.renew()
        command = self.command()
        self._before = self.location.received()
        return command

    def command(self) -> Sequence[str]:
        """Write what is there before; return the command."""
        raise NotImplementedError

    def differences(self, acknowledged: set[str]) -> Iterable[str]:
        """Yield files that are torn, lost or nobody's."""
        raise NotImplementedError

    def acknowledged(self, lines: Sequence[str]) -> set[str]:
        """Return the names of files that the process said were stored."""
        raise NotImplementedError

    def write_again(self) -> set[str]:
        """Write the same in this process; return the names of all files that may be there."""
        raise NotImplementedError

    def is_over(self, lines: Sequence[str]) -> bool:
        """Whether the process came to its end."""
        raise NotImplementedError

    def wait(self, process: subprocess.Popen[str], life: float, dice: random.Random) -> str:
        """Wait until so many bytes have been sent, or a little longer."""
        count, pause = dice.randrange(self.size), dice.choice((0.0, dice.random() * 0.05))
        target = self._before + count
        until(
            lambda: self.location.received() >= target or process.poll() is not None,
            PATIENCE,
            0.002,
        )
        time.sleep(pause)
        return f"{count} bytes, {pause:.3f} s"

    def violations(self, ended: Ended) -> Iterable[str]:
        lines = ended.out.splitlines()
        if not ended.is_killed and not self.is_over(lines):
            yield f"ended by itself with {ended.code}: {ended.err[-500:]}"
        self._given = self.location.received() - self._before
        yield from self.differences(self.acknowledged(lines))

    def finish(self) -> Iterable[str]:
        before = self.location.sent()
        names = self.write_again()
        repeated = self._given + self.location.sent() - before - self.size
        each, connection = self.location.extra
        allowed = self.location.part * LIMITS.threads + int(each * self.size) + 8 * connection
        if repeated > allowed:
            yield f"{repeated} bytes were sent again, {allowed} are allowed"
        for name, size in self.location.everything().items():
            if name not in names and size > self.location.orphaned:
                yield f"left behind: {name}, {size} bytes"
        yield from self.differences(names)


class Writing(StoreVictim):
    """Files, one after the other.  `OLD` is there before, under a name that is written anew."""

    mark = MARK

    def __init__(self, location_: Location, home: Path, files: Sequence[File]) -> None:
        super().__init__(location_, "writing")
        self._files, self._job = files, home / "job"
        self.size = sum(file.size for file in files)

    def _store(self) -> Store:
        return open_any(self.location.url, self.location.options, LIMITS)

    def command(self) -> Sequence[str]:
        OLD.put(self._store())
        files = [dataclasses.asdict(file) for file in self._files]
        job = {"url": self.location.url, "options": dict(self.location.options), "files": files}
        self._job.write_text(json.dumps(job))
        return [sys.executable, "-m", "tests.campaigns.kill_stores", str(self._job)]

    def acknowledged(self, lines: Sequence[str]) -> set[str]:
        return {line.split()[1] for line in lines if line.startswith("ACK")}

    def is_over(self, lines: Sequence[str]) -> bool:
        return len(self.acknowledged(lines)) == len(self._files)

    def differences(self, acknowledged: set[str]) -> Iterable[str]:
        allowed = {
            f.name: [f.content(), *([] if f.name in acknowledged else [OLD.content()])]
            for f in self._files
        }
        return _differences(self._store(), allowed, acknowledged | {OLD.name})

    def write_again(self) -> set[str]:
        store = self._store()
        for file in self._files:
            file.put(store)
        return {file.name for file in self._files}


class Pushing(StoreVictim):
    """``ckptsync push`` of one checkpoint, of which a file is large."""

    def __init__(self, location_: Location, home: Path, ballast: int, seed: int) -> None:
        super().__init__(location_, "push")
        self._checkpoint = shutil.copytree(DEMO, home / "run" / DEMO.name)
        (self._checkpoint / "ballast_0.distcp").write_bytes(random.Random(seed).randbytes(ballast))
        self.mark = str(self._checkpoint)
        self.size = sum(map(len, self._contents.values()))

    @cached_property
    def _contents(self) -> Mapping[str, bytes]:
        files = contents(self._checkpoint)
        return {f"run/{self._checkpoint.name}/{path}": data for path, data in files.items()}

    def command(self) -> Sequence[str]:
        words = flags(store=self.location.url, run="run", node="n0")
        return [*CKPTSYNC, "push", str(self._checkpoint), *words]

    def acknowledged(self, lines: Sequence[str]) -> set[str]:
        return set(self._contents) if self.is_over(lines) else set()

    def is_over(self, lines: Sequence[str]) -> bool:
        return any("sent" in line for line in lines)

    def differences(self, acknowledged: set[str]) -> Iterable[str]:
        """Yield the same as of files; and a manifest has all of its files."""
        store = open_any(self.location.url, self.location.options, LIMITS)
        records = [entry.name for entry in store.names("") if ".ckptsync/" in entry.name]
        is_named = acknowledged or any(map(parse_record_name, records))
        allowed = {name: [content] for name, content in self._contents.items()}
        return _differences(store, allowed, set(allowed) if is_named else set(), records)

    def write_again(self) -> set[str]:
        store = create_store(self.location.url, self.location.options, LIMITS)
        push_now(self._checkpoint, store, "n0", "run")
        records = {entry.name for entry in store.names("") if ".ckptsync/" in entry.name}
        return records | set(self._contents)


def _differences(
    store: Store,
    allowed: Mapping[str, Sequence[bytes]],
    required: set[str],
    records: Sequence[str] = (),
) -> Iterable[str]:
    """Yield files that nobody wrote, or not with these bytes, and required ones not there."""
    sizes = {entry.name: entry.size for entry in store.names("")}
    for name in sizes.keys() - allowed.keys() - set(records):
        yield f"{name}: nobody wrote that"
    for name in required - sizes.keys():
        yield f"{name}: lost, although it was acknowledged, or there before"
    for name in sizes.keys() & allowed.keys():
        content = read_all(store, name)
        if content not in allowed[name] or len(content) != sizes[name]:
            yield f"{name}: {len(content)} bytes that nobody wrote, {sizes[name]} are listed"


def victims(there: Location, home: Path, seed: int) -> tuple[list[Victim], list[Victim]]:
    """Return those that are killed at calls, and those of large files, at moments."""
    part = there.part
    at_calls = [
        Writing(there, home, SMALL),
        Pushing(there, home / "small", part + part // 4, seed),
    ]
    at_moments = [
        Writing(there, home, large(part, seed)),
        Pushing(there, home / "big", PARTS * part, seed),
    ]
    return [*at_calls], [*at_moments]


def main(path: str) -> None:
    """Write all files of a job."""
    job = json.loads(Path(path).read_text())
    store = open_any(job["url"], job["options"], LIMITS)
    os.access(MARK, os.F_OK)
    for file in (File(**each) for each in job["files"]):
        file.put(store)
        os.write(1, f"ACK {file.name}\n".encode())  # one system call, nothing buffered


if __name__ == "__main__":
    main(sys.argv[1])
