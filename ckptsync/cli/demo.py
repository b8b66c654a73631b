"""``ckptsync demo``: two nodes, a head, a flipped bit and its repair, on this machine.

Each step ends when it has been seen in the store, or fails with an error.
"""

from __future__ import annotations

import argparse
import glob
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckptsync.catalogue.fresh import Fresh, fresh
from ckptsync.catalogue.shortened import summary
from ckptsync.cli import locations
from ckptsync.cli.demo_nodes import BASE, DATA, Child, check, flip, play, running, script
from ckptsync.cli.demo_view import View, view
from ckptsync.cli.output import print_json
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt
from ckptsync.fleet import heartbeat
from ckptsync.fleet.heartbeat import Heartbeat
from ckptsync.layouts import table
from ckptsync.merge.local import merge_local
from ckptsync.merge.plan import Options
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.report import Finding, Report
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.stores.tree import LocalFiles
from ckptsync.units import show_size

DETAILS = "It works in a temporary directory and takes about a minute."


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument("--dir", metavar="DIR", help="where to work: an empty or absent directory (default: a new temporary one)")


def run(args: argparse.Namespace) -> int:
    """Exit 0 only if everything was really observed in the store; what is not as it should be is exit 1, whatever its kind."""
    directory = stage(args.dir)
    store = create_store(str(directory / "store"))
    try:
        with view(as_json=args.json) as shown, running(directory / "etc", configurations(directory)) as children:
            story = Story(directory, store, children, shown)
            story.tell()
    except CkptsyncError as e:
        raise CkptsyncError(f"demo: {e}", hint=e.hint or f"read the logs in {directory / 'etc'}") from e
    if args.json:
        print_json({"ok": True, "directory": str(directory), "models": {run: str(story.model(run)) for run in RUNS}})
    else:
        print("\n".join(ending(story)))
    return 0


def stage(wanted: str | None) -> Path:
    """An empty directory to work in; raises ConfigError."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="ckptsync-demo-")).resolve()
    directory = Path(wanted).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: not an empty directory", hint="name one that is empty or absent")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


T = TypeVar("T")
RUNS = ("fsdp2", "zero3")
NODES = ("node0", "node1")
CHECKPOINT = "checkpoint-4"
PATIENCE = 60.0  # seconds for a step
LOOK_EVERY = 0.25


def configurations(directory: Path) -> dict[str, dict[str, object]]:
    """Two workers and a head with a verifier, with periods short enough for a story."""
    store = {"url": str(directory / "store")}
    worker = {"quiet": "500ms", "unmarked": "1s", "scan_every": "500ms"}
    nodes: dict[str, dict[str, object]] = {
        node: {
            "node": node,
            "roles": ["worker"],
            "store": dict(store),
            "worker": {"runs": [{"path": f"{glob.escape(str(directory))}/{node}/out/*"}], **worker},
        }
        for node in NODES
    }
    head: dict[str, object] = {
        "node": "head",
        "roles": ["head", "verifier"],
        "store": dict(store),
        "head": {"every": "500ms", "config_from": {"fsdp2": str(BASE)}},
        "verify": {"level": "parse", "period": "2s", "tick": "500ms"},
    }
    return {**nodes, "head": head}


@dataclass(slots=True)
class Story:
    """The stage: a directory, a store, running children, a view."""

    directory: Path
    store: Store
    children: tuple[Child, ...]
    view: View

    def tell(self) -> None:
        """All of it.  Raises where anything is not as it should be."""
        begun = time.monotonic()
        self._start()
        self._train()
        self._arrive()
        self._damage_and_repair()
        self._compare()
        self.view.say(f"all of it observed in the store, in {time.monotonic() - begun:.0f} seconds")

    def output(self, run: str) -> Callable[[str], Path]:
        """A run's output directory on a node."""
        return lambda node: self.directory / node / "out" / run

    def _start(self) -> None:
        self.view.say(f"two nodes and a head start as processes of their own; they share nothing but the store {self.store.url}")
        self._see("nodes and head alive", lambda _: self._alive() or None)

    def _alive(self) -> bool:
        hearts = [heart for _, heart in heartbeat.listed(self.store) if isinstance(heart, Heartbeat) and not heart.stopped]
        return {heart.node for heart in hearts} == {*NODES, "head"}

    def _train(self) -> None:
        self.view.say("two trainings save: FSDP2 and ZeRO-3, each node its own shards on its own disk")
        for run in RUNS:
            for _ in play(script(run, DATA / run, self.output(run))):
                self._look()

    def _arrive(self) -> None:
        self._see("both checkpoints VERIFIED", lambda c: all(self._is_verified(c, run) for run in RUNS) or None)
        self.view.say("both arrived, were complete, were consolidated into one model each, and every byte of them is proven")

    def _damage_and_repair(self) -> None:
        before = self._snapshot(self._look(), "fsdp2")
        path, at, tensor = a_byte_of_a_tensor(Path(self.store.url) / "fsdp2" / CHECKPOINT)
        known = set(before.records.reports)
        self.view.say(f"one bit flips in the store: byte {at} of {path}, inside {tensor}")
        flip(Path(self.store.url) / "fsdp2" / CHECKPOINT / path, at)
        report, finding = self._see("the damage reported", lambda c: damage(self._snapshot(c, "fsdp2"), known, path))
        if tensor not in finding.tensors:
            raise Corrupt(f"{path}: damage in {tensor} was reported as {', '.join(finding.tensors) or 'no tensor'}")
        self.view.say(
            f"the verifier names {finding.name} (report {report.n}), and what the damage overlaps: {', '.join(finding.tensors)}"
        )
        self._see("the file sent again and VERIFIED", lambda c: self._is_repaired(c, path, report) or None)
        self.view.say("the node that still had the bytes has sent them again; everything is verified once more")

    def _is_verified(self, catalogue: Fresh, run: str) -> bool:
        found = [s for s in catalogue.locations if (s.run, s.location) == (run, CHECKPOINT)]
        return bool(found) and found[0].status == "VERIFIED" and [k.manifest.node for k in found[0].manifests] == list(NODES)

    def _is_repaired(self, catalogue: Fresh, path: str, damaged: Report) -> bool:
        after = [r for r in self._snapshot(catalogue, "fsdp2").records.reports.values() if r.n > damaged.n and r.verdict == "ok"]
        return bool(after) and self._is_verified(catalogue, "fsdp2") and self._stored("fsdp2", path) == self._written("fsdp2", path)

    def _stored(self, run: str, path: str) -> bytes:
        return (Path(self.store.url) / run / CHECKPOINT / path).read_bytes()

    def _written(self, run: str, path: str) -> bytes:
        owners = [self.output(run)(node) / CHECKPOINT / path for node in NODES]
        return next(owner for owner in owners if owner.exists()).read_bytes()

    def _compare(self) -> None:
        files = 0
        for run in RUNS:
            for path in self._paths(run):
                if self._stored(run, path) != self._written(run, path):
                    raise Corrupt(f"{run}/{CHECKPOINT}/{path}: the store and the node differ")
                files += 1
            self._compare_model(run)
        self.view.say(
            f"compared: {files} stored files equal the nodes' own, and both models equal a merge of the nodes' directories, byte by byte"
        )

    def _paths(self, run: str) -> Iterator[str]:
        for node in NODES:
            yield from LocalFiles(str(self.output(run)(node) / CHECKPOINT)).sizes()

    def _compare_model(self, run: str) -> None:
        merged = self.directory / "merged-here" / run
        sources = [self.output(run)(node) / CHECKPOINT for node in NODES]
        merge_local(sources, merged, Options(), BASE if run == "fsdp2" else None)
        model = self.model(run)
        here, there = ({p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()} for root in (merged, model))
        if here != there:
            differing = sorted(
                {str(k) for k in here.keys() ^ there.keys()} | {str(k) for k in here.keys() & there.keys() if here[k] != there[k]}
            )
            raise Corrupt(f"{model}: differs from a merge of the nodes' directories in {', '.join(differing)}")

    def model(self, run: str) -> Path:
        """Where the consolidated model of a run lies."""
        return Path(self.store.url) / consolidated_prefix(run, CHECKPOINT).rstrip("/")

    def _snapshot(self, catalogue: Fresh, run: str) -> Snapshot:
        found = [s for s in catalogue.locations if (s.run, s.location) == (run, CHECKPOINT)]
        if not found:
            raise CkptsyncError(f"{run}/{CHECKPOINT}: no longer in the store", hint=self._logs())
        return found[0]

    def _look(self) -> Fresh:
        catalogue = fresh(self.store)
        self.view.table(locations.rows(self.store, [summary(s, catalogue.mtimes) for s in catalogue.locations]))
        return catalogue

    def _see(self, what: str, seen: Callable[[Fresh], T | None]) -> T:
        """Look until ``seen`` has an answer; raises CkptsyncError after `PATIENCE` seconds, or if a child ends."""
        until = time.monotonic() + PATIENCE
        while True:
            check(self.children)
            catalogue = self._look()
            answer = seen(catalogue)
            if answer is not None:
                return answer
            if time.monotonic() > until:
                raise CkptsyncError(f"{what}: not seen within {PATIENCE:.0f} s", hint=self._logs())
            time.sleep(LOOK_EVERY)

    def _logs(self) -> str:
        return f"read the logs: {', '.join(str(child.log) for child in self.children)}"


def a_byte_of_a_tensor(checkpoint: Path) -> tuple[str, int, str]:
    """Path, byte and name: the middle of the largest stored piece of a tensor."""
    files = LocalFiles(str(checkpoint))
    tensors = table.tensors(files, table.choose(files, None))
    pieces = [(part.extent, tensor.name) for tensor in tensors for copy in tensor.copies for part in copy.parts]
    extent, name = max(pieces, key=lambda piece: (piece[0].size, piece[0].file))
    return extent.file, extent.start + extent.size // 2, name


def damage(snapshot: Snapshot, known: set[str], path: str) -> tuple[Report, Finding] | None:
    """The first new report of damage in a file, and what it found there."""
    reports = sorted((r for name, r in snapshot.records.reports.items() if name not in known), key=lambda r: r.n)
    for report in reports:
        for finding in report.findings:
            if report.verdict == "damaged" and finding.name == f"{snapshot.location}/{path}":
                return report, finding
    return None


def ending(story: Story) -> list[str]:
    """Where things lie, and what to try next."""
    lines = [f"the model of {run} lies in {story.model(run)} ({show_size(size_of(story.model(run)))})" for run in RUNS]
    parts = [story.output("zero3")(node) / CHECKPOINT for node in NODES]
    commands = (
        ("inspect", story.model("fsdp2")),
        ("verify", Path(story.store.url)),
        ("merge", *parts, story.directory / "my-model"),
    )
    return [
        *lines,
        f"everything else, logs too: {story.directory}",
        "try next:",
        *(f"  {shlex.join([*program(), *map(str, command)])}" for command in commands),
    ]


def program() -> list[str]:
    """How a shell calls this program: ``make demo`` installs it where no PATH leads."""
    if shutil.which("ckptsync"):
        return ["ckptsync"]
    beside = Path(sys.executable).with_name("ckptsync")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "ckptsync"]


def size_of(directory: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
