"""Two nodes without a shared disk, a worker on each, a store that both reach, and real trainings
across them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, flags
from tests.campaigns.cluster import Service
from tests.campaigns.nodes import (
    TRAIN,
    Network,
    can_isolate,
    command_lines,
    ended,
    kill,
    kill_tree,
    start,
    wait_for_ends,
)
from tests.support.fault_proxy import TcpProxy
from tests.support.vector import ROOT
from tests.support.waiting import until

SCRIPT = Path(__file__).with_name("hf_training.py")
RAW = Path(__file__).with_name("raw_training.py")
PROJECT = Path(__file__).parents[2]
NODES = 2
Losses = dict[int, tuple[float, float]]
START = 600.0  # seconds that trainers may take to import all they need, on a busy machine


QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""What every trainer's environment has."""


def meeting_place(network: Network | None) -> tuple[str, int, str]:
    """Where the ranks of two nodes meet: address, port, and the interface that leads there."""
    if network:
        return network.trainer(0), 29500, TRAIN
    return "127.0.0.1", 29500 + os.getpid() % 5000, "lo"


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train and save: ``word`` is what the script calls it, ``stem`` begins the names of
    its checkpoints; its Python ``needs`` these modules, too.
    """

    word: str
    script: Path = SCRIPT
    stem: str = "checkpoint-"
    needs: tuple[str, ...] = ()


TRAININGS: Mapping[str, Mode] = {
    "ddp": Mode("ddp"),
    "fsdp2": Mode("fsdp2"),
    "zero2": Mode("zero2", needs=("deepspeed",)),
    "zero3": Mode("zero3", needs=("deepspeed",)),
    "lora": Mode("lora", needs=("peft",)),
    "raw-zero2": Mode("zero2", RAW, "global_step", ("deepspeed",)),
    "raw-zero3": Mode("zero3", RAW, "global_step", ("deepspeed",)),
    "raw-accelerate": Mode("accelerate", RAW, "checkpoint_"),
    "raw-dcp": Mode("dcp", RAW, "step-"),
}
MODES = ("ddp", "fsdp2", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class Job:
    """One training: ``ranks`` are those of each node, ``pause`` the seconds before each step.

    ``resume``: the checkpoint it goes on from.  ``attempt``: which start of this run it is, where
    there are several.  ``more``: other words for the script.
    """

    run: str
    mode: str
    hook: bool
    steps: int = 4
    pause: float = 0.0
    ranks: int = 2
    resume: str = ""
    attempt: str = ""
    more: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of its directory of truth, and of its logs."""
        return f"{self.run}.{self.attempt}" if self.attempt else self.run

    def words(self, home: Path) -> list[str]:
        """What the script is told on a node whose directory is ``home``."""
        out, truth = home / "out" / self.run, home / "truth" / self.name
        told = flags(out=out, truth=truth, base=ROOT / "base", steps=self.steps, hook=self.hook)
        resume = (self.resume and out / self.resume) or False
        told += flags(pause=self.pause or False, resume=resume)
        return [TRAININGS[self.mode].word, *told, *self.more]


class TwoNodes:
    """``kind`` of store: posix (a directory that both see), s3 or sftp.

    ``python`` runs the trainers; ``network``: if namespaces can be made.
    """

    def __init__(
        self,
        home: Path,
        kind: str,
        python: str,
        worker: Mapping[str, object],
        network: Network | None,
    ) -> None:
        self.home, self.network = home, network
        # trainers have a working directory of their own
        self.trainer = str(Path(python).absolute())
        self.url = self._reached = str(home / "store")
        self.options: dict[str, Any] = {}
        self._reached_options: dict[str, Any] = {}
        self._proxy: TcpProxy | None = None
        home.mkdir(parents=True, exist_ok=True)
        if kind != "posix":
            {"s3": self._serve_s3, "sftp": self._serve_sftp}[kind]()
        self.store: Store = create_store(self.url, self.options)
        self.workers = [self._worker(n, worker) for n in range(NODES)]

    def node(self, n: int) -> Path:
        """What would be its disk."""
        return self.home / f"node{n}"

    def reached(self, n: int, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of ours on a node, to its end; it knows the store from its environment."""
        store = {
            "CKPTSYNC_STORE": self._reached,
            "CKPTSYNC_STORAGE_OPTIONS": json.dumps(self._reached_options),
        }
        command = [*self.within(n), *CKPTSYNC, *words]
        told = {
            **CLEAN,
            "PYTHONPATH": str(PROJECT),
            **(store if self._reached_options else {"CKPTSYNC_STORE": self._reached}),
        }
        return subprocess.run(command, env=told, capture_output=True, text=True, check=False)

    def wipe(self, n: int) -> None:
        """Its worker dies, and its disk is lost."""
        if self.workers[n].ended() is None:
            self.workers[n].kill()
        for location in ("out", "truth"):
            shutil.rmtree(self.node(n) / location, ignore_errors=True)
            (self.node(n) / location).mkdir()

    def begin(self, n: int) -> None:
        """Start a node's worker."""
        self.workers[n].start(self.within(n))

    def close(self) -> None:
        """Kill the workers and stop the proxy."""
        for worker in self.workers:
            if worker.ended() is None:
                with contextlib.suppress(AssertionError):  # it was never started
                    worker.kill()
        if self._proxy:
            self._proxy.close()

    @contextlib.contextmanager
    def training(
        self, job: Job, front: Callable[[int], Sequence[str]] = lambda _: ()
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Start a torchrun on each node; what is left of them at the end is killed.

        ``front``: the words before the trainer's command on a node.
        """
        started: list[subprocess.Popen[bytes]] = []
        try:
            for n in range(NODES):
                (self.node(n) / "truth" / job.name).mkdir(parents=True)
                log = self.node(n) / f"{job.name}.log"
                script = str(TRAININGS[job.mode].script)
                trainer = [*self._torchrun(n, job), script, *job.words(self.node(n))]
                words = [*self.within(n), *front(n), *trainer]
                started.append(start(words, log, env=self.environment(), cwd=str(self.node(n))))
            yield started
        finally:
            for one in started:
                kill_tree(one)
            # a rank whose launcher was killed may be at work still
            for n in range(NODES):
                _kill_trainers(self.node(n) / "out" / job.run)

    def _torchrun(self, n: int, job: Job) -> list[str]:
        address, port, _ = meeting_place(self.network)
        where = {"nnodes": NODES, "node_rank": n, "master_addr": address, "master_port": port}
        return torchrun(self.trainer, job.ranks, **where)

    def environment(self) -> dict[str, str]:
        """Return the environment of the trainers."""
        # a killed build locks the common one
        extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(self.home / "extensions"))
        return {
            **CLEAN,
            **QUIET,
            "TRANSFORMERS_VERBOSITY": "error",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": extensions,
            "GLOO_SOCKET_IFNAME": meeting_place(self.network)[2],
            "PYTHONPATH": str(PROJECT),
        }

    def within(self, n: int) -> list[str]:
        """Return the words that run a command on a node."""
        return self.network.nodes[n].within() if self.network else []

    def _worker(self, n: int, worker: Mapping[str, object]) -> Service:
        self.node(n).mkdir(parents=True)
        (self.node(n) / "out").mkdir()
        store = {"url": self._reached, "options": self._reached_options}
        told = {"runs": [{"path": f"{self.node(n)}/out/*"}], **worker}
        return Service(self.home, f"node{n}", "worker", store=store, worker=told)

    def _serve_s3(self) -> None:
        from tests.support.seaweedfs import weed

        server = weed()
        bucket = server.bucket()
        self.url = self._reached = f"s3://{bucket}"
        self.options, endpoint = server.options(), server.endpoint
        if self.network:
            endpoint = "http://{}:{}".format(
                *self._proxied(self.network, int(endpoint.rpartition(":")[2]))
            )
        self._reached_options = server.options(endpoint=endpoint)

    def _serve_sftp(self) -> None:
        from tests.support.sshd import sshd

        server = sshd()
        self.url = self._reached = server.url(self.home / "store")
        self.options = self._reached_options = dict(server.options)
        if self.network:
            host, port = self._proxied(self.network, server.port)
            self._reached = self.url.replace(f"127.0.0.1:{server.port}", f"{host}:{port}")
            known = self.home / "known_hosts"
            known.write_text(
                server.known_hosts.read_text().replace(
                    f"[127.0.0.1]:{server.port} ", f"[{host}]:{port} "
                )
            )
            self._reached_options = dict(server.options_with(known_hosts=known))

    def _proxied(self, network: Network, port: int) -> tuple[str, int]:
        """Where the nodes reach a port of this machine's loopback."""
        self._proxy = TcpProxy(("127.0.0.1", port), listener=network.hub.listener())
        return network.address, self._proxy.port


def torchrun(python: str, ranks: int, **where: object) -> list[str]:
    """Return the words that start so many ranks of a script on one node."""
    return [python, "-m", "torch.distributed.run", *flags(**where, nproc_per_node=ranks)]


@contextlib.contextmanager
def on_two_nodes(home: Path, kind: str, python: str, **worker: object) -> Iterator[TwoNodes]:
    """Yield two nodes, each in network namespaces of its own where these can be made."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network(NODES))) if can_isolate() else None
        if not network:
            print("the nodes share a network: namespaces cannot be made here")
        made = TwoNodes(home, kind, python, worker, network)
        yield stack.enter_context(contextlib.closing(made))


def training_arguments(
    description: str | None,
    *,
    modes: Sequence[str] = MODES,
    default: Sequence[str] = MODES,
    store: str = "posix",
) -> argparse.ArgumentParser:
    """Return a parser with what campaigns of trainings share."""
    parser = arguments(description, "home")
    parser.add_argument("--modes", nargs="+", choices=modes, default=default)
    parser.add_argument("--store", choices=("posix", "s3", "sftp"), default=store)
    parser.add_argument(
        "--python",
        default=default_python(),
        help="that has transformers, accelerate, and DeepSpeed for ZeRO",
    )
    return parser


def events(truth: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank of a node said, by the file's name.

    A last line that is being written, or that a kill has cut, is left out.
    """
    said: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(truth.glob("events-*.jsonl")):
        lines = said.setdefault(path.stem, [])
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return said


def all_events(truth: Path, *names: str) -> list[dict[str, Any]]:
    """Return what all ranks of a node said: all, or the events with these names."""
    every = (said for its in events(truth).values() for said in its)
    return [said for said in every if not names or said["event"] in names]


def losses(truth: Path) -> Losses:
    """Return the loss and the norm of the gradients of each step, as rank 0 logged them."""
    said = events(truth).get("events-0", [])
    return {e["step"]: (e["loss"], e["norm"]) for e in said if e["event"] == "loss"}


def wait_for(truth: Path, event: str, step: int, patience: float) -> bool:
    """Wait until some rank of a node has said it; return whether one has."""
    return until(lambda: any(e["step"] == step for e in all_events(truth, event)), patience)


def _kill_trainers(out: Path) -> None:
    """Kill what trains into a directory, and wait until it is gone."""
    words = f"{SCRIPT}\0".encode(), f"{out}\0".encode()
    trainers = [
        pid
        for pid, line in command_lines()
        if all(word in line for word in words) and b"ckptsync\0resume" not in line
    ]
    kill(trainers)
    wait_for_ends(trainers, 300)


def finish(started: list[subprocess.Popen[bytes]], patience: float) -> list[int | None]:
    """Exit codes; ``None`` for one that did not end, also when the others have failed for a
    while.
    """
    end = time.monotonic() + patience
    while time.monotonic() < end and any(one.poll() is None for one in started):
        if any(one.poll() for one in started):
            end = min(end, time.monotonic() + 20)
        time.sleep(0.1)
    return [ended(one, 0) for one in started]


def default_python(kind: str = "TRAINER") -> str:
    """Return the Python that runs the trainers: this one, unless the environment names another."""
    return os.environ.get(f"CKPTSYNC_TEST_{kind}", sys.executable)


def can_train(python: str, mode: str = "ddp") -> bool:
    """Whether that Python has what the trainer of a mode imports."""
    return has_modules(python, "torch", "transformers", "accelerate", *TRAININGS[mode].needs)


def has_modules(python: str, *names: str) -> bool:
    """Return whether a Python can import all of these."""
    asked = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {names!r})))"
    return subprocess.run([python, "-c", asked], capture_output=True, check=False).returncode == 0
