"""What campaigns share: trainings whose every save differs, and ckptsync's services as processes
that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli.demo import play, script
from ckptsync.errors import NotFound
from ckptsync.head.due_jobs import Job
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.location_status import LocationState
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.checkpoint_files import DirectoryFiles, Overlay
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import create_store
from ckptsync.tensors import Part
from tests.campaigns.campaign import CKPTSYNC, CLEAN
from tests.campaigns.nodes import is_alive, start
from tests.support.files_in_memory import tree
from tests.support.merge_on_disk import merge_local
from tests.support.vector import ROOT, bits, vector

RUNS = {"fsdp2": "hf-fsdp2-2node", "zero3": "hf-zero3-2node"}
NODES = ("node0", "node1")


@dataclass(frozen=True, slots=True)
class Save:
    """One save of a run: what each node wrote (kept apart from where rotation takes it), and the
    model that follows from it.
    """

    run: str
    checkpoint: str
    truth: Path
    is_original: bool

    def sources(self) -> list[Path]:
        """A directory for each node."""
        return [self.truth / node / self.checkpoint for node in NODES]

    def model(self) -> Mapping[str, object]:
        """Tensors bit for bit: the framework's own reference where the save is the vector's, else a
        merge of what the nodes wrote.
        """
        if self.is_original:
            return bits(vector(RUNS[self.run]).auto)
        merged = self.truth / "merged"
        if not merged.exists():
            merge_local(self.sources(), merged, MergeOptions(), ROOT / "base")
        return bits(*merged.glob("*.safetensors"))


# bytes a node that nothing reads: a transfer must last long enough to be killed in its midst
BALLAST = 24 << 20


class Training:
    """Trainings on nodes without a shared disk."""

    def __init__(self, home: Path, dice: random.Random) -> None:
        self.home, self._dice = home, dice
        self.saves: list[Save] = []

    def output(self, node: str, run: str) -> Path:
        """A run's output directory on a node."""
        return self.home / node / "out" / run

    def prepare(self, run: str, step: int) -> Save:
        """The next save, not yet written to any node.

        The first of each run is the framework's own, untouched.
        """
        save = Save(
            run,
            f"checkpoint-{step}",
            self.home / "truth" / f"{run}-{step}",
            all(s.run != run for s in self.saves),
        )
        for node, source in zip(NODES, vector(RUNS[run]).sources, strict=True):
            shutil.copytree(source, save.truth / node / save.checkpoint)
            (save.truth / node / save.checkpoint / f"ballast_{node}.distcp").write_bytes(
                self._dice.randbytes(BALLAST)
            )
        if not save.is_original:
            _perturb(save.sources(), self._dice)
            assert save.model() != bits(vector(RUNS[run]).auto), (
                "a save that nobody could tell from another"
            )
        for state in save.truth.glob("node*/*/trainer_state.json"):
            state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": step}))
        self.saves.append(save)
        return save

    def write(self, save: Save, pause: float) -> None:
        """File after file, in the trainer's order."""
        for _ in play(
            script(save.run, self._without_merged(save), lambda node: self.output(node, save.run)),
            pause,
        ):
            pass

    def rotate(self, save: Save) -> None:
        """As ``save_total_limit`` does."""
        for node in NODES:
            shutil.rmtree(self.output(node, save.run) / save.checkpoint)

    def _without_merged(self, save: Save) -> Path:
        only = save.truth.with_name(f"{save.truth.name}-nodes")
        only.mkdir(exist_ok=True)
        for node in NODES:
            if not (only / node).exists():
                (only / node).mkdir()
                shutil.copytree(save.truth / node / save.checkpoint, only / node / save.checkpoint)
        return only


Life = tuple[float, float]
"""Of a process: from its first words in the log to its end; seconds since the epoch."""


class Service:
    """One ``ckptsync run`` process, started again as often as it is killed.

    ``configuration``: what its file says beside its node's name and its ``roles``.
    """

    def __init__(self, home: Path, name: str, *roles: str, **configuration: object) -> None:
        self.name, self.log = name, home / f"{name}.log"
        self.config = home / f"{name}.yaml"
        told = {"node": name, "roles": [*roles], **configuration}
        self.config.write_text(yaml.safe_dump(told))
        self._process: subprocess.Popen[bytes] | None = None
        self._lives: list[Life] = []

    def start(self, before: Sequence[str] = ()) -> None:
        """``before``: words to put before the command, such as ``strace`` with its options."""
        self._lives.append((time.time(), float("inf")))
        self._process = start(
            [*before, *CKPTSYNC, "run", "-c", str(self.config)], self.log, env=CLEAN
        )

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """SIGKILL, to it and to whatever watches it; both are dead then."""
        assert self._process
        self._lives[-1] = (self._lives[-1][0], time.time())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        while any(is_alive(int(path.name), self.pid) for path in Path("/proc").glob("[0-9]*")):
            time.sleep(0.01)

    def stop(self, patience: float = 60.0) -> int:
        """SIGTERM; its exit code."""
        assert self._process
        self._process.terminate()
        return self._process.wait(patience)

    def at_work(self) -> list[Life]:
        """Return when it really was at work: of each life what came after its first words.

        Nobody can see what passes while nobody looks.  A log tells whole seconds, so one is left
        out.
        """
        return at_work(self._lives, _first_words(self.log))


def at_work(lives: Sequence[Life], words: Sequence[float]) -> list[Life]:
    """Pure: the times of first words, put to the lives in which they were said."""
    found = []
    for began, ended in lives:
        said = [at for at in words if int(began) <= at <= ended]
        found += [(said[0] + 1, ended)] if said and said[0] + 1 < ended else []
    return found


def longest(lives: Sequence[Life], begin: float, end: float) -> float:
    """For how many seconds between these two somebody was at work without a break."""
    return max((min(end, ended) - max(begin, began) for began, ended in lives), default=0.0)


def _first_words(log: Path) -> list[float]:
    found = []
    for line in log.read_text("utf-8").splitlines() if log.exists() else ():
        # a traceback, or the last line of one that was killed
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if told.get("phase") == "started":
                at = datetime.fromisoformat(told["time"].replace("Z", "+00:00"))
                found.append(at.timestamp())
    return found


def services(home: Path) -> dict[str, Service]:
    """Two workers, and a head that verifies, with periods short enough to be killed often."""
    store = {"url": create_store(str(home / "store")).url}
    worker = {"quiet": "500ms", "unmarked": "1s", "scan_every": "1s"}
    head = {"every": "1s", "config_from": {"*": str(ROOT / "base")}}
    verify = {"level": "parse", "period": "1h", "tick": "1s"}
    found = [
        Service(
            home,
            node,
            "worker",
            store=store,
            worker={"runs": [{"path": f"{home}/{node}/out/*"}], **worker},
        )
        for node in NODES
    ]
    found.append(Service(home, "head", "head", "verifier", store=store, head=head, verify=verify))
    return {service.name: service for service in found}


def head_command(job: Job, config: Path) -> list[str]:
    """Return the command of a head's child."""
    _, name, *rest = job.command(str(config))
    return [*CKPTSYNC, name, "--progress", "json", *rest]


def snapshots(home: Path) -> dict[tuple[str, str], LocationState]:
    """What the store says, by run and location."""
    return {(s.run, s.location): s for s in read_state(create_store(str(home / "store"))).readable}


def stored_bytes(store: Store, name: str) -> bytes | None:
    """Return the content of a stored file, ``None`` if there is none."""
    try:
        return bytes(read_all(store, name))
    except NotFound:
        return None


def nodes_of(seen: LocationState | None) -> set[str]:
    """Return the nodes whose manifests a location has."""
    return {known.manifest.node for known in seen.manifests} if seen else set()


def differences(
    store: Store,
    seen: LocationState,
    written: Mapping[str, Path],
    node: str = "",
    *,
    adds_configs: bool = False,
    is_same: Callable[[str, bytes, bytes], bool] = lambda _, stored, own: stored == own,
) -> Iterator[tuple[str, str]]:
    """Compare a location (``node``: that node's part of it) with the files that were written.

    Yield each path that differs, and how.  ``adds_configs``: files that describe the model may be
    in the store though nobody wrote them.  ``is_same``: of a path, and of its stored and its
    written bytes.
    """
    stored = {
        path: at.name
        for path, where in seen.files.items()
        for at in where
        if not node or node in at.nodes
    }
    for path in sorted(written.keys() - stored.keys()):
        yield path, "not in the store"
    for path in sorted(stored.keys() - written.keys()):
        if not (adds_configs and is_beside_weights(path)):
            yield path, "nobody wrote that"
    for path in sorted(stored.keys() & written.keys()):
        content = stored_bytes(store, stored[path])
        if content is None or not is_same(path, content, written[path].read_bytes()):
            yield path, "not the bytes that the trainer wrote"


def settle(home: Path, saves: Sequence[Save], patience: float) -> str:
    """Wait until every save is VERIFIED under its plain name; empty, or what was seen instead."""
    until = time.monotonic() + patience
    while True:
        seen = snapshots(home)
        words = {
            f"{s.run}/{s.checkpoint}": seen[s.run, s.checkpoint].status
            if (s.run, s.checkpoint) in seen
            else "absent"
            for s in saves
        }
        bad = [f"{name} {word}" for name, word in words.items() if word != "VERIFIED"]
        if not bad:
            return ""
        if time.monotonic() > until:
            return f"not VERIFIED within {patience:.0f} s: {', '.join(bad)}"
        time.sleep(0.5)


def violations(home: Path, saves: Sequence[Save]) -> list[str]:
    """Every promise about a store at rest that is not kept."""
    store = create_store(str(home / "store"))
    names = [entry.name for entry in store.names("")]
    wrong = [f"{name}: unfinished, and listed" for name in names if name.endswith(".part")]
    expected = {(s.run, s.checkpoint) for s in saves}
    wrong += [
        f"{run}/{location}: a location that nobody asked for"
        for run, location in snapshots(home).keys() - expected
    ]
    for save in saves:
        wrong += _differences(home / "store", save)
        found = [
            home / "store" / name
            for name in names
            if name.startswith(consolidated_prefix(save.run, save.checkpoint))
        ]
        if bits(*(path for path in found if path.suffix == ".safetensors")) != save.model():
            wrong.append(
                f"{save.run}/{save.checkpoint}: the consolidated model is not the reference"
            )
    return wrong


def _differences(store: Path, save: Save) -> list[str]:
    """Between the nodes' own files and the store's."""
    wrong = []
    written = tree(*save.sources()).content
    there = DirectoryFiles(str(store / save.run / save.checkpoint)).sizes()
    wrong += [
        f"{save.run}/{save.checkpoint}/{name}: not one of the nodes' files"
        for name in there.keys() - written.keys()
    ]
    for name, data in written.items():
        path = store / save.run / save.checkpoint / name
        if not path.is_file() or path.read_bytes() != data:
            wrong.append(f"{path}: not the bytes that the node wrote")
    return wrong


def _perturb(sources: Sequence[Path], dice: random.Random) -> None:
    """Other weights of the same sizes: low bytes of elements change in every stored part, and with
    them the archives' CRCs.
    """
    files = Overlay([DirectoryFiles(str(source)) for source in sources])
    parts: dict[Path, list[Part]] = defaultdict(list)
    for tensor in registry.tensors(files, registry.choose(files, None)):
        for part in (
            part for copy in tensor.copies for part in copy.parts if part.extent.size >= 4
        ):
            owner = next(s / part.extent.file for s in sources if (s / part.extent.file).is_file())
            parts[owner].append(part)
    for path, its in parts.items():
        data = bytearray(path.read_bytes())
        for part in its:
            data[part.extent.start] ^= dice.randrange(1, 256)
        for checksum in {part.checksum for part in its if part.checksum}:
            record = data[checksum.extent.start : checksum.extent.start + checksum.extent.size]
            data = data.replace(
                struct.pack("<I", checksum.crc32), struct.pack("<I", zlib.crc32(record))
            )
        path.write_bytes(data)
    for path in (path for source in sources for path in source.rglob("*") if path.is_file()):
        # of one save again: shards newer than their metadata are of one that is not finished
        os.utime(path)
