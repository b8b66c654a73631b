"""Trainers as they were released, with ckptsync and without: every step in the store, bit for bit,
and training as if we were not there.

    python -m tests.campaigns.released llamafactory --python /opt/llamafactory/bin/python
    python -m tests.campaigns.released trl --ways named hub --hooks none
    python -m tests.campaigns.released ray --ways fsdp2 --hooks kill

Each training saves every step and keeps one checkpoint, and brings its worker along
(``CKPTSYNC_STORE``).  ``none``: a worker alone runs beside it, and it keeps every checkpoint and
pauses between them.  Its reference is the same training without us that keeps them all
(`tests.campaigns.judged`).

llamafactory  in one process, under torchrun, and on two nodes without a shared disk (with networks
              of their own where this may be done: root, Linux)
trl           SFT, DPO with its ``ref`` adapter, GRPO, adapters with names of their own,
              ``save_only_model`` with ``load_best_model_at_end``, and copies for the Hub, which is
              replaced
ray           Ray Train with two workers; the script knows nothing of ckptsync.  ``hook``: by its
              callbacks, ``setup``: by worker_process_setup_hook.  ``kill``: a Ray worker is killed
              (SIGKILL), and Ray begins the worker group again
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptsync.stores.opening import create_store
from tests.campaigns import judged
from tests.campaigns.campaign import CLEAN, arguments, end_by_signal, flags, verdict, working
from tests.campaigns.nodes import Network, can_isolate, kill_tree, start
from tests.campaigns.service import Service
from tests.campaigns.two_nodes import (
    PROJECT,
    QUIET,
    default_python,
    finish,
    has_modules,
    meeting_place,
)
from tests.campaigns.witness import sentence
from tests.support.vector import ROOT
from tests.support.waiting import until

HERE = Path(__file__).parent
PLAIN, ALONE, KILLED = "", "none", "kill"
TRAINS = 400.0  # seconds for one training, most of which are imports
PATIENCE = 180.0  # seconds for the store to have everything, once the training has ended
WORKER = {"quiet": "2s", "scan_every": "1s"}


@dataclass(frozen=True, slots=True)
class Run:
    """``way``: to train.  ``hook``: how ckptsync comes in; empty: not at all."""

    way: str
    hook: str

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        return f"{self.way}-{self.hook or 'plain'}"


class Program(ABC):
    """A trainer; its Python ``needs`` these modules.

    ``ways``: how it trains, and with which hooks.  ``plain``: for a way another one whose training
    without us is the same.
    """

    needs: tuple[str, ...]
    ways: ClassVar[Mapping[str, Sequence[str]]]
    plain: ClassVar[Mapping[str, str]] = {}

    def __init__(self, home: Path, python: str, steps: int) -> None:
        self.home, self.steps, self.python = home, steps, str(Path(python).absolute())
        self.network: Network | None = None

    @abstractmethod
    def command(self, run: Run, node: int) -> Sequence[str]:
        """Return the command of a node, whose working directory is the parent of ``out``."""

    def environment(self, run: Run, node: int) -> Mapping[str, str]:
        """Return the variables of a node, beside those of every training."""
        return {}

    def out(self, run: Run, node: int = 0) -> Path:
        """Return where a node trains."""
        return self.home / run.name / f"node{node}" / "out"

    def store(self, run: Run) -> Path:
        """Return where its checkpoints are sent."""
        return self.home / run.name / "store"

    def nodes(self, run: Run) -> int:
        """Return on how many machines it trains."""
        return 1

    def limit(self, run: Run) -> int:
        """Return how many checkpoints it keeps."""
        return self.steps if run.hook in (PLAIN, ALONE) else 1

    def said(self, run: Run, log: str) -> Iterator[str]:
        """Yield what a training's log should not say, or lacks."""
        yield from ()

    def lives(self, run: Run) -> Mapping[str, str]:
        """Return the runs in the store and their directories; all but the last were killed."""
        return {"out": "out"}


class LlamaFactory(Program):
    """LLaMA-Factory with two ways to install the hook."""

    needs = ("llamafactory", "torch", "ckptsync")
    ways: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(
        ("single", "torchrun", "nodes"), ("autoload", "launcher")
    )
    plain: ClassVar[Mapping[str, str]] = {"nodes": "torchrun"}

    def nodes(self, run: Run) -> int:
        return 2 if run.way == "nodes" else 1

    def command(self, run: Run, node: int) -> Sequence[str]:
        _write_data(self.home / "data")
        # JSON is YAML
        config = self.out(run, node).with_name("x.yaml")
        config.write_text(json.dumps(self._told(run, node), indent=1))
        program = "ckptsync-llamafactory" if run.hook == "launcher" else "llamafactory-cli"
        within = self.network.nodes[node].within() if run.way == "nodes" and self.network else []
        return [*within, str(Path(self.python).parent / program), "train", "x.yaml"]

    def _told(self, run: Run, node: int) -> Mapping[str, object]:
        return {
            "model_name_or_path": str(ROOT / "base"),
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset": "said",
            "dataset_dir": str(self.home / "data"),
            "template": "default",
            "output_dir": str(self.out(run, node)),
            "max_steps": self.steps,
            "save_steps": 1,
            "save_total_limit": self.limit(run),
            "logging_steps": 1,
            "seed": 7,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "cutoff_len": 64,
            "report_to": "none",
            "use_cpu": True,
        }

    def environment(self, run: Run, node: int) -> Mapping[str, str]:
        path = f"{Path(self.python).parent}:{os.environ['PATH']}"
        told = {"DISABLE_VERSION_CHECK": "1", "PATH": path}
        if run.hook == "autoload":
            told["CKPTSYNC_AUTOLOAD"] = "1"
        if run.way != "single":
            told |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
        if run.way == "nodes":
            address, port, interface = meeting_place(self.network)
            told |= {
                "NNODES": "2",
                "NODE_RANK": str(node),
                "NPROC_PER_NODE": "1",
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": interface,
            }
        return told

    def said(self, run: Run, log: str) -> Iterator[str]:
        """The hook is said to be on once, by the first rank."""
        count = log.count("ckptsync: hook active: every")
        if count != 1:
            yield f"{count} times it was said to be on"


class Trl(Program):
    """TRL's trainers in one process."""

    needs = ("trl", "peft", "ckptsync", "blake3", "msgspec")
    ways: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(
        ("sft", "dpo", "grpo", "named", "best", "hub"), ("hook", ALONE)
    )

    def command(self, run: Run, node: int) -> Sequence[str]:
        # without the hook longer than the worker takes a model for final
        pause = (6.0 if run.way == "hub" else 2.5) if run.hook == ALONE else 0.0
        told = flags(out=self.out(run), truth=self.home / run.name, base=ROOT / "base")
        told += flags(steps=self.steps, limit=self.limit(run), pause=pause)
        told += flags(store=self.store(run)) if run.hook == "hook" else []
        return [self.python, str(HERE / "trl_training.py"), run.way, *told]

    def said(self, run: Run, log: str) -> Iterator[str]:
        told = f"{self.steps} saves of {self.out(run)} and the final model"
        if run.hook == "hook" and f"uploaded to {self.store(run)}: {told}" not in log:
            yield f"the log does not say: {told}"


class RayTrain(Program):
    """Hugging Face's Trainer on two workers of Ray Train."""

    needs = ("ray", "torch", "transformers", "accelerate", "blake3", "msgspec")
    ways: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(
        ("ddp", "fsdp2"), ("hook", "setup", KILLED)
    )

    def command(self, run: Run, node: int) -> Sequence[str]:
        told = flags(out=self.out(run), truth=self.home / run.name / "truth", base=ROOT / "base")
        told += flags(steps=self.steps, limit=self.limit(run), kill=run.hook == KILLED)
        told += flags(setup=run.hook == "setup")
        return [self.python, "-m", "tests.campaigns.ray_training", run.way, *told]

    def environment(self, run: Run, node: int) -> Mapping[str, str]:
        callback = {"RAY_TRAIN_CALLBACKS": "ckptsync.hooks.ray.CkptSyncRayCallback"}
        return {"GLOO_SOCKET_IFNAME": "lo", **(callback if run.hook in ("hook", KILLED) else {})}

    def lives(self, run: Run) -> Mapping[str, str]:
        """Ray's name of the run is in front of that of the directory where its callback says so."""
        if run.hook == KILLED:
            return {"run-out": "out", "run-out1": "out1"}
        return {"out": "out"} if run.hook == "setup" else {"run-out": "out"}


PROGRAMS: Mapping[str, type[Program]] = {"llamafactory": LlamaFactory, "trl": Trl, "ray": RayTrain}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    parser = arguments(__doc__)
    programs = parser.add_subparsers(dest="program", required=True)
    for name, kind in PROGRAMS.items():
        own = arguments(__doc__, "home", add_to=programs.add_parser(name))
        hooks = sorted({hook for hooks in kind.ways.values() for hook in hooks})
        own.add_argument("--ways", nargs="+", choices=kind.ways, default=[*kind.ways])
        own.add_argument("--hooks", nargs="+", choices=hooks, default=hooks)
        own.add_argument("--steps", type=int, default=4)
        own.add_argument("--python", default=default_python(name.upper()), help="that has it")
    args = parser.parse_args(argv)
    kind = PROGRAMS[args.program]
    if not has_modules(args.python, *kind.needs):
        print(f"left out: {args.python} lacks one of {', '.join(kind.needs)}")
        return 0
    wrong = 0
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(working("trained", args.home))
        program = kind(home, args.python, args.steps)
        if can_isolate() and any(way.startswith("nodes") for way in args.ways):
            program.network = stack.enter_context(contextlib.closing(Network(2)))
        for way in args.ways:
            for hook in (hook for hook in kind.ways[way] if hook in args.hooks):
                lines = judge(program, Run(way, hook))
                wrong += len(lines)
                verdict(f"{way}-{hook}: {line}" for line in lines)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def judge(program: Program, run: Run) -> list[str]:
    """Train once, and the reference if that is still to be done; return what is wrong."""
    plain = Run(program.plain.get(run.way, run.way), PLAIN)
    wrong: list[str] = []
    if not program.out(plain).parent.exists():
        wrong += _trained(program, plain)
    begun = time.monotonic()
    with _worker(program, run):
        wrong += _trained(program, run)
        took, begun = time.monotonic() - begun, time.monotonic()
        until(lambda: not [*unsent(program, run)], PATIENCE if not wrong else 1.0, 0.5)
        waited = time.monotonic() - begun
    wrong += [*unsent(program, run), *differing(program, run), *_lost(program, run)]
    print(f"{run.name}: trained {took:.0f} s, stored {waited:.0f} s later", flush=True)
    return wrong


@contextlib.contextmanager
def _worker(program: Program, run: Run) -> Iterator[None]:
    """Have a worker beside a training that has no hook, until it has seen what should not come."""
    if run.hook != ALONE:
        yield
        return
    program.out(run).mkdir(parents=True)
    unmarked = "2s" if run.way == "hub" else "10s"
    told = {"runs": [str(program.out(run))], "unmarked": unmarked, **WORKER}
    home, store = program.home / run.name, {"url": str(program.store(run))}
    worker = Service(home, "node0", "worker", store=store, worker=told)
    worker.start()
    try:
        yield
        time.sleep(5)
    finally:
        worker.kill()


def _trained(program: Program, run: Run) -> list[str]:
    """Train on all nodes; return what its ends and its logs say wrong."""
    started, logs = [], []
    with contextlib.ExitStack() as stack:
        for node in range(program.nodes(run)):
            folder = program.out(run, node).parent
            folder.mkdir(parents=True, exist_ok=True)
            logs.append(folder / "log")
            store = {
                "CKPTSYNC_STORE": str(program.store(run)),
                "CKPTSYNC_WAIT": "2m",
                "CKPTSYNC_WORKER_QUIET": "2s",
                "CKPTSYNC_WORKER_UNMARKED": "10s",
            }
            told = {
                **CLEAN,
                **QUIET,
                "HF_HOME": str(program.home / "cache"),
                "PYTHONPATH": str(PROJECT),
                "RAY_USAGE_STATS_ENABLED": "0",
                "CKPTSYNC_NODE": f"node{node}",
                **(store if run.hook not in (PLAIN, ALONE) else {}),
                **program.environment(run, node),
            }
            words = program.command(run, node)
            started.append(start(words, logs[-1], env=told, cwd=str(folder)))
            stack.callback(kill_tree, started[-1])
        codes = finish(started, TRAINS)
    text = "".join(log.read_text("utf-8", "replace") for log in logs)
    if any(codes):
        print(text[-4000:], file=sys.stderr)
        return [f"{run.name} ended with {codes}; see {logs[0]}"]
    return [*program.said(run, text)] if run.hook else []


def _reference(program: Program, run: Run) -> tuple[Path, Mapping[str, Mapping[str, Path]]]:
    out = program.out(Run(program.plain.get(run.way, run.way), PLAIN))
    return out, judged.truths([out], is_final)


def unsent(program: Program, run: Run) -> Iterator[str]:
    """Yield what a training that came to its end must have in the store, and has not."""
    nodes = {f"node{n}" for n in range(program.nodes(run))}
    names = _reference(program, run)[1]
    wanted = {name: {"node0"} if name == judged.FINAL else nodes for name in names}
    states = judged.locations(str(program.store(run)), [*program.lives(run)][-1])
    yield from judged.missing(states, wanted)


def differing(program: Program, run: Run) -> Iterator[str]:
    """Yield what the store or the disk has otherwise than the training without us."""
    out, reference = _reference(program, run)
    store = create_store(str(program.store(run)))
    *killed, last = program.lives(run)
    yield from judged.in_store(store, last, reference, is_final)
    for life in killed:
        states = judged.locations(store, life)
        if not states:
            yield f"{life}: nothing of it is in the store"
        yield from judged.in_store(store, life, {n: reference[n] for n in states}, is_final)
    directory = program.lives(run)[last]
    ours = [program.out(run, n).with_name(directory) for n in range(program.nodes(run))]
    # on a node that is not the first nobody rotates
    is_rotated = run.hook != ALONE
    rotated = {f"checkpoint-{step}" for step in range(1, program.steps)} if is_rotated else set()
    yield from judged.on_disk(ours, [out], rotated)


def _lost(program: Program, run: Run) -> Iterator[str]:
    """Yield what a worker has missed; a copy for the Hub may be."""
    homes = [program.out(run, n) / "_ckptsync" / "embedded.log" for n in range(program.nodes(run))]
    for log in (path for path in (*homes, program.home / run.name / "node0.log") if path.exists()):
        for line in log.read_text("utf-8", "replace").splitlines():
            is_lost = '"phase": "missed"' in line or '"phase": "lost"' in line
            if is_lost and '"checkpoint": "checkpoint-' in line:
                yield f"{log.name}: {line[:200]}"


def is_final(path: str) -> bool:
    """Return whether the final model needs a file beside the checkpoints."""
    name = path.rpartition("/")[2]
    return name.endswith((".safetensors", "adapter_config.json")) or name == "config.json"


def _write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(sentence(line, 1), sentence(line, 2)) for line in range(40)]
    said = [{"instruction": text, "input": "", "output": answer} for text, answer in pairs]
    known = {"said": {"file_name": "said.json", "formatting": "alpaca"}}
    for name, value in {"dataset_info": known, "said": said}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    end_by_signal(main)
