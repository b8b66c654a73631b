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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, flags
from tests.campaigns.nodes import (
    TRAIN,
    Network,
    can_isolate,
    command_lines,
    kill,
    kill_tree,
    start,
)
from tests.support.fault_proxy import TcpProxy
from tests.support.vector import ROOT

SCRIPT = Path(__file__).with_name("hf_training.py")
PROJECT = Path(__file__).parents[2]
NODES = 2
START = 600.0  # seconds that trainers may take to import all they need, on a busy machine
_TRL = dict.fromkeys(("sft", "dpo", "grpo", "named", "best", "hub"), ("trl", "peft", "datasets"))
MODES: Mapping[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp2": (),
    "zero2": ("deepspeed",),
    "zero3": ("deepspeed",),
    "lora": ("peft",),
    **_TRL,
    "llamafactory": ("llamafactory",),
}
"""Ways to train and save, and what their Python needs beside transformers."""
HOOKS = ("hook", "embedded", "none")
"""How ckptsync comes in: its callback, a callback that brings its worker along, a worker alone."""
Losses = dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Job:
    """One training: ``ranks`` are those of each node, ``pause`` the seconds before each step.

    ``is_alone``: no worker of the nodes looks at its directory.  ``attempt``: which start of this
    run it is, where there are several.  ``limit``: how many checkpoints it keeps.  ``more``: other
    words for the script.
    """

    run: str
    mode: str
    hook: str = "none"
    steps: int = 4
    pause: float = 0.0
    ranks: int = 2
    attempt: str = ""
    is_alone: bool = False
    limit: int = 1
    more: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of its directory of truth, and of its logs."""
        return f"{self.run}.{self.attempt}" if self.attempt else self.run

    def node_name(self, n: int) -> str:
        """Return what the worker calls itself that uploads on a node: no two have one name."""
        return f"embedded{n}" if self.hook == "embedded" else f"node{n}"

    def out(self, node: Path) -> Path:
        """Return where it saves on a node whose disk is a directory."""
        return node / ("alone" if self.is_alone else "out") / self.run


class Worker:
    """A node's ``ckptsync run`` process, started again as often as it is killed."""

    def __init__(self, home: Path, name: str, **configuration: object) -> None:
        self.name, self.log, self.config = name, home / f"{name}.log", home / f"{name}.yaml"
        text = yaml.safe_dump({"node": name, "roles": ["worker"], **configuration})
        self.config.write_text(text)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, before: Sequence[str]) -> None:
        """Start it; ``before``: words to put before the command, such as those of a namespace."""
        command = [*before, *CKPTSYNC, "run", "-c", str(self.config)]
        self._process = start(command, self.log, env=CLEAN)

    def exit_code(self) -> int | None:
        """Return its exit code, None if it has not ended."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """Send SIGKILL to it and to whatever watches it; both are dead then."""
        if self._process:
            kill_tree(self._process)


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
        self._python = str(Path(python).absolute())
        self._proxy: TcpProxy | None = None
        home.mkdir(parents=True, exist_ok=True)
        url, options, self._reached = str(home / "store"), dict[str, Any](), dict[str, Any]()
        if kind != "posix":
            url, options, self._reached = self._serve_s3()
        self.store: Store = create_store(url, options)
        self.workers = [self._worker(n, url, worker) for n in range(NODES)]

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
        self.workers[n].start(self._within(n))

    def close(self) -> None:
        """Kill the workers and stop the proxy."""
        for worker in self.workers:
            worker.kill()
        if self._proxy:
            self._proxy.close()

    @contextlib.contextmanager
    def training(
        self, job: Job, front: Callable[[int], Sequence[str]] = lambda _: ()
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Start a training on each node; what is left of it at the end is killed.

        ``front``: the words before the trainer's command on a node.
        """
        started: list[subprocess.Popen[bytes]] = []
        try:
            for n in range(NODES):
                self.truth(n, job).mkdir(parents=True)
                node, log = self.node(n), self.node(n) / f"{job.name}.log"
                words = [*self._within(n), *front(n), *self._command(n, job)]
                started.append(start(words, log, env=self._environment(n, job), cwd=str(node)))
            yield started
        finally:
            for process in started:
                kill_tree(process)
            # a rank whose launcher was killed may be at work still
            for out in self.outs(job):
                _kill_trainers(out)

    def _meeting_place(self) -> tuple[str, int, str]:
        """Where the ranks of both nodes meet: address, port, and the interface that leads there."""
        if self.network:
            return self.network.trainer(0), 29500, TRAIN
        return "127.0.0.1", 29500 + os.getpid() % 5000, "lo"

    def _command(self, n: int, job: Job) -> list[str]:
        out, base = job.out(self.node(n)), ROOT / "base"
        if job.mode == "llamafactory":
            config = self.node(n) / f"{job.name}.yaml"
            _write_llamafactory(config, job, out)
            return [str(Path(self._python).parent / "llamafactory-cli"), "train", str(config)]
        address, port, _ = self._meeting_place()
        ranks = flags(nnodes=NODES, node_rank=n, master_addr=address, master_port=port)
        ranks += flags(nproc_per_node=job.ranks)
        words = flags(out=out, truth=self.truth(n, job), base=base, limit=job.limit)
        words += flags(steps=job.steps, pause=job.pause, hook=job.hook != "none")
        torchrun = [self._python, "-m", "torch.distributed.run", *ranks]
        return [*torchrun, str(SCRIPT), job.mode, *words, *job.more]

    def _environment(self, n: int, job: Job) -> dict[str, str]:
        address, port, interface = self._meeting_place()
        environment = {
            **CLEAN,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.home / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # sets are saved in an order of hashes
            "PYTHONPATH": str(PROJECT),
            "TRANSFORMERS_VERBOSITY": "error",
            "DS_ACCELERATOR": "cpu",
            # a killed build locks the common one
            "TORCH_EXTENSIONS_DIR": os.environ.get(
                "TORCH_EXTENSIONS_DIR", str(self.home / "extensions")
            ),
            "GLOO_SOCKET_IFNAME": interface,
        }
        if job.mode == "llamafactory":
            path = f"{Path(self._python).parent}:{os.environ['PATH']}"
            environment |= {"DISABLE_VERSION_CHECK": "1", "FORCE_TORCHRUN": "1", "PATH": path}
            environment |= {"NNODES": f"{NODES}", "NODE_RANK": f"{n}", "MASTER_PORT": f"{port}"}
            environment |= {"NPROC_PER_NODE": f"{job.ranks}", "MASTER_ADDR": address}
            environment |= {"CKPTSYNC_AUTOLOAD": "1"} if job.hook != "none" else {}
        if job.hook == "embedded":
            options = json.dumps(self._reached)
            environment |= {"CKPTSYNC_STORE": self.store.url, "CKPTSYNC_STORAGE_OPTIONS": options}
            environment |= {"CKPTSYNC_NODE": job.node_name(n), "CKPTSYNC_WAIT": "2m"}
            environment |= {"CKPTSYNC_WORKER_QUIET": "2s", "CKPTSYNC_WORKER_UNMARKED": "10s"}
        return environment

    def _within(self, n: int) -> list[str]:
        """Return the words that run a command on a node."""
        return self.network.nodes[n].within() if self.network else []

    def _worker(self, n: int, url: str, worker: Mapping[str, object]) -> Worker:
        (self.node(n) / "out").mkdir(parents=True)
        runs = [{"path": f"{self.node(n)}/out/*"}]
        store = {"url": url, "options": self._reached}
        return Worker(self.home, f"node{n}", store=store, worker={"runs": runs, **worker})

    def _serve_s3(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Return the URL of a bucket, its options, and those by which the nodes reach it."""
        from tests.support.seaweedfs import weed

        server = weed()
        url, endpoint = f"s3://{server.bucket()}", server.endpoint
        if self.network:
            port = int(endpoint.rpartition(":")[2])
            self._proxy = TcpProxy(("127.0.0.1", port), listener=self.network.hub.listener())
            endpoint = f"http://{self.network.address}:{self._proxy.port}"
        return url, server.options(), server.options(endpoint=endpoint)


@contextlib.contextmanager
def on_two_nodes(home: Path, kind: str, python: str, **worker: object) -> Iterator[TwoNodes]:
    """Yield two nodes, each in network namespaces of its own where these can be made."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network(NODES))) if can_isolate() else None
        if not network:
            print("the nodes share a network: namespaces cannot be made here")
        nodes = TwoNodes(home, kind, python, worker, network)
        yield stack.enter_context(contextlib.closing(nodes))


def training_arguments(
    description: str | None, modes: Collection[str], *default: str
) -> argparse.ArgumentParser:
    """Return a parser with what campaigns of trainings share, among these modes."""
    parser = arguments(description, "home", "seed")
    parser.add_argument("--modes", nargs="+", choices=modes, default=default)
    parser.add_argument("--store", choices=("posix", "s3"), default="posix")
    needs = "that has transformers, accelerate, and what the modes need"
    parser.add_argument("--python", default=default_python(), help=needs)
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Return the arguments; end with an error if the Python lacks what a mode needs."""
    args = parser.parse_args(argv)
    for mode in args.modes:
        modules = ("torch", "transformers", "accelerate", *MODES[mode])
        if not has_modules(args.python, *modules):
            parser.error(f"{mode}: {args.python} lacks one of {', '.join(modules)}")
    return args


def all_events(truth: Path, *names: str, rank: str = "*") -> list[dict[str, Any]]:
    """Return what ranks of a node said: all, or the events with these names.

    A last line that is being written, or that a kill has cut, is left out.
    """
    events: list[dict[str, Any]] = []
    for path in sorted(truth.glob(f"events-{rank}.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return [event for event in events if not names or event["event"] in names]


def losses(truth: Path) -> Losses:
    """Return the loss and the norm of the gradients of each step, as rank 0 logged them."""
    events = all_events(truth, "loss", rank="0")
    return {event["step"]: (event["loss"], event["norm"]) for event in events}


def finish(started: Sequence[subprocess.Popen[bytes]], patience: float) -> list[int | None]:
    """Return exit codes; ``None`` for a process that did not end within so many seconds.

    That is 20 seconds once another one has failed.
    """
    end = time.monotonic() + patience
    while time.monotonic() < end and any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            end = min(end, time.monotonic() + 20)
        time.sleep(0.1)
    return [process.poll() for process in started]


def default_python() -> str:
    """Return the Python that runs the trainers: this one, unless the environment names another."""
    return os.environ.get("CKPTSYNC_TEST_TRAINER", sys.executable)


def has_modules(python: str, *names: str) -> bool:
    """Return whether a Python can import all of these."""
    program = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {names!r})))"
    return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0


def _write_llamafactory(config: Path, job: Job, out: Path) -> None:
    """Write a configuration of LLaMA-Factory, and its data beside it."""
    data = config.with_suffix("")
    rows = [{"instruction": f"{n} of {n + 1}", "input": "", "output": f"is {n}"} for n in range(40)]
    dataset = {"rows": {"file_name": "rows.json", "formatting": "alpaca"}}
    options = {
        "model_name_or_path": str(ROOT / "base"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(data),
        "template": "default",
        "output_dir": str(out),
        "max_steps": job.steps,
        "save_steps": 1,
        "save_total_limit": job.limit,
        "logging_steps": 1,
        "seed": 7,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "cutoff_len": 64,
        "report_to": "none",
        "use_cpu": True,
    }
    data.mkdir(exist_ok=True)
    (data / "dataset_info.json").write_text(json.dumps(dataset))
    (data / "rows.json").write_text(json.dumps(rows))
    config.write_text(json.dumps(options))  # JSON is YAML


def _kill_trainers(out: Path) -> None:
    """Kill what trains into a directory."""
    script, directory = f"{SCRIPT}\0".encode(), f"{out}\0".encode()
    lines = ((pid, x) for pid, x in command_lines() if b"ckptsync\0resume" not in x)
    kill(pid for pid, line in lines if script in line and directory in line)
