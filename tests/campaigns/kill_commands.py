"""Victims that work on this machine's directories: `ckptsync pull`, `merge` and `resume`.

After each death a checkpoint or model is not there, or whole; what was there before is not lost.
The same command then goes on, and leaves what it leaves where nobody dies, and nothing else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.checkpoint_dirs import ASIDE
from ckptsync.stores.checkpoint_files import MERGING
from ckptsync.stores.contract import read_all
from ckptsync.stores.opening import create_store, open_any
from tests.campaigns.campaign import CKPTSYNC, CLEAN, flags, new_store
from tests.campaigns.killing import PATIENCE, Ended, Victim, unexpected
from tests.support.files_in_memory import contents, file_paths
from tests.support.vector import ROOT, vector
from tests.support.worker_in_process import push_now

LARGE = 700_000  # bytes of a file of which the next try finds blocks again
BASE = 1_700_000_000 * 10**9  # ns
"""Time of the first file of a pulled checkpoint."""


class CommandVictim(Victim):
    """A command that makes something in the directory ``destination``, which is new each time."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.destination, self._home = name, home / "destination", home
        self.environment = {**CLEAN, "XDG_CACHE_HOME": str(home / "cache")}

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


class Pulling(CommandVictim):
    """A checkpoint of DeepSpeed's in a store of a kind, pulled."""

    RUN, CHECKPOINT = "ds", "global_step2"
    mark = ".pull-"  # in the hidden directory's name: nothing is changed before there is one

    def __init__(self, kind: str, home: Path, dice: random.Random) -> None:
        super().__init__(f"{kind}, pull", home)
        self._url, options = new_store(kind, home)
        self.environment = {**self.environment, "CKPTSYNC_STORAGE_OPTIONS": json.dumps(options)}
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
    """A merge into a directory (posix) or a store (s3), which then runs with the words ``again``.

    Into a store, a merge with other options is refused while one is unfinished.
    """

    def __init__(self, kind: str, home: Path, again: Sequence[str] = ()) -> None:
        super().__init__(f"{kind}, merge, then {' '.join(again) or 'the same'}", home)
        self._kind, self._count = kind, 0
        self._top, self._options = new_store(kind, home)
        self.environment = {
            **self.environment,
            "CKPTSYNC_STORAGE_OPTIONS": json.dumps(self._options),
        }
        self.mark = str(self.destination) if kind == "posix" else "PUT /"
        self._first = ("--dtype", "bf16")
        self._again = self._words = tuple(again) or self._first
        self._expected = {}
        for number, words in enumerate(dict.fromkeys((self._first, self._again))):
            model = home / f"expected-{number}"
            assert run([*CKPTSYNC, *self._merge(str(model), words)], self.environment).code == 0
            self._expected[words] = contents(model)

    def _merge(self, destination: str, words: Sequence[str]) -> list[str]:
        size = ["--max-shard-size", "12kB", "--config-from", str(ROOT / "base")]
        sources = [str(path) for path in vector("hf-zero3-2node").sources]
        return ["merge", *sources, destination, *words, *size]

    def prepare(self) -> Sequence[str]:
        self._words, self._count = self._first, self._count + 1
        return super().prepare()

    def command(self) -> Sequence[str]:
        place = str(self.destination) if self._kind == "posix" else f"{self._top}/{self._count}"
        return self._merge(place, self._words)

    def finish(self) -> Iterable[str]:
        if self._model() == self._expected[self._words]:
            return  # whole when it died: the same command would be refused
        is_begun = self._kind == "s3" and bool(self._model())
        self._words = self._again
        if is_begun and self._again != self._first:
            code = run([*CKPTSYNC, *self.command()], self.environment).code
            if code != 2:
                yield f"a merge with other options, into an unfinished one, ended with {code}"
            self._words = self._first
        yield from super().finish()

    def _model(self) -> Mapping[str, bytes]:
        if self._kind == "posix":
            return contents(self.destination) if self.destination.is_dir() else {}
        store = open_any(f"{self._top}/{self._count}", self._options)
        return {entry.name: read_all(store, entry.name) for entry in store.names("")}

    def harm(self) -> Iterator[str]:
        model, possible = self._model(), self._expected.values()
        for name, data in model.items():
            is_record = self._kind == "s3" and name == MERGING
            if not is_record and not any(expected.get(name) == data for expected in possible):
                yield f"{name} is there, and is not whole"
        if self._kind == "posix" and model and model not in possible:
            yield "the model is there, and is not whole"

    def left(self) -> Iterator[str]:
        expected, model = self._expected[self._words], self._model()
        for name in sorted(expected.keys() | model.keys()):
            if expected.get(name) != model.get(name):
                yield f"{name}: not as without a death"


class Resuming(CommandVictim):
    """A `ckptsync resume` that sets a torn checkpoint aside and pulls the newest whole one."""

    RUN, WHOLE, TORN = "run", "checkpoint-4", "checkpoint-8"
    mark = "checkpoint-8"

    def __init__(self, home: Path) -> None:
        super().__init__("resume", home)
        source = vector("hf-ddp").sources[0]
        shutil.copytree(source, home / "out" / self.WHOLE)
        state = home / "out" / self.WHOLE / "trainer_state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": 4}))
        self._url, self._trained = str(home / "store"), home / "trained"
        push_now(home / "out", create_store(self._url), "node0", self.RUN)
        self._whole = contents(home / "out" / self.WHOLE)
        self._torn = {"model.safetensors": b"torn", "optimizer.pt": b"torn, too"}

    def prepare(self) -> Sequence[str]:
        command = super().prepare()
        self._trained.unlink(missing_ok=True)
        torn = self.destination / self.TORN
        torn.mkdir(parents=True)
        for name, data in self._torn.items():
            (torn / name).write_bytes(data)
        return command

    def command(self) -> Sequence[str]:
        training = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        options = flags(store=self._url, run=self.RUN, trust="complete", no_worker=True, nnodes=1)
        words = ["--", sys.executable, "-c", training, str(self._trained), "{checkpoint}"]
        return ["resume", str(self.destination), *options, *words]

    def harm(self) -> Iterator[str]:
        pulled = self.destination / self.WHOLE
        if pulled.exists() and contents(pulled) != self._whole:
            yield f"{self.WHOLE} is there, and is not whole"
        places = [self.destination / self.TORN, *(self.destination / ASIDE).glob("*")]
        if not any(path.is_dir() and contents(path) == self._torn for path in places):
            yield f"{self.TORN} is gone"

    def left(self) -> Iterator[str]:
        if not (self.destination / self.WHOLE).is_dir():
            yield f"{self.WHOLE} was not pulled"
        if (self.destination / self.TORN).exists():
            yield f"{self.TORN} was not set aside"
        if self._trained.read_text() != str(self.destination / self.WHOLE):
            yield f"the training resumed from {self._trained.read_text()!r}"


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
