"""Nodes for `ckptsync doctor`: each with a network, disks, identities, GPUs and a Python of its
own, on one machine, as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import CKPTSYNC, CLEAN, flags
from tests.campaigns.nodes import TRAIN, Network, built
from tests.doctor.real import PROJECT, SOUND_MACHINE, environment

VERSIONS = {
    "torch": "2.8.0",
    "transformers": "4.57.1",
    "accelerate": "1.11.0",
    "deepspeed": "0.17.5",
    "peft": "0.17.1",
    "safetensors": "0.6.2",
    "ray": "2.55.0",
    "llamafactory": "0.9.4",
    "nvidia-nccl-cu12": "2.27.3",
}
DOCTOR = (*CKPTSYNC, "doctor", "--json")
LONGEST = 90.0  # seconds that a command may take, whatever is dead
_SMI = """#!/bin/sh
case "$1" in
--query-gpu=name) for _ in $(seq {gpus}); do echo "{kind}"; done;;
*) echo {driver};;
esac
"""
_CUDA = "int cuDriverGetVersion(int *found) { *found = %d; return 0; }"
# What a real node has of its own; no store, disk or variable is looked for anywhere else.
_OWN = """
mount -t sysfs sysfs /sys
hostname {node}
mount --bind {home}/{node}/boot /proc/sys/kernel/random/boot_id
if [ -e /etc/machine-id ]; then mount --bind {home}/{node}/machine /etc/machine-id; fi
mount --bind {home}/hosts /etc/hosts
mount --bind {home}/fstab /etc/fstab
if [ -d /proc/driver/nvidia ]; then mount -t tmpfs tmpfs /proc/driver/nvidia; fi
mount --bind {home}/{node}/out {home}/out
"""


@dataclass(frozen=True, slots=True)
class Told:
    """How a node is unlike a sound one.

    ``setup``: shell within it, ``{home}`` is the pair's directory; ``environment``: ``None`` takes
    a variable away.

    ``within``: the last command before ours; ``python``: a wrapper around the Python that trains;
    ``links``: words for iproute2 in its network, undone by others.
    """

    setup: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    cuda: str = "12.8"
    gpus: int = 2
    kind: str = "NVIDIA H200"
    driver: str = "570.124.06"
    driver_cuda: int = 12080
    config: Mapping[str, object] = field(default_factory=dict)
    training: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    python: str = ""
    within: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    node: str = ""


class Nodes:
    """A network, a store, and as many sound nodes; ``home`` is new."""

    def __init__(self, home: Path, network: Network) -> None:
        self.home, self._network = home, network
        (home / "shared/store").mkdir(parents=True)
        (home / "model").mkdir()
        (home / "model/config.json").write_text('{"hidden_size": 8}')
        (home / "fstab").write_text("# nothing\n")
        hosts = "".join(
            f"{network.trainer(n)} n{n} n{n}.cluster\n" for n in range(len(network.nodes))
        )
        (home / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{hosts}")
        (home / "out").mkdir()
        for n in range(len(network.nodes)):
            self._made(n)

    def _made(self, n: int) -> None:
        folder = self.home / f"n{n}"
        (folder / "out/run/checkpoint-1").mkdir(parents=True)
        (folder / "out/run/checkpoint-1/model.safetensors").write_bytes(bytes(1000))
        (folder / "boot").write_text(f"{n}0000000-0000-4000-8000-000000000000\n")
        (folder / "machine").write_text(f"{n:032x}\n")

    def asked(self, n: int, told: Told, *words: str) -> dict[str, Any]:
        """What ``ckptsync doctor`` says there.

        ``hangs`` where it says nothing in time, ``broken`` where it says what is no JSON.
        """
        folder = self.home / f"n{n}"
        node = self._network.nodes[n]
        for do, _ in told.links:
            node.ip(*do.split())
        try:
            setup = f"{_OWN}{SOUND_MACHINE}{told.setup}".replace("{home}", str(self.home)).replace(
                "{node}", f"n{n}"
            )
            isolated = node.within("unshare", "--mount", "--uts", "sh", "-e", "-c")
            within = [word.replace("{home}", str(self.home)) for word in told.within]
            command = [*isolated, f'{setup}\nexec "$@"', "sh", *within, *DOCTOR]
            command += [*self._words(n, folder, told), *words]
            return _said(command, self._environment(n, folder, told), folder)
        finally:
            for _, undo in told.links:
                node.ip(*undo.split())

    def compared(self) -> dict[str, Any]:
        """By somebody who is no node."""
        words = [*DOCTOR, "--store", str(self.home / "shared/store")]
        return _said(words, {**CLEAN, "PYTHONPATH": str(PROJECT)}, self.home)

    def _words(self, n: int, folder: Path, told: Told) -> list[str]:
        sound = {
            "store": {"url": f"{self.home}/shared/store"},
            "worker": {"runs": [{"path": f"{self.home}/out/*"}]},
        }
        config = json.loads(json.dumps({**sound, **told.config}).replace("{home}", str(self.home)))
        training = {
            "save_on_each_node": False,
            "model_name_or_path": f"{self.home}/model",
            **told.training,
        }
        (folder / "worker.yaml").write_text(json.dumps(config))
        (folder / "training.json").write_text(
            json.dumps(training).replace("{home}", str(self.home))
        )
        told_of = flags(node=told.node or f"n{n}", python=self._python(folder, told))
        told_of += flags(training=folder / "training.json")
        return ["-c", f"{folder}/worker.yaml", *told_of, *told.words]

    def _python(self, folder: Path, told: Told) -> str:
        shutil.rmtree(folder / "venv", ignore_errors=True)
        versions = {name: v for name, v in {**VERSIONS, **told.versions}.items() if v}
        python = environment(folder / "venv", versions, cuda=told.cuda)
        if told.python:
            (folder / "python").write_text(told.python.format(python=python))
            (folder / "python").chmod(0o755)
            return str(folder / "python")
        return python

    def _environment(self, n: int, folder: Path, told: Told) -> dict[str, str]:
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin/nvidia-smi").write_text(
            _SMI.format(gpus=told.gpus, kind=told.kind, driver=told.driver)
        )
        (folder / "bin/nvidia-smi").chmod(0o755)
        given = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "HOME": str(folder),
            **_driver(folder, told.driver_cuda),
            "NNODES": "2",
            "NODE_RANK": str(n),
            "NPROC_PER_NODE": "2",
            "MASTER_ADDR": self._network.trainer(0),
            "MASTER_PORT": "29500",
            "NCCL_SOCKET_IFNAME": TRAIN,
            "GLOO_SOCKET_IFNAME": TRAIN,
            "PYTHONPATH": str(PROJECT),
            **told.environment,
        }
        return {
            name: value.replace("{home}", str(self.home))
            for name, value in given.items()
            if value is not None
        }


def _driver(folder: Path, cuda: int) -> dict[str, str]:
    """Where libcuda is found that says so; nowhere without a compiler."""
    if not shutil.which("cc"):
        return {}
    (folder / "lib").mkdir(exist_ok=True)
    built(folder / "lib/libcuda.so.1", _CUDA % cuda)
    return {"LD_LIBRARY_PATH": str(folder / "lib")}


def _said(command: list[str], environment: Mapping[str, str], where: Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=where,
            env=dict(environment),
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return {
            "findings": [{"kind": "hangs", "subject": " ".join(command[-6:])}],
            "exit_code": 124,
        }
    told: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # said below
        told = json.loads(done.stdout or done.stderr)
    if "findings" not in told or told["exit_code"] != done.returncode:
        return {
            "findings": [{"kind": "broken", "subject": done.stderr[-400:]}],
            "exit_code": done.returncode,
        }
    return told
