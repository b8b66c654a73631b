"""``ckptsync demo``: two nodes, a head, a flipped bit and its repair, on this machine.

The nodes and the head are real processes of the service; two trainings are played from files that
trainers have written.  Each step ends when it has been seen in the store, or fails with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import yaml

from ckptsync.catalogue.location_summary import summarize
from ckptsync.catalogue.uncached import StoreState, read_state
from ckptsync.cli import output
from ckptsync.cli.ls import HEADING, list_rows
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
from ckptsync.layouts import registry
from ckptsync.quantities import clean, show_size
from ckptsync.records.location_status import LocationState
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.status.heartbeat import Heartbeat
from ckptsync.status.nodes import read_nodes
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store

T = TypeVar("T")
DETAILS = "It works in a temporary directory and takes about a minute."
RUNS = ("fsdp2", "zero3")
NODES = ("node0", "node1")
CHECKPOINT = "checkpoint-4"
DATA = Path(__file__).parent.parent / "demo_data"
BASE = DATA / "base"  # config and tokenizer of the model: FSDP's shards do not bring them
PATIENCE = 180.0  # seconds for a step
POLL_EVERY = 0.25
PAUSE = 0.05  # seconds between two files of a trainer
END_PATIENCE = 8.0  # seconds that a child has to end after SIGTERM

# Shards of all ranks first, then the file that says that they are there, then small states;
# trainer_state.json is last.
_ORDER = (
    re.compile(r".*\.json|.*\.jinja"),
    re.compile(r".*\.distcp|.*_states\.pt"),
    re.compile(r".*\.metadata|latest"),
    re.compile(r"scheduler\.pt"),
    re.compile(r"rng_state_[0-9]+\.pth"),
    re.compile(r"trainer_state\.json"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dir",
        metavar="DIR",
        help="where to work: an empty or absent directory (default: a new temporary one)",
    )


def run(args: argparse.Namespace) -> int:
    """Play the demo.

    Exit 0 only if every step was observed in the store; whatever is wrong is exit 1.
    """
    directory = working_directory(args.dir)
    store = create_store(str(directory / "store"))
    try:
        with running(directory / "etc", configurations(directory)) as children:
            demo = Demo(directory, store, children, Shown(as_json=args.json))
            demo.play()
    except CkptsyncError as e:
        raise CkptsyncError(
            f"demo: {e}", hint=e.hint or f"read the logs in {directory / 'etc'}"
        ) from e
    models = {run: demo.model(run) for run in RUNS}
    if args.json:
        shown = {run: str(model) for run, model in models.items()}
        output.print_json({"ok": True, "directory": str(directory), "models": shown})
        return 0
    for run, model in models.items():
        size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
        print(f"the model of {run} lies in {model} ({show_size(size)})")
    print(f"everything else, logs too: {directory}\ntry next:")
    parts = [demo.output_dir("zero3", node) / CHECKPOINT for node in NODES]
    merge = ("merge", *parts, directory / "my-model")
    for words in (("inspect", models["fsdp2"]), ("verify", "--store", store.url), merge):
        print(f"  {shlex.join([*program(), *map(str, words)])}")
    return 0


def working_directory(given: str | None) -> Path:
    """Return an empty directory to work in.  Raises ConfigError."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="ckptsync-demo-")).resolve()
    directory = Path(given).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory}: not an empty directory", hint="name one that is empty or absent"
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def program() -> list[str]:
    """Return how a shell calls this program: ``make demo`` installs it outside of PATH."""
    if shutil.which("ckptsync"):
        return ["ckptsync"]
    beside = Path(sys.executable).with_name("ckptsync")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "ckptsync"]


class Shown:
    """Prints the demo: sentences, and rows of the checkpoints' table that changed.

    With ``--json`` an event a line.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: dict[tuple[str, str], Sequence[str]] = {}

    def say(self, text: str) -> None:
        """Print a sentence."""
        print(
            json.dumps(output.as_document({"say": text})) if self._as_json else clean(text),
            flush=True,
        )

    def table(self, found: Sequence[Sequence[str]]) -> None:
        """Print the rows under `HEADING` that are new.

        With ``--json`` the whole table if one is.
        """
        new = [row for row in found if self._last.get((row[0], row[1])) != row]
        self._last = {(row[0], row[1]): row for row in found}
        if new and self._as_json:
            keys = [word.lower() for word in HEADING]
            rows = [dict(zip(keys, row, strict=True)) for row in found]
            print(json.dumps(output.as_document({"table": rows})), flush=True)
        for row in () if self._as_json else new:
            print(output.paint(f"  {output.aligned([row])[0]}"), flush=True)


@dataclass(slots=True)
class Demo:
    """A directory with a store, running children, and where to show what happens."""

    directory: Path
    store: Store
    children: tuple[DemoProcess, ...]
    shown: Shown

    def play(self) -> None:
        """Play all steps.  Raises CkptsyncError where anything is not as it should be."""
        begun, say = time.monotonic(), self.shown.say
        say(
            "two nodes and a head start as processes of their own; they share only the store"
            f" {self.store.url}"
        )
        self._wait_for("nodes and head alive", lambda _: self._alive() == {*NODES, "head"})
        say("two trainings save: FSDP2 and ZeRO-3, each node its own shards on its own disk")
        for run in RUNS:
            for _ in play(script(run, DATA / run, partial(self.output_dir, run))):
                self._read_store()
        self._wait_for(
            "both checkpoints VERIFIED", lambda seen: all(_is_verified(seen, run) for run in RUNS)
        )
        say(
            "both were uploaded, completed, and merged into one model each, and every byte of them"
            " is verified"
        )
        self._damage_and_repair()
        say(f"all of it observed in the store, in {time.monotonic() - begun:.0f} seconds")

    def output_dir(self, run: str, node: str) -> Path:
        """Return a run's output directory on a node."""
        return self.directory / node / "out" / run

    def model(self, run: str) -> Path:
        """Return where the consolidated model of a run lies."""
        return Path(self.store.url) / consolidated_prefix(run, CHECKPOINT).rstrip("/")

    def _damage_and_repair(self) -> None:
        stored = Path(self.store.url) / "fsdp2" / CHECKPOINT
        path, at, tensor = byte_of_a_tensor(stored)
        known = set(_location(self._read_store()).records.reports)
        self.shown.say(f"one bit flips in the store: byte {at} of {path}, inside {tensor}")
        flip(stored / path, at)
        report, finding = self._wait_for(
            "the damage reported", lambda seen: find_damage(_location(seen), known, path)
        )
        if tensor not in finding.tensors:
            found = ", ".join(finding.tensors) or "no tensor"
            raise Corrupt(f"{path}: damage in {tensor} was reported as {found}")
        self.shown.say(
            f"the verifier names {finding.name} (report {report.n}), and which tensors the damage"
            f" overlaps: {', '.join(finding.tensors)}"
        )
        written = [self.output_dir("fsdp2", node) / CHECKPOINT / path for node in NODES]
        before = next(one for one in written if one.exists()).read_bytes()

        def is_repaired(seen: StoreState) -> bool:
            reports = _location(seen).records.reports.values()
            is_read = any(later.n > report.n and later.verdict == "ok" for later in reports)
            return (
                is_read and (stored / path).read_bytes() == before and _is_verified(seen, "fsdp2")
            )

        self._wait_for("the file uploaded again and VERIFIED", is_repaired)
        self.shown.say(
            "the node that still had the bytes uploaded them again; everything is verified once"
            " more"
        )

    def _alive(self) -> set[str]:
        found = [file.content for file in read_nodes(self.store).hearts]
        return {heart.node for heart in found if isinstance(heart, Heartbeat) and not heart.stopped}

    def _read_store(self) -> StoreState:
        seen = read_state(self.store)
        summaries = [summarize(one, seen.mtimes) for one in seen.locations]
        self.shown.table(list_rows(self.store, summaries))
        return seen

    def _wait_for(self, what: str, answer_of: Callable[[StoreState], T | None]) -> T:
        """Look until there is an answer.

        Raises CkptsyncError after `PATIENCE` seconds, or if a child ends.
        """
        until = time.monotonic() + PATIENCE
        while True:
            check(self.children)
            if answer := answer_of(self._read_store()):
                return answer
            if time.monotonic() > until:
                logs = ", ".join(str(child.log) for child in self.children)
                why = f"{what}: not seen within {PATIENCE:.0f} s"
                raise CkptsyncError(why, hint=f"read the logs: {logs}")
            time.sleep(POLL_EVERY)


def _location(seen: StoreState) -> LocationState:
    """Return the location of the checkpoint that is damaged."""
    found = seen.of("fsdp2", CHECKPOINT)
    if found is None:
        raise CkptsyncError(f"fsdp2/{CHECKPOINT}: no longer in the store")
    return found


def _is_verified(seen: StoreState, run: str) -> bool:
    found = seen.of(run, CHECKPOINT)
    nodes = [stored.manifest.node for stored in found.manifests] if found else []
    return found is not None and found.status == "VERIFIED" and nodes == list(NODES)


def byte_of_a_tensor(checkpoint: Path) -> tuple[str, int, str]:
    """Return path, byte and tensor: the middle of the largest stored piece of a tensor."""
    files = DirectoryFiles(str(checkpoint))
    tensors = registry.tensors(files, registry.choose(files, None))
    copies = [(copy, tensor.name) for tensor in tensors for copy in tensor.copies]
    pieces = [(part.extent, name) for copy, name in copies for part in copy.parts]
    extent, name = max(pieces, key=lambda piece: (piece[0].size, piece[0].file))
    return extent.file, extent.start + extent.size // 2, name


def find_damage(
    snapshot: LocationState, known: set[str], path: str
) -> tuple[Report, VerifyFinding] | None:
    """Return the first report of damage in a file that is not ``known``, and its finding."""
    new = [report for name, report in snapshot.records.reports.items() if name not in known]
    for report in sorted(new, key=lambda r: r.n):
        for finding in report.findings if report.verdict == "damaged" else ():
            if finding.name == f"{snapshot.location}/{path}":
                return report, finding
    return None


def configurations(directory: Path) -> dict[str, dict[str, object]]:
    """Return two workers and a head with a verifier, by name, with short periods."""
    found: dict[str, dict[str, object]] = {}
    for node in NODES:
        runs = [{"path": f"{glob.escape(str(directory))}/{node}/out/*"}]
        worker = {"runs": runs, "quiet": "500ms", "unmarked": "1s", "scan_every": "500ms"}
        found[node] = {"roles": ["worker"], "worker": worker}
    found["head"] = {
        "roles": ["head", "verifier"],
        "head": {"every": "500ms", "config_from": {"fsdp2": str(BASE)}},
        "verify": {"level": "parse", "period": "2s", "tick": "500ms"},
    }
    store = str(directory / "store")
    return {name: {"node": name, "store": {"url": store}, **one} for name, one in found.items()}


@dataclass(frozen=True, slots=True)
class DemoProcess:
    """A running service and its log."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running(
    directory: Path, configurations: Mapping[str, dict[str, object]]
) -> Iterator[tuple[DemoProcess, ...]]:
    """Run a service for each configuration until the block ends.

    Configurations and logs lie in ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTSYNC_")}
    children: list[DemoProcess] = []
    try:
        for name, configuration in configurations.items():
            config, log = directory / f"{name}.yaml", directory / f"{name}.log"
            config.write_text(yaml.safe_dump(configuration, sort_keys=False))
            with log.open("wb") as out:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-m", "ckptsync", "run", "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=environment,
                )
            children.append(DemoProcess(name, log, process))
        yield tuple(children)
    finally:
        for child in children:
            child.process.terminate()
        for child in children:
            try:
                child.process.wait(END_PATIENCE)
            except subprocess.TimeoutExpired:  # noqa: PERF203 - each child for itself
                child.process.kill()
                child.process.wait()


def check(children: Sequence[DemoProcess]) -> None:
    """Raise CkptsyncError if a child has ended."""
    for child in children:
        code = child.process.poll()
        if code is not None:
            last = child.log.read_text(errors="replace").strip().rpartition("\n")[2]
            why = f"{child.name} ended with exit code {code}: {last}"
            raise CkptsyncError(why, hint=f"read {child.log}")


def script(run: str, data: Path, output_dir: Callable[[str], Path]) -> list[tuple[Path, Path]]:
    """Return each file of a run, and where a trainer writes it, in the order of writing.

    ``output_dir(node)`` is the run's output directory there.
    """
    found: list[tuple[int, str, str, Path, Path]] = []
    for node in data.iterdir():
        for path in filter(Path.is_file, node.rglob("*")):
            turn = max(i for i, pattern in enumerate(_ORDER) if pattern.fullmatch(path.name))
            target = output_dir(node.name) / path.relative_to(node)
            found.append((turn, path.name, node.name, path, target))
    if not found:
        hint = "the installation is not complete: install ckptsync again"
        raise StoreError(f"{data}: no demo data for {run}", hint=hint)
    return [(source, target) for _, _, _, source, target in sorted(found)]


def play(writes: Iterable[tuple[Path, Path]], pause: float = PAUSE) -> Iterator[Path]:
    """Write one file after the other, and yield where."""
    for source, target in writes:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        yield target
        time.sleep(pause)


def flip(path: Path, at: int) -> None:
    """Flip one bit of one byte in place, as a disk would."""
    path.chmod(path.stat().st_mode | 0o200)
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
