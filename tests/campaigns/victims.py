"""Commands to be killed, each with a world that is made anew, and what must hold in it.

After each death a file, checkpoint or model is not there, or whole; what was there before is not
lost.  The same command then goes on, and leaves what it leaves where nobody dies, and nothing else.
A head's commands are killed at each call of a store by `tests.support.crashing_store`: they change
nothing else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, TimeoutExpired
from typing import Any

from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.checkpoint_files import MERGING
from ckptsync.stores.contract import read_all
from ckptsync.stores.opening import create_store, open_any
from ckptsync.stores.part_upload import PART
from tests.campaigns.campaign import CKPTSYNC, CLEAN, flags, new_store
from tests.campaigns.nodes import kill_tree
from tests.support.files_in_memory import contents, file_paths
from tests.support.seaweedfs import weed
from tests.support.vector import ROOT, vector
from tests.support.worker_in_process import push_now

LARGE = 700_000  # bytes of a file of which the next try finds blocks again
BASE = 1_700_000_000 * 10**9  # ns
"""Time of the first file of a pulled checkpoint."""
ORPHANED = 64 << 10  # bytes of a temporary file that a killed write of a record may leave
PATIENCE = 300.0  # seconds for one command on a busy machine
SHARDS = "hf-fsdp2-2node"
Files = Mapping[str, object]
"""What there is of each file: its content, and what else matters."""


def run(
    command: Sequence[str], environment: Mapping[str, str], pause: float = PATIENCE
) -> CompletedProcess[str]:
    """Run a command to its end, or kill it after a pause in seconds.

    Raises TimeoutExpired if it does not end at all.
    """
    pipes: Any = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
    with Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=pause)
        except TimeoutExpired:
            if pause == PATIENCE:
                raise
            kill_tree(process)
            out, err = process.communicate()
        finally:
            kill_tree(process)
    return CompletedProcess(list(command), process.returncode, out, err)


class Victim(ABC):
    """A command that changes ``destination``; ``name`` stands before each violation.

    ``mark``: a text that a system call contains just before the first change.
    ``expected``: the files that the command leaves where nobody dies.
    """

    mark: str
    expected: Files

    def __init__(self, command: str, kind: str, home: Path) -> None:
        self.name, self.destination, self.home = f"{kind}, {command}", home / "destination", home
        home.mkdir(parents=True, exist_ok=True)
        self._kind, self._count = kind, 0
        self._top, self._options = new_store(kind, home)
        storage = {"CKPTSYNC_STORAGE_OPTIONS": json.dumps(self._options)} if self._options else {}
        self.environment = {**CLEAN, "XDG_CACHE_HOME": str(home / "cache"), **storage}

    @property
    def url(self) -> str:
        """The store of this world."""
        return f"{self._top}/{self._count}"

    def prepare(self) -> None:
        """Make a new world."""
        self._count += 1
        shutil.rmtree(self.destination, ignore_errors=True)

    def stored(self) -> dict[str, bytes]:
        """Return the content of every object in the store, records too."""
        store = open_any(self.url, self._options)
        return {entry.name: read_all(store, entry.name) for entry in store.names("")}

    @abstractmethod
    def words(self) -> Sequence[str]:
        """Return the words after ``ckptsync``."""

    @abstractmethod
    def files(self) -> Files:
        """Return the files that there are now."""

    @abstractmethod
    def harm(self) -> Iterator[str]:
        """Yield what must not be true at any moment."""

    def command(self) -> list[str]:
        """Return the command."""
        return [*CKPTSYNC, *self.words()]

    def torn(self) -> Iterator[str]:
        """Yield the files that are other ones than the finished command leaves."""
        for name, content in self.files().items():
            if name not in self.expected:
                yield f"{name}: nobody wrote that"
            elif content != self.expected[name]:
                yield f"{name} is there, and is not whole"

    def left(self) -> Iterator[str]:
        """Yield what is wrong once the command has ended."""
        yield from self.torn()
        yield from (f"{name}: is gone" for name in sorted(self.expected.keys() - self.files()))

    def finish(self) -> Iterator[str]:
        """Do the work again to its end; yield what is not as if nobody had died."""
        done = run(self.command(), self.environment)
        if done.returncode:
            yield f"the second try ended with {done.returncode}: {done.stderr[-500:]}"
            return
        yield from self.harm()
        yield from self.left()


class Pushing(Victim):
    """``ckptsync push`` of one checkpoint, of which a file has two parts, to an empty store."""

    PUSHED = "run/checkpoint-4"

    def __init__(self, kind: str, home: Path, dice: random.Random) -> None:
        super().__init__("push", kind, home)
        (home / "store").mkdir()
        self.environment["CKPTSYNC_LIMITS_THREADS"] = "2"
        self._checkpoint = home / self.PUSHED
        shutil.copytree(vector(SHARDS).sources[0], self._checkpoint)
        (self._checkpoint / "ballast.bin").write_bytes(dice.randbytes(PART * 5 // 4))
        self.expected = {f"{self.PUSHED}/{p}": d for p, d in contents(self._checkpoint).items()}
        self.mark = str(self._checkpoint)

    def prepare(self) -> None:
        super().prepare()
        create_store(self.url, self._options)

    def words(self) -> Sequence[str]:
        store = flags(store=self.url, run="run", node="n0")
        return ["push", str(self._checkpoint), *store]

    def files(self) -> Files:
        return {name: data for name, data in self.stored().items() if ".ckptsync/" not in name}

    def harm(self) -> Iterator[str]:
        """Yield files that nobody wrote so, and what a manifest names and is not there."""
        yield from self.torn()
        stored = self.stored()
        if any(map(parse_record_name, stored)):
            lost = sorted(self.expected.keys() - stored)
            yield from (f"{name}: has a manifest, and is lost" for name in lost)

    def left(self) -> Iterator[str]:
        yield from super().left()
        yield from (f"left behind: {name}" for name in self._unfinished())

    def _unfinished(self) -> Iterator[str]:
        if self._kind == "s3":
            client: Any = weed().client()
            bucket = self._top.split("/")[2]
            uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            yield from (upload["Key"] for upload in uploads if f"/{self._count}/" in upload["Key"])
        for path in (self.home / "store" / str(self._count)).rglob("*.part"):
            if path.stat().st_size > ORPHANED:
                yield f"{path}, {path.stat().st_size} bytes"


class Pulling(Victim):
    """``ckptsync pull`` of a checkpoint of DeepSpeed's, which comes with its pointer file."""

    RUN, CHECKPOINT = "ds", "global_step2"
    mark = ".pull-"  # in the hidden directory's name: nothing is changed before there is one

    def __init__(self, kind: str, home: Path, dice: random.Random) -> None:
        super().__init__("pull", kind, home)
        self.source = home / "out" / self.CHECKPOINT
        shutil.copytree(vector("raw-ds-zero3-tied").sources[0], self.source.parent)
        (self.source / "ballast.bin").write_bytes(dice.randbytes(LARGE))
        for n, path in enumerate(file_paths(self.source).values()):
            os.utime(path, ns=(BASE + n * 10**9,) * 2)
        push_now(self.source.parent, create_store(self._top, self._options), "node0", self.RUN)
        self._newest = BASE + n * 10**9
        checkpoint = {f"{self.CHECKPOINT}/{p}": x for p, x in _with_times(self.source).items()}
        self.expected = {**checkpoint, "latest": self.CHECKPOINT.encode()}

    def words(self) -> Sequence[str]:
        checkpoint = f"{self.RUN}/{self.CHECKPOINT}"
        return ["pull", checkpoint, str(self.destination), *flags(store=self._top)]

    def files(self) -> Files:
        """Return all files, hidden ones too, and directories as files without a content."""
        names = {path.name: None for path in self.destination.iterdir() if path.is_dir()}
        files: dict[str, object] = {**names, **_with_times(self.destination)}
        if "latest" in files:
            files["latest"] = (self.destination / "latest").read_bytes()
        files.pop(self.CHECKPOINT, None)
        return files

    def harm(self) -> Iterator[str]:
        pulled, pointer = self.destination / self.CHECKPOINT, self.destination / "latest"
        if pulled.exists() and _with_times(pulled) != _with_times(self.source):
            yield f"{self.CHECKPOINT} is there, and is not what it was"
        if pulled.exists() and pulled.stat().st_mtime_ns != self._newest:
            yield f"{self.CHECKPOINT} is there without its time"
        if pointer.exists() and not (pulled.exists() and pointer.read_text() == self.CHECKPOINT):
            yield f"latest says {pointer.read_text()!r}"


class Merging(Victim):
    """A merge into a directory (posix) or a store (s3)."""

    def __init__(self, kind: str, home: Path, _dice: random.Random) -> None:
        super().__init__("merge", kind, home)
        self.mark = str(self.destination) if kind == "posix" else "PUT /"
        model = home / "expected"
        assert run([*CKPTSYNC, *self._merge(str(model))], self.environment).returncode == 0
        self.expected = contents(model)

    def _merge(self, destination: str) -> list[str]:
        size = ["--dtype", "bf16", "--max-shard-size", "12kB", "--config-from", str(ROOT / "base")]
        sources = [str(path) for path in vector("hf-zero3-2node").sources]
        return ["merge", *sources, destination, *size]

    def words(self) -> Sequence[str]:
        return self._merge(str(self.destination) if self._kind == "posix" else self.url)

    def finish(self) -> Iterator[str]:
        if self.files() != self.expected:  # whole when it died: the same command would be refused
            yield from super().finish()

    def files(self) -> Files:
        if self._kind == "posix":
            return contents(self.destination) if self.destination.is_dir() else {}
        return self.stored()

    def harm(self) -> Iterator[str]:
        yield from (line for line in self.torn() if not line.startswith(f"{MERGING}:"))
        if self._kind == "posix" and self.files() not in ({}, self.expected):
            yield "the model is there, and is not whole"


VICTIMS: Mapping[str, tuple[Callable[[str, Path, random.Random], Victim], Sequence[str]]] = {
    "push": (Pushing, ("posix", "s3", "sftp")),
    "pull": (Pulling, ("posix", "s3")),
    "merge": (Merging, ("posix", "s3")),
}
"""Name → the class, and the kinds of store that it may use."""


def _with_times(directory: Path) -> Mapping[str, tuple[bytes, int]]:
    """Return the content and time of every file below, hidden ones too."""
    paths = file_paths(directory).items()
    return {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in paths}
