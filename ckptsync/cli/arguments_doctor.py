"""Arguments of ``doctor``.  Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

_ABOUT = """Without a URL it looks at this node: its configuration, store, output directories, limits, and the Python that trains.
With --publish --wait 2m, on every node before a launch, it waits for the other nodes and compares all of them; every node gets the same answer.
With a URL, or --nodes, it compares the nodes that have published, and those that train now.
Failures end it with 2 (a configuration, a version, a variable) or 4 (the store, a disk); warnings with 0, or with --strict 1."""


def add(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """The command."""
    doctor = command(commands, "doctor", "name what would make a training hang, or lose files, before it starts", _ABOUT)
    doctor.add_argument(
        "url", metavar="STORE_URL", nargs="?", help="compare the nodes that this store knows of (default: $CKPTSYNC_STORE)"
    )
    doctor.add_argument("-c", "--config", metavar="CONFIG", help="the service's configuration: what it would do here is tried")
    doctor.add_argument(
        "--publish",
        action="store_true",
        help="write this node's facts and findings to the store: run it where the training is started, on each node",
    )
    doctor.add_argument(
        "--wait",
        metavar="TIME",
        help="with --publish: wait until all nodes of the launch have published, then compare them; every node gets the same answer",
    )
    doctor.add_argument("--nnodes", metavar="N", default="", help="how many nodes --wait waits for (default: $MIN_NNODES, $NNODES)")
    doctor.add_argument("--nodes", action="store_true", help="compare the nodes that have published in the store of -c")
    doctor.add_argument(
        "--node", metavar="ID", default="", help="this node's id in the store (default: the configuration's, or computed)"
    )
    doctor.add_argument(
        "--output-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="where the training will write, there or not; may be repeated (default: the configuration's, --training's)",
    )
    doctor.add_argument(
        "--training",
        metavar="FILE",
        help="the training's own YAML or JSON (LLaMA-Factory, TrainingArguments, DeepSpeed, accelerate)",
    )
    doctor.add_argument("--model", metavar="DIR", default="", help="the model that is trained (default: --training's)")
    doctor.add_argument(
        "--python",
        metavar="PATH",
        default="",
        help="the Python that trains (default: $VIRTUAL_ENV's, $CONDA_PREFIX's, or the first in PATH)",
    )
    doctor.add_argument(
        "--job",
        metavar="NAME",
        default=os.environ.get("SLURM_JOB_ID", ""),
        help="which training this is, where several share a store: only its nodes are compared (default: $SLURM_JOB_ID)",
    )
    doctor.add_argument(
        "--fresh", metavar="TIME", default="1h", help="how old what a node said may be to be compared (default: 1h)"
    )
    doctor.add_argument("--strict", action="store_true", help="exit code 1 where there are warnings alone")
