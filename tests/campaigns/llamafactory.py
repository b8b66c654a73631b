"""LLaMA-Factory as it was released, with the hook and without: every step in the store, bit for
bit, and training as if we were not there.

    python -m tests.campaigns.llamafactory --python /opt/llamafactory/bin/python
    python -m tests.campaigns.llamafactory --ways ray --hooks yaml

Each training saves every step and keeps one checkpoint, and brings its worker along
(``CKPTSYNC_STORE``).  Its reference is the same training without us that keeps them all: of one
process, and of two.  Trainings on a CPU are the same to the last bit, so every file that tells no
time must be the same, too: in the store, and in what the trainer left on its disk.  ``nodes``: two
of them without a shared disk, with networks of their own where this may be done (root, Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import CLEAN, arguments, end_by_signal, verdict, working
from tests.campaigns.judged import in_store, locations
from tests.campaigns.nodes import Network, can_isolate, kill_tree, start
from tests.campaigns.two_nodes import QUIET, default_python, finish, has_modules, meeting_place
from tests.campaigns.witness import sentence
from tests.support.files_in_memory import file_paths
from tests.support.vector import ROOT
from tests.support.waiting import until

WAYS = ("single", "torchrun", "nodes", "ray")
HOOKS = ("autoload", "launcher", "yaml")
STAGES = ("sft", "rm")
RAY = Path(__file__).with_name("llamafactory_ray.py")
SETUP = "ckptsync.hooks.ray.setup_worker"
TRAINS = 400.0  # seconds for one training, most of which are imports
TIMED = frozenset(
    {
        "training_args.bin",
        "trainer_log.jsonl",
        "train_results.json",
        "all_results.json",
        "README.md",
    }
)  # or name a directory
STATE = "trainer_state.json"
WEIGHTS = {"model.safetensors"}
PATIENCE = 180.0  # seconds for the store to have everything, once the training has ended


@dataclass(frozen=True, slots=True)
class Run:
    """``hook``: one of `HOOKS`, or empty for LLaMA-Factory alone, which then keeps every
    checkpoint.
    """

    way: str
    stage: str
    hook: str

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.way}-{self.stage}-{self.hook or 'plain'}"

    @property
    def nodes(self) -> int:
        """On how many machines."""
        return 2 if self.way == "nodes" else 1


class Bench:
    """``python`` has LLaMA-Factory, ckptsync with its dependencies and, for that way, Ray."""

    def __init__(self, home: Path, python: str, steps: int, network: Network | None) -> None:
        self.home, self.steps = home, steps
        self._bin, self._python, self._network = (
            Path(python).absolute().parent,
            str(Path(python).absolute()),
            network,
        )
        _write_data(home / "data")
        _write_base(home / "base")

    def out(self, run: Run, node: int = 0) -> Path:
        """Where a node trains."""
        return self.home / run.name / f"node{node}" / "out"

    def store(self, run: Run) -> Path:
        """Where its hook sends to."""
        return self.home / run.name / "store"

    def trained(self, run: Run) -> tuple[list[int | None], list[Path]]:
        """Exit codes and logs, one of each node."""
        started, logs = [], []
        with contextlib.ExitStack() as stack:
            for node in range(run.nodes):
                folder = self.home / run.name / f"node{node}"
                folder.mkdir(parents=True)
                # JSON is YAML
                (folder / "x.yaml").write_text(json.dumps(self._told(run, node), indent=1))
                logs.append(folder / "log")
                started.append(
                    start(
                        self._command(run, node),
                        logs[-1],
                        env=self._environment(run, node),
                        cwd=str(folder),
                    )
                )
                stack.callback(kill_tree, started[-1])
            return finish(started, TRAINS), logs

    def _command(self, run: Run, node: int) -> list[str]:
        program = "ckptsync-llamafactory" if run.hook == "launcher" else "llamafactory-cli"
        command = [str(self._bin / program), "train", "x.yaml"]
        within = self._network.nodes[node].within() if run.way == "nodes" and self._network else []
        return [*within, *([self._python, str(RAY)] if run.way == "ray" else []), *command]

    def _told(self, run: Run, node: int) -> dict[str, Any]:
        told: dict[str, Any] = {
            "model_name_or_path": str(self.home / "base"),
            "stage": run.stage,
            "do_train": True,
            "finetuning_type": "full",
            "dataset": "preferred" if run.stage == "rm" else "said",
            "dataset_dir": str(self.home / "data"),
            "template": "default",
            "output_dir": str(self.out(run, node)),
            "max_steps": self.steps,
            "save_steps": 1,
            "logging_steps": 1,
            "seed": 7,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "cutoff_len": 64,
            "report_to": "none",
            "use_cpu": True,
            # with it DDP ends at once, with us and without
            "disable_gradient_checkpointing": run.stage == "rm",
        }
        if run.hook:
            told["save_total_limit"] = 1
        if run.way == "ray":
            told["ray_num_workers"] = 2
            if run.hook == "yaml":
                runtime = {"worker_process_setup_hook": SETUP}
                told["ray_init_kwargs"] = {"runtime_env": runtime}
        return told

    def _environment(self, run: Run, node: int) -> dict[str, str]:
        told = {
            **CLEAN,
            **QUIET,
            "DISABLE_VERSION_CHECK": "1",
            "HF_HOME": str(self.home / "cache"),
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if run.way == "torchrun":
            told |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
        if run.way == "ray":
            told["USE_RAY"] = "1"
        if run.way == "nodes":
            address, port, interface = meeting_place(self._network)
            told |= {
                "FORCE_TORCHRUN": "1",
                "NNODES": "2",
                "NODE_RANK": str(node),
                "NPROC_PER_NODE": "1",
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": interface,
            }
        if run.hook:
            told |= {
                "CKPTSYNC_STORE": str(self.store(run)),
                "CKPTSYNC_WAIT": "2m",
                "CKPTSYNC_NODE": f"node{node}",
                "CKPTSYNC_WORKER_QUIET": "2s",
                "CKPTSYNC_WORKER_UNMARKED": "10s",
            }
        return told | ({"CKPTSYNC_AUTOLOAD": "1"} if run.hook == "autoload" else {})


def can_train(python: str, way: str) -> bool:
    """Whether that Python has what it takes."""
    return has_modules(python, "llamafactory", "torch", "ckptsync", *["ray"] * (way == "ray"))


def _write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    asked = [{"instruction": text, "input": ""} for text in _sentences(1)]
    said = [{**one, "output": text} for one, text in zip(asked, _sentences(2), strict=True)]
    preferred = [
        {**one, "chosen": a, "rejected": b}
        for one, a, b in zip(asked, _sentences(3), _sentences(4), strict=True)
    ]
    columns = {
        "prompt": "instruction",
        "query": "input",
        "chosen": "chosen",
        "rejected": "rejected",
    }
    known: Mapping[str, Any] = {
        "said": {"file_name": "said.json", "formatting": "alpaca"},
        "preferred": {
            "file_name": "preferred.json",
            "formatting": "alpaca",
            "ranking": True,
            "columns": columns,
        },
    }
    for name, value in {"dataset_info": known, "said": said, "preferred": preferred}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def _write_base(folder: Path) -> None:
    """The vectors' own, with a tokenizer's name that transformers before 5 know, too."""
    shutil.copytree(ROOT / "base", folder, dirs_exist_ok=True)
    told = folder / "tokenizer_config.json"
    told.write_text(
        json.dumps({**json.loads(told.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"})
    )


def _sentences(flavour: int) -> Sequence[str]:
    return tuple(sentence(line, flavour) for line in range(40))


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(working("llamafactory", args.home))
        network = (
            stack.enter_context(contextlib.closing(Network(2)))
            if "nodes" in args.ways and can_isolate()
            else None
        )
        bench = Bench(home, args.python, args.steps, network)
        runs = [Run(*one) for one in _asked(args)]
        wrong = [line for run in runs for line in _judged(bench, run)]
    print(f"{len(runs)} trainings; {len(wrong)} wrong")
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "home")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--hooks",
        nargs="+",
        choices=HOOKS,
        default=HOOKS,
        help="yaml: Ray's worker_process_setup_hook",
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        help="rm is trained by one process and by two",
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--python",
        default=default_python("LLAMAFACTORY"),
        help="that has LLaMA-Factory, Ray, and ckptsync",
    )
    return parser


def _asked(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for way in args.ways:
        if not can_train(args.python, way):
            print(f"{way}: left out, {args.python} lacks what it takes")
            continue
        for hook in args.hooks:
            for stage in args.stages:
                if (way == "ray" or hook != "yaml") and (
                    stage == "sft" or way in ("single", "torchrun")
                ):
                    yield way, stage, hook


def _judged(bench: Bench, run: Run) -> list[str]:
    """What is wrong with one training."""
    plain = Run("single" if run.way == "single" else "torchrun", run.stage, "")
    wrong: list[str] = []
    if not bench.out(plain).parent.exists():
        codes, logs = bench.trained(plain)
        wrong += _failed(plain, codes, logs)
    begun = time.monotonic()
    codes, logs = bench.trained(run)
    took = time.monotonic() - begun
    wrong += _failed(run, codes, logs)
    waited = _wait(bench, run) if not any(codes) else 0.0
    wrong += [
        *_in_store(bench, run, bench.out(plain)),
        *_on_disk(bench, run, bench.out(plain)),
        *_said(run, logs),
    ]
    print(
        f"{run.name}: {len(wrong)} wrong; trained {took:.0f} s, stored {waited:.0f} s later",
        flush=True,
    )
    verdict(f"{run.name}: {line}" for line in wrong)
    return wrong


def _failed(run: Run, codes: Sequence[int | None], logs: Sequence[Path]) -> Iterator[str]:
    for code, log in zip(codes, logs, strict=True):
        if code != 0:
            print(log.read_text("utf-8", "replace")[-4000:], file=sys.stderr)
            yield f"{run.name} ended with {code}; see {log}"


def _said(run: Run, logs: Sequence[Path]) -> Iterator[str]:
    """It is told once, by the first rank; not where Ray sets it up."""
    count = sum(
        log.read_text("utf-8", "replace").count("ckptsync: hook active: every") for log in logs
    )
    # Ray's driver shows what workers say, or not
    if run.way != "ray" and count != (run.hook != "yaml"):
        yield f"{count} times it was said to be on"


def _wanted(bench: Bench) -> set[str]:
    return {*(f"checkpoint-{step}" for step in range(1, bench.steps + 1)), "final"}


def _wait(bench: Bench, run: Run) -> float:
    begun = time.monotonic()

    def is_stored() -> bool:
        found, wanted = locations(str(bench.store(run)), "out"), _wanted(bench)
        return found.keys() >= wanted and all(
            len(found[location].manifests) == run.nodes for location in wanted - {"final"}
        )

    until(is_stored, PATIENCE, 0.5)
    return time.monotonic() - begun


def _in_store(bench: Bench, run: Run, truth: Path) -> Iterator[str]:
    truths = {name: truth if name == "final" else truth / name for name in _wanted(bench)}
    is_model = WEIGHTS.__contains__
    yield from in_store(str(bench.store(run)), "out", truths, is_model, is_same=_is_same)


def _on_disk(bench: Bench, run: Run, truth: Path) -> Iterator[str]:
    """What all nodes have is what is left where nobody hooks in."""
    here = {
        name: path
        for n in range(run.nodes)
        for name, path in file_paths(bench.out(run, n)).items()
        if "_ckptsync" not in name.split("/")
    }
    old = {f"checkpoint-{step}" for step in range(1, bench.steps)}
    if run.way == "nodes":
        # nobody rotates on the other node
        here = {path: at for path, at in here.items() if path.partition("/")[0] not in old}
    there = {
        name: path for name, path in file_paths(truth).items() if name.partition("/")[0] not in old
    }
    yield from (
        f"{path}: {'not on the disk' if path in there else 'only there with us'}"
        for path in sorted(here.keys() ^ there.keys())
    )
    for path in sorted(here.keys() & there.keys()):
        if not _is_same(path, here[path].read_bytes(), there[path].read_bytes()):
            yield f"{path}: on the disk it is another one than without us"


def _is_same(path: str, ours: bytes, reference: bytes) -> bool:
    """Return whether two files are the same but for what tells a time."""
    name = path.rpartition("/")[2]
    if name == STATE:
        return bool(_history(ours) == _history(reference))
    return name in TIMED or ours == reference


def _history(state: bytes) -> Any:
    told = json.loads(state)
    steps = [
        {
            key: value
            for key, value in entry.items()
            if key in ("step", "loss", "grad_norm", "learning_rate")
        }
        for entry in told["log_history"]
    ]
    return told["global_step"], told["max_steps"], steps


if __name__ == "__main__":
    end_by_signal(main)
