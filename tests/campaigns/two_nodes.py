"""Two nodes without a shared disk, a worker on each, a store that both reach, and real trainings
across them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CLEAN, arguments, flags
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
from tests.campaigns.service import Service
from tests.support.fault_proxy import TcpProxy
from tests.support.vector import ROOT

SCRIPT = Path(__file__).with_name("hf_training.py")
PROJECT = Path(__file__).parents[2]
NODES = 2
Losses = dict[int, tuple[float, float]]
START = 600.0  # seconds that trainers may take to import all they need, on a busy machine


QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0"}  # fmt: skip
"""What every trainer's environment has; sets are saved in an order of hashes."""


def meeting_place(network: Network | None) -> tuple[str, int, str]:
    """Where the ranks of two nodes meet: address, port, and the interface that leads there."""
    if network:
        return network.trainer(0), 29500, TRAIN
    return "127.0.0.1", 29500 + os.getpid() % 5000, "lo"


MODES: Mapping[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp2": (),
    "zero2": ("deepspeed",),
    "zero3": ("deepspeed",),
    "lora": ("peft",),
}
"""Ways to train and save, and what their Python needs beside transformers."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training: ``ranks`` are those of each node, ``pause`` the seconds before each step.

    ``is_alone``: no worker looks at its directory.  ``attempt``: which start of this run it is,
    where there are several.  ``more``: other words for the script.
    """

    run: str
    mode: str
    hook: bool
    steps: int = 4
    pause: float = 0.0
    ranks: int = 2
    attempt: str = ""
    is_alone: bool = False
    more: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of its directory of truth, and of its logs."""
        return f"{self.run}.{self.attempt}" if self.attempt else self.run

    def out(self, home: Path) -> Path:
        """Return where it saves on a node whose directory is ``home``."""
        return home / ("alone" if self.is_alone else "out") / self.run

    def words(self, home: Path) -> list[str]:
        """What the script is told on a node whose directory is ``home``."""
        out, truth = self.out(home), home / "truth" / self.name
        told = flags(out=out, truth=truth, base=ROOT / "base", steps=self.steps, hook=self.hook)
        return [self.mode, *told, *flags(pause=self.pause), *self.more]


class TwoNodes:
    """``kind`` of store: posix (a directory that both see) or s3.

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
            self._serve_s3()
        self.store: Store = create_store(self.url, self.options)
        self.workers = [self._worker(n, worker) for n in range(NODES)]

    def node(self, n: int) -> Path:
        """What would be its disk."""
        return self.home / f"node{n}"

    def outs(self, job: Job) -> list[Path]:
        """Return where each node saves."""
        return [job.out(self.node(n)) for n in range(NODES)]

    def truth(self, n: int, job: Job) -> Path:
        """Return where a node's ranks say what happens."""
        return self.node(n) / "truth" / job.name

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
                self.truth(n, job).mkdir(parents=True)
                log = self.node(n) / f"{job.name}.log"
                trainer = [*self._torchrun(n, job), str(SCRIPT), *job.words(self.node(n))]
                words = [*self.within(n), *front(n), *trainer]
                started.append(start(words, log, env=self.environment(), cwd=str(self.node(n))))
            yield started
        finally:
            for one in started:
                kill_tree(one)
            # a rank whose launcher was killed may be at work still
            for n in range(NODES):
                _kill_trainers(job.out(self.node(n)))

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
    default: Sequence[str] = tuple(MODES),
) -> argparse.ArgumentParser:
    """Return a parser with what campaigns of trainings share."""
    parser = arguments(description, "home", "seed")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=default)
    parser.add_argument("--store", choices=("posix", "s3"), default="posix")
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
    return has_modules(python, "torch", "transformers", "accelerate", *MODES[mode])


def has_modules(python: str, *names: str) -> bool:
    """Return whether a Python can import all of these."""
    asked = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {names!r})))"
    return subprocess.run([python, "-c", asked], capture_output=True, check=False).returncode == 0
