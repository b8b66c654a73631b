"""Faults planted on one of two nodes, each found by `ckptsync doctor` and nothing else alarmed; and
sound pairs of every kind, on which nothing is found.

    python -m tests.campaigns.doctor  # all: about two minutes (root, iproute2; a C compiler for
                                      some)
    python -m tests.campaigns.doctor --only clock-5s torch   # by name

Each node has a network, disks, identities, GPUs and a Python of its own, on one machine.  Each time
both nodes say with ``--publish`` what they are, the second compares, and somebody who is no node
compares again.  What is found has to be exactly the kinds that the fault is to be found by
(`tests.campaigns.doctor_faults`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, flags
from tests.campaigns.doctor_faults import FAULTS, SOUND, Fault
from tests.campaigns.nodes import TRAIN, Namespace, Network, can_isolate
from tests.doctor.nodes import pair
from tests.doctor.real import PROJECT, SOUND_MACHINE, environment

VERSIONS = pair()[0]["versions"] | {"nvidia-nccl-cu12": "2.27.3"}
DOCTOR = (*CKPTSYNC, "doctor", "--json")
LONGEST = 90.0  # seconds that a command may take, whatever is dead
_SMI = """#!/bin/sh
case "$1" in
--query-gpu=name) for _ in $(seq {gpus}); do echo "NVIDIA H200"; done;;
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


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all was found and nothing made up, 1 if not."""
    parser, pairs = arguments(__doc__), {**FAULTS, **SOUND}
    parser.add_argument("--only", nargs="+", choices=sorted(pairs), metavar="NAME")
    args = parser.parse_args(argv)
    chosen = {name: pairs[name] for name in args.only or pairs}
    if not can_isolate():
        print("left out: only root makes nodes of their own, with iproute2")
        return 0
    begun, wrong = time.monotonic(), 0
    with contextlib.closing(Network(3)) as network:
        for name, fault in chosen.items():
            why = fault.missing()
            lines = [] if why else judged(fault, network)
            wrong += bool(lines)
            verdict = "; ".join(lines) or ("found" if fault.kinds else "sound")
            print(f"{name}: {f'left out, {why}' if why else verdict}", flush=True)
    faults = len([fault for fault in chosen.values() if fault.kinds])
    sound, seconds = len(chosen) - faults, time.monotonic() - begun
    print(f"{faults} faults, {sound} sound pairs, {wrong} wrong, {seconds:.0f} s")
    return 1 if wrong else 0


def judged(fault: Fault, network: Network) -> list[str]:
    """Return what was missed, and what was made up."""
    expected = set(fault.kinds.split())
    with tempfile.TemporaryDirectory(prefix="ckptsync-doctor-") as folder:
        kinds = dict(_findings(fault, network, Path(folder)))
    missed = [f"MISSED {kind}" for kind in sorted(expected - kinds.keys())]
    return missed + [f"MADE UP {kind} ({kinds[kind]})" for kind in sorted(kinds.keys() - expected)]


def _findings(fault: Fault, network: Network, home: Path) -> Iterator[tuple[str, str]]:
    """Yield each kind, with what it was about."""
    nodes = Nodes(home, network)
    for n in range(fault.nodes):
        planted = fault if fault.on in (n, None) else Fault("", everywhere=fault.everywhere)
        words = ["--publish", *(["--nodes"] if n == fault.nodes - 1 else [])]
        for finding in nodes.diagnose(n, planted, *words):
            yield finding["kind"], f"n{n}: {finding['subject']}: {finding.get('what', '')}"
    if fault.is_compared:
        words = [*DOCTOR, "--store", str(home / "shared/store")]
        for finding in _answer(words, {**CLEAN, "PYTHONPATH": str(PROJECT)}, home):
            yield finding["kind"], f"compared: {finding['subject']}"


class Nodes:
    """A network, a store, and as many sound nodes; ``home`` is new."""

    def __init__(self, home: Path, network: Network) -> None:
        self.home, self._network = home, network
        count = len(network.nodes)
        for folder in ("shared/store", "model", "out"):
            (home / folder).mkdir(parents=True)
        (home / "model/config.json").write_text('{"hidden_size": 8}')
        (home / "fstab").write_text("# nothing\n")
        hosts = "".join(f"{network.trainer(n)} n{n} n{n}.cluster\n" for n in range(count))
        (home / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{hosts}")
        for n in range(count):
            node = home / f"n{n}"
            (node / "out/run/checkpoint-1").mkdir(parents=True)
            (node / "out/run/checkpoint-1/model.safetensors").write_bytes(bytes(1000))
            (node / "boot").write_text(f"{n}0000000-0000-4000-8000-000000000000\n")
            (node / "machine").write_text(f"{n:032x}\n")
            (node / "bin").mkdir()
            (node / "lib").mkdir()

    def diagnose(self, n: int, fault: Fault, *words: str) -> Sequence[Mapping[str, Any]]:
        """Return the findings of ``ckptsync doctor`` on a node that has a fault."""
        home, node = str(self.home), self.home / f"n{n}"
        setup = f'{_OWN}{SOUND_MACHINE}{fault.setup}\nexec "$@"'
        setup = setup.replace("{home}", home).replace("{node}", f"n{n}")
        within = [word.replace("{home}", home) for word in fault.within]
        isolated = ("unshare", "--mount", "--uts", "sh", "-e", "-c", setup, "sh")
        command = [*self._network.nodes[n].within(*isolated), *within, *DOCTOR]
        command += [*self._words(n, node, fault), *words]
        changes = [
            (network, do.format(number).split(), undo.format(number).split())
            for do, undo, where in fault.links
            for number, network in self._at(where, n)
        ]
        try:
            for network, do, _ in changes:
                network.ip(*do)
            return _answer(command, self._environment(n, node, fault), node)
        finally:
            for network, _, undo in changes:
                network.ip(*undo)

    def _at(self, where: str, n: int) -> Sequence[tuple[int, Namespace]]:
        """Return the networks that are changed, with the numbers of their nodes."""
        nodes = [*enumerate(self._network.nodes, 1)]
        return {"node": nodes[n : n + 1], "hub": [(0, self._network.hub)], "all": nodes}[where]

    def _words(self, n: int, node: Path, fault: Fault) -> list[str]:
        runs = [{"path": f"{self.home}/out/*"}]
        config = {"store": {"url": f"{self.home}/shared/store"}, "worker": {"runs": runs}}
        (node / "worker.yaml").write_text(json.dumps(config))
        training = {"save_on_each_node": False, "model_name_or_path": "{home}/model"}
        text = json.dumps({**training, **fault.training}).replace("{home}", str(self.home))
        (node / "training.json").write_text(text)
        shutil.rmtree(node / "venv", ignore_errors=True)
        python = environment(node / "venv", {**VERSIONS, **fault.versions})
        if fault.python:
            python = _program(node / "python", fault.python.format(python=python))
        words = flags(node=f"n{n}", python=python, training=node / "training.json")
        return ["-c", f"{node}/worker.yaml", *words]

    def _environment(self, n: int, node: Path, fault: Fault) -> dict[str, str]:
        smi = _SMI.format(gpus=fault.gpus, driver=fault.driver)
        _program(node / "bin/nvidia-smi", smi)
        variables: dict[str, str | None] = {
            "PATH": f"{node}/bin:{os.environ['PATH']}",
            "HOME": str(node),
            "NNODES": "2",
            "NODE_RANK": str(n),
            "NPROC_PER_NODE": "2",
            "MASTER_ADDR": self._network.trainer(0),
            "MASTER_PORT": "29500",
            "NCCL_SOCKET_IFNAME": TRAIN,
            "GLOO_SOCKET_IFNAME": TRAIN,
            "PYTHONPATH": str(PROJECT),
        }
        if shutil.which("cc"):  # libcuda tells the driver's version
            compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", f"{node}/lib/libcuda.so.1"]
            subprocess.run(compiler, input=_CUDA % fault.driver_cuda, text=True, check=True)
            variables["LD_LIBRARY_PATH"] = str(node / "lib")
        variables |= {**fault.everywhere, **fault.environment}
        present = {name: value for name, value in variables.items() if value is not None}
        return {name: value.replace("{home}", str(self.home)) for name, value in present.items()}


def _program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _answer(
    command: Sequence[str], variables: Mapping[str, str], cwd: Path
) -> Sequence[Mapping[str, Any]]:
    """Return the findings of a command; ``hangs`` where it says nothing in time, ``broken`` where
    it says what is no JSON.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env=dict(variables),
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return [{"kind": "hangs", "subject": " ".join(command[-6:])}]
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # said below
        answer = json.loads(done.stdout or done.stderr)
    if "findings" not in answer or answer["exit_code"] != done.returncode:
        return [{"kind": "broken", "subject": done.stderr[-400:]}]
    findings: list[Mapping[str, Any]] = answer["findings"]
    return findings


if __name__ == "__main__":
    sys.exit(main())
