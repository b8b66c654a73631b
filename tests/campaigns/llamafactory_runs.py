"""Trainings by LLaMA-Factory's own command, unmodified, and what each left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import CLEAN
from tests.campaigns.nodes import Network, kill_tree, start
from tests.campaigns.two_nodes import QUIET, finish, has_modules, meeting_place
from tests.support.vector import ROOT

WAYS = ("single", "torchrun", "nodes", "ray")
HOOKS = ("autoload", "launcher", "yaml")
STAGES = ("sft", "rm")
RAY = Path(__file__).with_name("llamafactory_ray.py")
SETUP = "ckptsync.hooks.ray.setup_worker"
PATIENCE = 400.0  # seconds for one training, most of which are imports
_WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on")


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
            return finish(started, PATIENCE), logs

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


def default_python() -> str:
    """That runs LLaMA-Factory, unless the environment names another."""
    return os.environ.get("CKPTSYNC_TEST_LLAMAFACTORY", sys.executable)


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
    return tuple(_sentence(line, flavour) for line in range(40))


def _sentence(line: int, flavour: int) -> str:
    return " ".join(
        _WORDS[(7 * line + 3 * word * word + 5 * flavour) % len(_WORDS)] for word in range(12)
    )


def files(folder: Path) -> Iterator[Path]:
    """All below it that a trainer wrote."""
    return (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_ckptsync" not in path.relative_to(folder).parts
    )
