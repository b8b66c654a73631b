"""``ckptsync demo``: two nodes, a head, a flipped bit and its repair, on this machine.

A user should see the service work before setting it up.  The nodes and the head are real processes
of the service; two trainings are played by copying files that trainers have written.  Each step
ends when its result is in the store, or fails with an error.
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
import zipfile
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
END_PATIENCE = 8.0  # seconds from a child's SIGTERM to its SIGKILL

# the order in which a trainer writes files: shards of all ranks, the file that lists them, small
# states, and at last trainer_state.json
_ORDER = (
    re.compile(r".*\.json|.*\.jinja"),
    re.compile(r".*\.distcp|.*_states\.pt"),
    re.compile(r".*\.metadata|latest"),
    re.compile(r"scheduler\.pt"),
    re.compile(r"rng_state_[0-9]+\.pth"),
    re.compile(r"trainer_state\.json"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    command.add_argument(
        "--dir",
        metavar="DIR",
        help="where to work: an empty or absent directory (default: a new temporary one)",
    )


def run(args: argparse.Namespace) -> int:
    """Play the demo, and print where its models are; return 0.  All files stay.

    Any subclass of CkptsyncError that a step raises becomes a CkptsyncError (exit code 1), with a
    hint at the logs if it has none.  Raises ConfigError for a directory that is not empty.
    """
    directory = working_directory(args.dir)
    store = create_store(str(directory / "store"))
    try:
        with running(directory / "etc", configurations(directory)) as children:
            demo = Demo(directory, store, children, DemoPrinter(as_json=args.json))
            demo.play()
    except CkptsyncError as e:
        raise CkptsyncError(
            f"demo: {e}", hint=e.hint or f"read the logs in {directory / 'etc'}"
        ) from e
    models = {run: demo.model(run) for run in RUNS}
    if args.json:
        model_paths = {run: str(model) for run, model in models.items()}
        output.print_json({"ok": True, "directory": str(directory), "models": model_paths})
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


def working_directory(path: str | None) -> Path:
    """Return the directory to work in, made if need be: ``path``, or a new temporary one.

    Links in it are resolved.  Raises ConfigError if it is not an empty directory.
    """
    if path is None:
        return Path(tempfile.mkdtemp(prefix="ckptsync-demo-")).resolve()
    directory = Path(path).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory}: not an empty directory", hint="name one that is empty or absent"
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def program() -> list[str]:
    """Return the words that call this program in a shell: the zipapp, or ``ckptsync`` if in PATH.

    Else the ``ckptsync`` beside the interpreter, or the interpreter with ``-m``.
    """
    if zipfile.is_zipfile(sys.argv[0]):  # a zipapp
        return [str(Path(sys.argv[0]).absolute())]
    if shutil.which("ckptsync"):
        return ["ckptsync"]
    beside = Path(sys.executable).with_name("ckptsync")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "ckptsync"]


class DemoPrinter:
    """Prints sentences, and the rows of the table of checkpoints that have changed.

    With ``--json`` it prints a JSON document on each line.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: dict[tuple[str, str], Sequence[str]] = {}

    def say(self, text: str) -> None:
        """Print a cleaned sentence, or its JSON document, at once."""
        print(
            json.dumps(output.as_document({"say": text})) if self._as_json else clean(text),
            flush=True,
        )

    def table(self, table: Sequence[Sequence[str]]) -> None:
        """Print the rows under `HEADING` that are new or differ from those of the last call.

        With ``--json`` print the whole table if any row does.  Remember the table for the next
        call.
        """
        changed = [row for row in table if self._last.get((row[0], row[1])) != row]
        self._last = {(row[0], row[1]): row for row in table}
        if changed and self._as_json:
            keys = [word.lower() for word in HEADING]
            rows = [dict(zip(keys, row, strict=True)) for row in table]
            print(json.dumps(output.as_document({"table": rows})), flush=True)
        for row in () if self._as_json else changed:
            print(output.paint(f"  {output.aligned([row])[0]}"), flush=True)


@dataclass(slots=True)
class Demo:
    """Plays the steps of the demo, and waits for the result of each in the store."""

    directory: Path
    store: Store
    children: tuple[DemoProcess, ...]
    printer: DemoPrinter

    def play(self) -> None:
        """Play all steps, and print them; block until the result of each is in the store.

        Raises CkptsyncError if one does not appear within `PATIENCE` seconds, a child ends, or the
        store fails.
        """
        start, say = time.monotonic(), self.printer.say
        say(
            "two nodes and a head start as processes of their own; they share only the store"
            f" {self.store.url}"
        )
        self._wait_for("nodes and head alive", lambda _: self._list_alive() == {*NODES, "head"})
        say("two trainings save: FSDP2 and ZeRO-3, each node its own shards on its own disk")
        for run in RUNS:
            for _ in play(script(run, DATA / run, partial(self.output_dir, run))):
                self._read_store()
        self._wait_for(
            "both checkpoints VERIFIED", lambda state: all(_is_verified(state, run) for run in RUNS)
        )
        say(
            "both were uploaded, completed, and merged into one model each, and every byte of them"
            " is verified"
        )
        self._damage_and_repair()
        say(f"all of it observed in the store, in {time.monotonic() - start:.0f} seconds")

    def output_dir(self, run: str, node: str) -> Path:
        """Return a run's output directory on a node."""
        return self.directory / node / "out" / run

    def model(self, run: str) -> Path:
        """Return where the consolidated model of a run lies."""
        return Path(self.store.url) / consolidated_prefix(run, CHECKPOINT).rstrip("/")

    def _damage_and_repair(self) -> None:
        """Flip a bit in the store, and wait for its report, its repair and the verification.

        Raise CkptsyncError if one does not come, Corrupt if the report names another tensor.
        """
        stored = Path(self.store.url) / "fsdp2" / CHECKPOINT
        path, position, tensor = byte_of_a_tensor(stored)
        known_reports = set(_damaged_location(self._read_store()).records.reports)
        self.printer.say(f"one bit flips in the store: byte {position} of {path}, inside {tensor}")
        flip(stored / path, position)
        report, finding = self._wait_for(
            "the damage reported",
            lambda state: find_damage(_damaged_location(state), known_reports, path),
        )
        if tensor not in finding.tensors:
            reported = ", ".join(finding.tensors) or "no tensor"
            raise Corrupt(f"{path}: damage in {tensor} was reported as {reported}")
        self.printer.say(
            f"the verifier names {finding.name} (report {report.n}), and which tensors the damage"
            f" overlaps: {', '.join(finding.tensors)}"
        )
        written = [self.output_dir("fsdp2", node) / CHECKPOINT / path for node in NODES]
        original = next(file for file in written if file.exists()).read_bytes()

        def is_repaired(state: StoreState) -> bool:
            """Return whether a later report is ok, the file the original, and all VERIFIED."""
            reports = _damaged_location(state).records.reports.values()
            is_read = any(later.n > report.n and later.verdict == "ok" for later in reports)
            return (
                is_read
                and (stored / path).read_bytes() == original
                and _is_verified(state, "fsdp2")
            )

        self._wait_for("the file uploaded again and VERIFIED", is_repaired)
        self.printer.say(
            "the node that still had the bytes uploaded them again; everything is verified once"
            " more"
        )

    def _list_alive(self) -> set[str]:
        """Return the names of nodes whose heartbeat, however old, does not say that they stopped.

        Unreadable heartbeats are passed over.  Raises StoreError.
        """
        hearts = [file.content for file in read_nodes(self.store).hearts]
        return {h.node for h in hearts if isinstance(h, Heartbeat) and not h.stopped}

    def _read_store(self) -> StoreState:
        """Read the store, print the rows of its table that have changed, and return its state.

        Raises StoreError.
        """
        state = read_state(self.store)
        summaries = [summarize(location, state.mtimes) for location in state.locations]
        self.printer.table(list_rows(self.store, summaries))
        return state

    def _wait_for(self, step: str, answer_of: Callable[[StoreState], T | None]) -> T:
        """Read the store every `POLL_EVERY` seconds until ``answer_of`` of it is true; return that.

        ``step`` names the result in errors.  Raises CkptsyncError after `PATIENCE` seconds, or if
        a child has ended; StoreError at once.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            check_running(self.children)
            if answer := answer_of(self._read_store()):
                return answer
            if time.monotonic() > deadline:
                logs = ", ".join(str(child.log) for child in self.children)
                why = f"{step}: not seen within {PATIENCE:.0f} s"
                raise CkptsyncError(why, hint=f"read the logs: {logs}")
            time.sleep(POLL_EVERY)


def _damaged_location(state: StoreState) -> LocationState:
    """Return the location that the demo damages.  Raises CkptsyncError if it is gone."""
    location = state.of("fsdp2", CHECKPOINT)
    if location is None:
        raise CkptsyncError(f"fsdp2/{CHECKPOINT}: no longer in the store")
    return location


def _is_verified(state: StoreState, run: str) -> bool:
    """Return whether a run's checkpoint is VERIFIED and has the files of both nodes."""
    location = state.of(run, CHECKPOINT)
    nodes = [stored.manifest.node for stored in location.manifests] if location else []
    return location is not None and location.status == "VERIFIED" and nodes == list(NODES)


def byte_of_a_tensor(checkpoint: Path) -> tuple[str, int, str]:
    """Return file, byte position and tensor of the middle of the largest piece of a tensor."""
    files = DirectoryFiles(str(checkpoint))
    tensors = registry.tensors(files, registry.choose(files, None))
    copies = [(copy, tensor.name) for tensor in tensors for copy in tensor.copies]
    pieces = [(part.extent, name) for copy, name in copies for part in copy.parts]
    extent, name = max(pieces, key=lambda piece: (piece[0].size, piece[0].file))
    return extent.file, extent.start + extent.size // 2, name


def find_damage(
    location: LocationState, known_reports: set[str], path: str
) -> tuple[Report, VerifyFinding] | None:
    """Return the new damage report with the least number that names a file, with the finding.

    None if there is none.  ``known_reports``: the names of reports that are not new.
    """
    new = [report for name, report in location.records.reports.items() if name not in known_reports]
    for report in sorted(new, key=lambda r: r.n):
        for finding in report.findings if report.verdict == "damaged" else ():
            if finding.name == f"{location.location}/{path}":
                return report, finding
    return None


def configurations(directory: Path) -> dict[str, dict[str, object]]:
    """Return the configurations of two workers and a head with a verifier, by name.

    Periods are short, so that each step takes seconds.
    """
    sections: dict[str, dict[str, object]] = {}
    for node in NODES:
        runs = [{"path": f"{glob.escape(str(directory))}/{node}/out/*"}]
        worker = {"runs": runs, "quiet": "500ms", "unmarked": "1s", "scan_every": "500ms"}
        sections[node] = {"roles": ["worker"], "worker": worker}
    sections["head"] = {
        "roles": ["head", "verifier"],
        "head": {"every": "500ms", "config_from": {"fsdp2": str(BASE)}},
        "verify": {"level": "parse", "period": "2s", "tick": "500ms"},
    }
    store = str(directory / "store")
    return {
        name: {"node": name, "store": {"url": store}, **section}
        for name, section in sections.items()
    }


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
    """Run a service for each configuration within the block, and give the processes.

    Configurations and logs are written to ``directory``; ``CKPTSYNC_*`` variables are not passed
    on. At the end of the block, also after an error, all get SIGTERM.  Each is then waited for, and
    gets SIGKILL after `END_PATIENCE` seconds.
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


def check_running(children: Sequence[DemoProcess]) -> None:
    """Raise CkptsyncError, with the last line of its log, if a child ended, even with code 0."""
    for child in children:
        code = child.process.poll()
        if code is not None:
            last = child.log.read_text(errors="replace").strip().rpartition("\n")[2]
            why = f"{child.name} ended with exit code {code}: {last}"
            raise CkptsyncError(why, hint=f"read {child.log}")


def script(run: str, data: Path, output_dir: Callable[[str], Path]) -> list[tuple[Path, Path]]:
    """Return each file below ``data`` and the path to write it to, in a trainer's order of writing.

    ``data`` has a directory for each node; ``output_dir(node)`` returns the run's output directory
    there.  ``run`` is for the error.  Raises StoreError without files, OSError without ``data``.
    """
    writes: list[tuple[int, str, str, Path, Path]] = []
    for node in data.iterdir():
        for path in filter(Path.is_file, node.rglob("*")):
            order = max(i for i, pattern in enumerate(_ORDER) if pattern.fullmatch(path.name))
            target = output_dir(node.name) / path.relative_to(node)
            writes.append((order, path.name, node.name, path, target))
    if not writes:
        hint = "the installation is not complete: install ckptsync again"
        raise StoreError(f"{data}: no demo data for {run}", hint=hint)
    return [(source, target) for _, _, _, source, target in sorted(writes)]


def play(writes: Iterable[tuple[Path, Path]], pause: float = PAUSE) -> Iterator[Path]:
    """Write one file after the other, and yield each path; sleep ``pause`` seconds after each.

    Lazy: nothing is written until the next path is asked for.
    """
    for source, target in writes:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        yield target
        time.sleep(pause)


def flip(path: Path, position: int) -> None:
    """Flip one bit of the byte at ``position`` in place; make the file writable first."""
    path.chmod(path.stat().st_mode | 0o200)
    with path.open("r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 1]))
