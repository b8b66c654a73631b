"""Commands to be killed, each with what must hold at any moment and what must be left in the end.

After each death a file, checkpoint or model is not there, or whole; what was there before is not
lost.  The same command then goes on, and leaves what it leaves where nobody dies, and nothing else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.head.due_jobs import Job
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.removal import LEASE
from ckptsync.head.retention_rules import Rules
from ckptsync.records.store_paths import consolidated_prefix, parse_record_name
from ckptsync.stores.checkpoint_files import MERGING
from ckptsync.stores.contract import Entry, StoreWrapper, read_all
from ckptsync.stores.opening import create_store, open_any, open_store
from ckptsync.stores.part_upload import PART
from tests.campaigns.campaign import CKPTSYNC, CLEAN, flags, new_store
from tests.campaigns.killing import PATIENCE, Ended, Victim, unexpected
from tests.support.files_in_memory import contents, file_paths
from tests.support.retention_stores import fill
from tests.support.seaweedfs import weed
from tests.support.vector import ROOT, vector
from tests.support.worker_in_process import push_now

LARGE = 700_000  # bytes of a file of which the next try finds blocks again
BASE = 1_700_000_000 * 10**9  # ns
"""Time of the first file of a pulled checkpoint."""
ORPHANED = 64 << 10  # bytes of a temporary file that a killed write of a record may leave
SHARDS = "hf-fsdp2-2node"


class CommandVictim(Victim):
    """A command that makes something in the directory ``destination``, which is new each time."""

    def __init__(self, name: str, home: Path, options: Mapping[str, object] | None = None) -> None:
        self.name, self.destination, self._home = name, home / "destination", home
        home.mkdir(parents=True, exist_ok=True)
        told = {"CKPTSYNC_STORAGE_OPTIONS": json.dumps(options)} if options else {}
        self.environment = {**CLEAN, "XDG_CACHE_HOME": str(home / "cache"), **told}

    def command(self) -> Sequence[str]:
        """Return the words after ``ckptsync``."""
        raise NotImplementedError

    def harm(self) -> Iterable[str]:
        """Yield what must not be true at any moment."""
        raise NotImplementedError

    def left(self) -> Iterable[str]:
        """Yield what is wrong once the command has ended."""
        raise NotImplementedError

    def prepare(self) -> Sequence[str]:
        shutil.rmtree(self.destination, ignore_errors=True)
        return [*CKPTSYNC, *self.command()]

    def violations(self, ended: Ended) -> Iterable[str]:
        yield from unexpected(ended)
        yield from self.harm()

    def finish(self) -> Iterable[str]:
        done = run([*CKPTSYNC, *self.command()], self.environment)
        if done.code:
            yield f"the second try ended with {done.code}: {done.err[-500:]}"
        else:
            yield from self.harm()
            yield from self.left()


class Pushing(CommandVictim):
    """``ckptsync push`` of one checkpoint, of which a file has two parts, to an empty store."""

    PUSHED = "run/checkpoint-4"

    def __init__(self, kind: str, home: Path, dice: random.Random) -> None:
        self._kind, self._count = kind, 0
        self._top, self._options = new_store(kind, home)
        super().__init__(f"{kind}, push", home, self._options)
        (home / "store").mkdir()
        self.environment = {**self.environment, "CKPTSYNC_LIMITS_THREADS": "2"}
        self._checkpoint = home / self.PUSHED
        shutil.copytree(vector(SHARDS).sources[0], self._checkpoint)
        (self._checkpoint / "ballast.bin").write_bytes(dice.randbytes(PART * 5 // 4))
        self._files = {f"{self.PUSHED}/{p}": d for p, d in contents(self._checkpoint).items()}
        self.mark = str(self._checkpoint)

    def prepare(self) -> Sequence[str]:
        self._count += 1
        create_store(f"{self._top}/{self._count}", self._options)
        return super().prepare()

    def command(self) -> Sequence[str]:
        told = flags(store=f"{self._top}/{self._count}", run="run", node="n0")
        return ["push", str(self._checkpoint), *told]

    def harm(self) -> Iterator[str]:
        """Yield files that nobody wrote so, and what a manifest names and is not there."""
        store = open_any(f"{self._top}/{self._count}", self._options)
        sizes = {entry.name: entry.size for entry in store.names("")}
        for name in sizes:
            if ".ckptsync/" not in name and name not in self._files:
                yield f"{name}: nobody wrote that"
        for name in sizes.keys() & self._files.keys():
            if read_all(store, name) != self._files[name] or sizes[name] != len(self._files[name]):
                yield f"{name} is there, and is not whole"
        if any(map(parse_record_name, sizes)):
            yield from (
                f"{name}: has a manifest, and is lost" for name in self._files.keys() - sizes
            )

    def left(self) -> Iterator[str]:
        store = open_any(f"{self._top}/{self._count}", self._options)
        names = {entry.name for entry in store.names("")}
        yield from (f"{name}: is not in the store" for name in self._files.keys() - names)
        yield from (f"left behind: {name}" for name in self._unfinished())

    def _unfinished(self) -> Iterator[str]:
        if self._kind == "s3":
            client: Any = weed().client()
            bucket = self._top.split("/")[2]
            uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            yield from (upload["Key"] for upload in uploads if f"/{self._count}/" in upload["Key"])
            return
        for path in (self._home / "store" / str(self._count)).rglob("*.part"):
            if path.stat().st_size > ORPHANED:
                yield f"{path}, {path.stat().st_size} bytes"


class Pulling(CommandVictim):
    """A checkpoint of DeepSpeed's in a store of a kind, pulled."""

    RUN, CHECKPOINT = "ds", "global_step2"
    mark = ".pull-"  # in the hidden directory's name: nothing is changed before there is one

    def __init__(self, kind: str, home: Path, dice: random.Random) -> None:
        self._url, options = new_store(kind, home)
        super().__init__(f"{kind}, pull", home, options)
        self.source = home / "out" / self.CHECKPOINT
        shutil.copytree(vector("raw-ds-zero3-tied").sources[0], self.source.parent)
        (self.source / "ballast.bin").write_bytes(dice.randbytes(LARGE))
        for n, path in enumerate(file_paths(self.source).values()):
            os.utime(path, ns=(BASE + n * 10**9,) * 2)
        self._expected = _with_times(self.source)
        push_now(self.source.parent, create_store(self._url, options), "node0", self.RUN)

    def command(self) -> Sequence[str]:
        checkpoint = f"{self.RUN}/{self.CHECKPOINT}"
        return ["pull", checkpoint, str(self.destination), *flags(store=self._url)]

    def harm(self) -> Iterator[str]:
        pulled, pointer = self.destination / self.CHECKPOINT, self.destination / "latest"
        if pulled.exists() and _with_times(pulled) != self._expected:
            yield f"{self.CHECKPOINT} is there, and is not what it was"
        newest = max(time for _, time in self._expected.values())
        if pulled.exists() and pulled.stat().st_mtime_ns != newest:
            yield f"{self.CHECKPOINT} is there without its time"
        if pointer.exists() and not (pulled.exists() and pointer.read_text() == self.CHECKPOINT):
            yield f"latest says {pointer.read_text()!r}"

    def left(self) -> Iterator[str]:
        names = sorted(path.name for path in self.destination.iterdir())
        if names != [self.CHECKPOINT, "latest"]:
            yield f"there are {names}"


class Merging(CommandVictim):
    """A merge into a directory (posix) or a store (s3), which then runs again.

    Into a store it runs with other options first: that is refused while one is unfinished.
    """

    WORDS, OTHERS = ("--dtype", "bf16"), ("--dtype", "fp32")

    def __init__(self, kind: str, home: Path, _dice: random.Random) -> None:
        self._kind, self._count, self._words = kind, 0, self.WORDS
        self._top, self._options = new_store(kind, home)
        super().__init__(f"{kind}, merge", home, self._options)
        self.mark = str(self.destination) if kind == "posix" else "PUT /"
        assert run([*CKPTSYNC, *self._merge(str(home / "expected"))], self.environment).code == 0
        self._expected = contents(home / "expected")

    def _merge(self, destination: str) -> list[str]:
        size = ["--max-shard-size", "12kB", "--config-from", str(ROOT / "base")]
        sources = [str(path) for path in vector("hf-zero3-2node").sources]
        return ["merge", *sources, destination, *self._words, *size]

    def prepare(self) -> Sequence[str]:
        self._count += 1
        return super().prepare()

    def command(self) -> Sequence[str]:
        is_local = self._kind == "posix"
        return self._merge(str(self.destination) if is_local else f"{self._top}/{self._count}")

    def finish(self) -> Iterable[str]:
        model = self._model()
        if model == self._expected:
            return  # whole when it died: the same command would be refused
        if self._kind == "s3" and model:
            self._words = self.OTHERS
            code = run([*CKPTSYNC, *self.command()], self.environment).code
            self._words = self.WORDS
            if code != 2:
                yield f"a merge with other options, into an unfinished one, ended with {code}"
        yield from super().finish()

    def _model(self) -> Mapping[str, bytes]:
        if self._kind == "posix":
            return contents(self.destination) if self.destination.is_dir() else {}
        store = open_any(f"{self._top}/{self._count}", self._options)
        return {entry.name: read_all(store, entry.name) for entry in store.names("")}

    def harm(self) -> Iterator[str]:
        model = self._model()
        for name, data in model.items():
            is_record = self._kind == "s3" and name == MERGING
            if not is_record and self._expected.get(name) != data:
                yield f"{name} is there, and is not whole"
        if self._kind == "posix" and model and model != self._expected:
            yield "the model is there, and is not whole"

    def left(self) -> Iterator[str]:
        model = self._model()
        for name in sorted(self._expected.keys() | model.keys()):
            if self._expected.get(name) != model.get(name):
                yield f"{name}: not as without a death"


class StoreVictim(CommandVictim):
    """A command that changes ``destination``, a store in a directory that is ``original`` first."""

    config: ClassVar[Mapping[str, object]]
    mark = "destination"

    def __init__(self, name: str, home: Path) -> None:
        super().__init__(name, home)
        self.original = home / "original"
        self._config = home / "head.yaml"
        self._write_config(self.config)

    def _write_config(self, options: Mapping[str, object]) -> None:
        store = {"url": str(self.destination)}
        told = {"node": "head", "roles": ["head"], "store": store, **options}
        self._config.write_text(yaml.safe_dump(told))

    def prepare(self) -> Sequence[str]:
        command = super().prepare()
        shutil.copytree(self.original, self.destination)
        return command

    def undisturbed(self) -> set[str]:
        """Return the names of all files but tombstones where nobody dies."""
        self.prepare()
        assert not [*self.finish()]
        return self.names()

    def names(self) -> set[str]:
        """Return the names of all files but tombstones, and of what no run owns."""
        names = (entry.name for entry in open_store(str(self.destination)).names(""))
        return {n for n in names if n[0] != "." and "/tombstone-" not in n and "-head-" not in n}


class Consolidating(StoreVictim):
    """The child of a head that makes a model of two nodes' shards, in several files.

    Every other time its successor has other options; then the model is whole, of either options.
    """

    _HEAD: ClassVar[Mapping[str, object]] = {
        "dtype": "fp32",
        "max_shard_size": 30_000,
        "config_from": {"*": str(ROOT / "base")},
    }
    config: ClassVar[Mapping[str, object]] = {"head": _HEAD}
    others: ClassVar[Mapping[str, object]] = {
        "head": {**_HEAD, "dtype": "bf16", "max_shard_size": 20_000}
    }

    def __init__(self, _kind: str, home: Path, _dice: random.Random) -> None:
        super().__init__("posix, consolidate", home)
        store = create_store(str(self.original))
        for node, source in zip(("node0", "node1"), vector(SHARDS).sources, strict=True):
            push_now(source.parent, store, node, "run")
        self._deaths, self._expected = 0, list[Mapping[str, bytes]]()
        self._models: list[Mapping[str, bytes]] = []
        for options in (self.others, self.config):
            self._write_config(options)
            self.prepare()
            wrong = [*super().finish()]
            assert not wrong, wrong
            self._models.append(self._model())
        assert self._models[0] != self._models[1]

    def command(self) -> Sequence[str]:
        _, name, *rest = Job("consolidate", "run", "checkpoint-4").command(str(self._config))
        return [name, "--progress", "json", *rest]

    def finish(self) -> Iterable[str]:
        """Let a successor finish, with other options after every other death."""
        self._expected = self._models[-1:]
        self._deaths += 1
        if len(self._models) == 2 and self._deaths % 2:
            self._expected = self._models
            self._write_config(self.others)
            refused = self._run_again()
            if "another head, with other options" in refused.out + refused.err:
                self._grow_old()
        yield from super().finish()
        self._write_config(self.config)

    def _run_again(self) -> Ended:
        return run([*CKPTSYNC, *self.command()], self.environment)

    def _grow_old(self) -> None:
        """Let the dead head's agreement and files be older than heads wait for each other."""
        for path in self.destination.rglob("*"):
            if path.match("agreement-*") or "consolidated" in path.parts:
                os.utime(path, (path.stat().st_mtime - 3600.0,) * 2)

    def _model(self) -> Mapping[str, bytes]:
        """Return the model's files, without an unfinished one that a death has left."""
        model = self.destination / consolidated_prefix("run", "checkpoint-4")
        files = contents(model) if model.is_dir() else {}
        return {name: data for name, data in files.items() if not name.endswith(".part")}

    def harm(self) -> Iterator[str]:
        """Yield what a model record binds, and is not there so."""
        for state in read_state(open_store(str(self.destination))).locations:
            for file in state.model_record.files if state.model_record else ():
                data = self._model().get(file.path)
                if data is None or digest(data) != file.digest:
                    yield f"{file.path}: a model record binds other bytes"

    def left(self) -> Iterator[str]:
        states = read_state(open_store(str(self.destination))).locations
        if [state.status for state in states] != ["CONSOLIDATED"]:
            yield f"it is {[state.status for state in states]}"
        if self._expected and self._model() not in self._expected:
            yield f"the model is another than without a death: {sorted(self._model())}"


class Removing(StoreVictim):
    """``ckptsync gc`` of three checkpoints that are marked, of which two go."""

    config: ClassVar[Mapping[str, object]] = {
        "retention": {"grace": "0s", "runs": {"run": {"keep_last": 1}}}
    }
    REQUEST = RetentionRequest(lambda run: Rules(keep_last=1) if run == "run" else Rules(), 0.0)

    def __init__(self, _kind: str, home: Path, _dice: random.Random) -> None:
        super().__init__("posix, gc", home)
        store = create_store(str(self.original))
        for n in (1, 2, 3):
            fill(store, f"checkpoint-{n}", BASE // 10**9 + n)
        fill(store, "checkpoint-1", run="other")
        apply_retention(store, self.REQUEST)  # marks
        self._expected: set[str] | None = None
        self._expected = self.undisturbed()

    def command(self) -> Sequence[str]:
        return ["gc", "-c", str(self._config)]

    def finish(self) -> Iterable[str]:
        """Let gc come after the dead one's lease, until nothing is left to do."""
        store = _Later(open_store(str(self.destination)))
        for _ in range(4):
            result = apply_retention(store, self.REQUEST)
            yield from (f"gc failed: {failed}" for failed in result.failed)
        if result.done:
            yield f"gc does not come to an end: {result.done}"
        yield from self.harm()
        yield from self.left()

    def harm(self) -> Iterator[str]:
        """Yield checkpoints that are neither whole nor given up."""
        states = {
            (s.run, s.location): s for s in read_state(open_store(str(self.destination))).locations
        }
        for where in (("run", "checkpoint-3"), ("other", "checkpoint-1")):
            if where not in states or states[where].status != "VERIFIED":
                yield f"{where} was to be kept, and is not VERIFIED"
        for where, state in states.items():
            if state.status not in ("VERIFIED", "RETIRED"):
                yield f"{where} is {state.status}"

    def left(self) -> Iterator[str]:
        names = self.names()
        expected = names if self._expected is None else self._expected
        yield from (f"{name}: is left" for name in sorted(names - expected))
        yield from (f"{name}: is gone" for name in sorted(expected - names))


class _Later(StoreWrapper):
    """The same store, more than a quarter of an hour later by its clock."""

    def names(self, prefix: str) -> Iterator[Entry]:
        for e in self.inner.names(prefix):
            yield Entry(e.name, e.size, e.mtime + LEASE + 1) if "/clocks/" in e.name else e


VICTIMS: Mapping[str, tuple[Callable[[str, Path, random.Random], Victim], Sequence[str]]] = {
    "push": (Pushing, ("posix", "s3", "sftp")),
    "pull": (Pulling, ("posix", "s3")),
    "merge": (Merging, ("posix", "s3")),
    "consolidate": (Consolidating, ("posix",)),
    "gc": (Removing, ("posix",)),
}
"""Name → the class, and the kinds of store that it may use."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run a command to its end."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=dict(environment),
        timeout=PATIENCE,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def _with_times(directory: Path) -> Mapping[str, tuple[bytes, int]]:
    """Return the content and time of every file below, hidden ones too."""
    paths = file_paths(directory).items()
    return {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in paths}
