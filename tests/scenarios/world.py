"""What scenarios are told in: nodes that train, commands that a user types, services that run and
are killed.

Words of the product's interface (statuses, keys of its JSON) stand here and in the scenarios alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ckptsync.cli.main import main
from tests.scenarios.stores import Store
from tests.support.exhaustive import ALL

VECTORS = Path(__file__).parent.parent / "vectors"
BASE = VECTORS / "base"
COMMAND = shlex.split(os.environ.get("SCENARIOS_COMMAND", "")) or [sys.executable, "-m", "ckptsync"]
PATIENCE = 600.0  # seconds: for what happens within one or two on a machine with nothing else to do
ASK_AGAIN = 5.0  # seconds after which `ls` is asked once more although no record has come or gone
RECORDS = {"CONSOLIDATED": "model-", "VERIFIED": "report-", "DAMAGED": "report-"}
"""The records without which a location does not have a status."""

Bits = Mapping[str, tuple[str, tuple[int, ...], bytes]]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Mapping[str, Any]:
        found = json.loads(self.err.splitlines()[-1])
        assert isinstance(found, dict)
        return found


class World:
    """One store, the nodes that send to it, and the commands that a user types."""

    def __init__(self, home: Path, store: Store) -> None:
        self.home, self.store = home, store
        self._services: list[Service] = []
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CKPTSYNC_", "AWS_"))
        }
        self.environment = {
            **clean,
            **store.environment,
            "XDG_CACHE_HOME": str(home / "cache"),
            "HOME": str(home),
        }

    # commands

    def run(
        self,
        *words: object,
        code: int = 0,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Done:
        """A command to its end; its exit code must be `code`."""
        done = self.finish(*words, environment=environment, cwd=cwd)
        assert done.code == code, (
            f"{words}: exit code {done.code}, not {code}\n{done.out}\n{done.err}"
        )
        return done

    def finish(
        self,
        *words: object,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Done:
        """A command to its end, whatever its exit code.

        One with an environment of its own is a process of its own.
        """
        if environment is None:
            done = run_command(words, self.environment, cwd or self.home)
        else:
            done = self.start(*words, environment=environment, cwd=cwd).end()
        assert "Traceback" not in done.err, done.err
        return done

    def at_store(self, *words: object, **more: Any) -> Done:
        return self.run(*words, "--store", self.store.url, **more)

    def start(
        self, *words: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Command:
        return Command(
            [*COMMAND, *map(str, words)],
            {**self.environment, **(environment or {})},
            cwd or self.home,
        )

    def push(self, path: Path, *words: object, node: str = "node0", code: int = 0) -> Done:
        """As a node that has no worker sends a checkpoint."""
        return self.at_store("push", path, "--node", node, *words, code=code)

    def push_save(self, run: str, vector: str, step: int = 4, *, seed: int = 0) -> dict[str, bytes]:
        """A save of one node or of two, each of which sends its part by hand when it has written
        it; its files.
        """
        sent: dict[str, bytes] = {}
        for node in nodes_of(vector):
            part = self.save(run, step, vector, node, seed=seed)
            self.push(part, node=node)
            sent |= files_below(part)
        return sent

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Put the files of another store into this one, the records last."""
        for name in sorted(files, key=lambda name: "/.ckptsync/" in name):
            self.store.write(name, files[name])

    def ls(self) -> dict[str, Row]:
        """`run/location` -> what `ls` says of it; nothing of a store that nobody has begun."""
        if ".ckptsync/store.json" not in self.store.names():
            return {}
        return {
            f"{row['run']}/{row['location']}": row
            for row in self.at_store("ls", "--json").json["locations"]
        }

    def statuses(self) -> dict[str, str]:
        return {name: row["status"] for name, row in self.ls().items()}

    def wait(self, location: str, status: str) -> None:
        run, _, name = location.partition("/")
        record = f"{run}/.ckptsync/{name}/{RECORDS[status]}" if status in RECORDS else ""
        self.until_told(
            lambda: self.statuses().get(location) == status, f"{location} to be {status}", record
        )

    def until_statuses(self, are_so: Callable[[dict[str, str]], bool], what: str) -> None:
        self.until_told(lambda: are_so(self.statuses()), what)

    def until_told(self, is_so: Callable[[], bool], what: str, record: str = "") -> None:
        """Until a command says so.

        A command is a whole process: it is asked where a record has come or gone whose name begins
        with `record`, and every few seconds.
        """
        seen: list[str] = []
        asked = time.monotonic() if record else 0.0

        def is_told() -> bool:
            nonlocal seen, asked
            records = [name for name in self.records() if name.startswith(record)]
            if records == seen and time.monotonic() - asked < ASK_AGAIN:
                return False
            seen, asked = records, time.monotonic()
            return is_so()

        self.until(is_told, what)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Until something is so; else the scenario fails, and shows what the services said."""
        end = time.monotonic() + PATIENCE
        while not _is_now(is_so):
            if time.monotonic() > end:
                said = "\n".join(f"--- {s.name}\n{s.text()[-3000:]}" for s in self._services)
                raise AssertionError(
                    f"waited {PATIENCE:.0f} s for {what}\n{self.store.names()}\n{said}"
                )
            time.sleep(0.1)

    def until_stored(self, name: str, data: bytes) -> None:
        self.until(lambda: self.store.read(name) == data, f"{name} with the right bytes")

    def let_workers_look(self, *nodes: str) -> None:
        """Until the worker of each of these nodes has looked twice at all that was there: it has
        stored a save that came later, and another.
        """
        for step in (1, 2):
            for node in nodes:
                write_save(self.output(f"look-{node}", node) / f"checkpoint-{step}", "hf-ddp")
            for node in nodes:
                stored = f"look-{node}/.ckptsync/checkpoint-{step}/manifest-"
                self.until(
                    lambda stored=stored: any(  # type: ignore[misc]
                        name.startswith(stored) for name in self.store.names()
                    ),
                    f"{node} to look",
                )

    def records(self) -> list[str]:
        return [
            name for name in self.store.names() if "/.ckptsync/" in name and "/sending/" not in name
        ]

    def verify(self, *words: object, code: int = 0) -> Done:
        """The store, read by hand."""
        return self.at_store("verify", *words, "--json", code=code)

    def model(self, location: str) -> Bits:
        """The consolidated model of `run/location`, tensor by tensor, out of the store."""
        run, _, rest = location.partition("/")
        prefix = f"{run}/consolidated/{rest}/"
        names = [
            n for n in self.store.names() if n.startswith(prefix) and n.endswith(".safetensors")
        ]
        assert names, f"no model of {location}"
        return {k: v for name in names for k, v in tensors(self.store.read(name)).items()}

    def stored(self, run: str, location: str) -> dict[str, bytes]:
        """The trainer's files of a location, by their names in the checkpoint."""
        prefix = f"{run}/{location}/"
        return {
            n.removeprefix(prefix): self.store.read(n)
            for n in self.store.names()
            if n.startswith(prefix)
        }

    # services

    def worker(self, node: str = "node0", **more: Any) -> Service:
        worker = {
            "quiet": "500ms",
            "unmarked": "1s",
            "scan_every": "1s",
            "runs": [{"path": f"{self.home}/{node}/out/*"}],
        }
        return self.service(node, ["worker"], {"worker": worker | more.pop("worker", {}), **more})

    def head(self, name: str = "head", **more: Any) -> Service:
        head = {"every": "1s", "config_from": {"*": str(BASE)}}
        keys = {
            "head": head | more.pop("head", {}),
            "verify": {"level": "parse", "tick": "1s"} | more.pop("verify", {}),
        }
        return self.service(name, ["head", "verifier"], keys | more)

    def service(
        self, node: str, roles: Sequence[str], keys: Mapping[str, Any], *, starts: bool = True
    ) -> Service:
        found = Service(
            self,
            node,
            {
                "node": node,
                "roles": list(roles),
                "store": {"url": self.store.url},
                "log": {"format": "json"},
                **keys,
            },
        )
        self._services.append(found)
        if starts:
            found.start()
        return found

    def close(self) -> None:
        """Nothing of ours goes on running."""
        for service in self._services:
            service.kill()

    # trainings

    def output(self, run: str, node: str = "node0") -> Path:
        return self.home / node / "out" / run

    def save(
        self, run: str, step: int = 4, vector: str = "hf-ddp", node: str = "node0", **more: Any
    ) -> Path:
        """Write a node's part of one save as its trainer does, file after file."""
        return write_save(self.output(run, node) / f"checkpoint-{step}", vector, node, **more)


def run_command(words: Sequence[object], environment: Mapping[str, str], cwd: Path) -> Done:
    """What a command prints, and its exit code.

    It runs in this process, since most of a command's time is the start of its own; `make
    exhaustive` and SCENARIOS_COMMAND start one.
    """
    texts = [str(word) for word in words]
    if ALL or "SCENARIOS_COMMAND" in os.environ:
        return Command([*COMMAND, *texts], environment, cwd).end()
    printed = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(stream, "utf-8", write_through=True) for stream in printed)
    before, here, handlers = dict(os.environ), Path.cwd(), logging.root.handlers[:]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    logging.root.handlers.clear()  # the command logs to its stderr
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(texts)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        logging.root.handlers[:] = handlers
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
    return Done(code, *(stream.getvalue().decode() for stream in printed))


class Command:
    """A command that runs."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            words,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, patience: float = PATIENCE) -> Done:
        try:
            out, err = self._process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = self._process.communicate()
            raise AssertionError(
                f"{self._process.args!r} did not end within {patience:.0f} s\n{out}\n{err}"
            ) from None
        return Done(self._process.returncode, out, err)

    def kill(self) -> Done:
        self._process.kill()
        return self.end()

    def told(self, number: int) -> Done:
        self._process.send_signal(number)
        return self.end()

    def is_running(self) -> bool:
        return self._process.poll() is None


class Service:
    """`ckptsync run`, started, killed and started again."""

    def __init__(self, world: World, name: str, configuration: Mapping[str, Any]) -> None:
        self.name, self._world = name, world
        self.config, self._log = world.home / f"{name}.yaml", world.home / f"{name}.log"
        self.configure(configuration)
        self._process: subprocess.Popen[bytes] | None = None
        self._before = 0

    def configure(self, configuration: Mapping[str, Any]) -> None:
        self.configuration = dict(configuration)
        self.config.write_text(yaml.safe_dump(self.configuration))

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """In a process group of its own, so that a kill takes its children, too."""
        self._before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, "run", "-c", str(self.config)],
                env={**self._world.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def lines(self, **wanted: str) -> list[Mapping[str, Any]]:
        """Lines of its log since its last start that have these keys with these values, such as
        `phase="sent"`.
        """
        said = self._log.read_bytes()[self._before :].decode(errors="replace")
        found = [
            json.loads(line)
            for line in said.splitlines()
            if line.startswith("{") and line.endswith("}")
        ]
        return [
            line for line in found if all(line.get(key) == value for key, value in wanted.items())
        ]

    def wait(self, count: int = 1, **wanted: str) -> Mapping[str, Any]:
        self._world.until(
            lambda: len(self.lines(**wanted)) >= count, f"{self.name} to say {wanted}"
        )
        return self.lines(**wanted)[count - 1]

    def signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ended()

    def ended(self, patience: float = PATIENCE) -> int:
        assert self._process
        return self._process.wait(patience)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


# what trainers write


def write_save(
    target: Path,
    vector: str,
    node: str = "node0",
    *,
    seed: int = 0,
    ballast: int = 0,
    without: str = "",
    pause: float = 0.0,
) -> Path:
    """A checkpoint as its trainer writes it: shards, then what describes them, then random states,
    then the trainer's state.

    `seed`: other weights of the same sizes (of safetensors), another history; `ballast`: bytes of a
    further file, so that sending takes a while; `without`: a file that is left out; `pause`:
    seconds between files.
    """
    source = _source(vector, node)
    names = sorted(
        (p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()), key=_turn
    )
    for name in (n for n in names if n != without):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_changed(name, (source / name).read_bytes(), _step(target), seed))
        if ballast and name == names[0]:
            (target / f"extra_{node}.distcp").write_bytes(random.Random(seed).randbytes(ballast))
        time.sleep(pause)
    return target


def reference(vector: str) -> Bits:
    """The model that the framework itself made of the vector."""
    told = json.loads((VECTORS / vector / "vector.json").read_text())
    return tensors((VECTORS / vector / told["auto"]).read_bytes())


def written(vector: str, at: Path, step: int = 4) -> dict[str, bytes]:
    """Every file of a save, from all of its nodes; `at` is a directory for them."""
    parts = [
        write_save(at / node / f"checkpoint-{step}", vector, node) for node in nodes_of(vector)
    ]
    return {name: data for part in parts for name, data in files_below(part).items()}


def nodes_of(vector: str) -> list[str]:
    """`node0` and `node1` for a save of two nodes."""
    return [
        f"node{i}"
        for i in range(len(json.loads((VECTORS / vector / "vector.json").read_text())["sources"]))
    ]


def tensors(data: bytes) -> Bits:
    """Every tensor of a safetensors file, read in the plainest way there is."""
    base = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:base]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], tuple(entry["shape"]), data[base + start : base + end])
    return found


def flipped(data: bytes, at: float = 0.5) -> bytes:
    """With one bit turned over."""
    location = min(int(len(data) * at), len(data) - 1)
    return data[:location] + bytes([data[location] ^ 16]) + data[location + 1 :]


def _is_now(is_so: Callable[[], bool]) -> bool:
    """Whether it is so; a file that is being replaced is not there for a moment."""
    try:
        return is_so()
    except FileNotFoundError:
        return False


def files_below(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def dated(path: Path, at: float) -> Path:
    """As if all files of a checkpoint had been written at once, at a time in seconds."""
    for file in (p for p in path.rglob("*") if p.is_file()):
        os.utime(file, (at, at))
    return path


def _source(vector: str, node: str) -> Path:
    told = json.loads((VECTORS / vector / "vector.json").read_text())
    return (
        VECTORS
        / vector
        / str(
            told["sources"][int(node.removeprefix("node") or 0) if len(told["sources"]) > 1 else 0]
        )
    )


def _turn(name: str) -> tuple[int, str]:
    base = name.rpartition("/")[2]
    if base == "trainer_state.json":
        return 4, name
    if base.startswith(("rng_state", "random_states")):
        return 3, name
    if base in (".metadata", "latest") or base.endswith(".index.json"):
        return 1, name
    return (0 if name.endswith((".distcp", ".safetensors", ".bin", "_states.pt")) else 2), name


def _step(target: Path) -> int | None:
    number = target.name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def _changed(name: str, data: bytes, step: int | None, seed: int) -> bytes:
    if name == "trainer_state.json":
        told = json.loads(data)
        told["log_history"] = [*told.get("log_history", ()), {"step": step, "seed": seed}]
        return json.dumps(told | ({} if step is None else {"global_step": step})).encode()
    if seed and name.endswith(".safetensors"):
        return flipped(data, 0.9 - seed / 1000)
    return data
