"""What is known to go wrong with certain versions and settings, and what a machine gives too little of: one node alone shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptsync.doctor.findings import Finding
from ckptsync.doctor.gpus import visible
from ckptsync.doctor.nodes import Node, is_true

_NOFILE = 1024
_SHM = 512 << 20  # bytes: a container's own default of 64 MiB is too little for any data loader
SHM = "/dev/shm"  # noqa: S108 - looked at, and never written
_CPUS = 10  # that LLaMA-Factory 0.9.5 asks of Ray for each GPU


def version(text: str) -> tuple[int, ...]:
    """``5.15.0.dev0`` → (5, 15, 0); empty for what is none."""
    found = re.match(r"[0-9]{1,6}(\.[0-9]{1,6})*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def misbehaving(node: Node) -> Iterator[Finding]:
    """Versions and settings together."""
    had = {name: version(text) for name, text in node.versions.items()}
    said = node.training
    if had.get("transformers", ()) >= (5, 15) and is_true(said.get("save_on_each_node", "")):
        yield _warn(
            "save-on-each-node",
            node,
            "save_on_each_node",
            f"true, with transformers {node.versions['transformers']}",
            "since 5.15 nodes other than the first may leave out files of their checkpoints",
            "set it to false: each node's own files are gathered from where they lie",
        )
    if (4, 36) <= had.get("transformers", ()) < (4, 39) and node.variables.get("NNODES", "") not in ("", "1"):
        yield _warn(
            "tmp-checkpoint",
            node,
            "transformers",
            f"{node.versions['transformers']}, on several nodes",
            "from 4.36 to 4.38 saves are renamed when they are done, and nodes other than the first may keep theirs in tmp-checkpoint-N (transformers#27925)",
            "install 4.40 or newer",
        )
    if node.gpus and node.versions.get("torch", "").endswith("+cpu"):
        yield _warn(
            "torch-for-cpus",
            node,
            "torch",
            f"{node.versions['torch']}, where there are {len(node.gpus)} GPUs",
            "it is built for no GPU: the training runs on the CPUs",
            "install a torch for CUDA, or ROCm; or name the Python that trains with --python",
        )
    if () < had.get("llamafactory", ()) <= (0, 9, 2) and () < had.get("ray", ()) < (2, 55):
        yield _warn(
            "ray-destroys-twice",
            node,
            "ray",
            f"LLaMA-Factory {node.versions['llamafactory']} with Ray {node.versions['ray']}",
            "both destroy the process group: after the last save the training ends with an AssertionError (LLaMA-Factory#7327); its checkpoints are safe",
            "LLaMA-Factory 0.9.3, or Ray 2.55, or newer",
        )
    if had.get("llamafactory") == (0, 9, 5) and is_true(node.variables.get("USE_RAY", "")) and node.gpus is not None:
        yield from _ray_cpus(node, visible(node) or 0)
    yield from _settings(node)


def _ray_cpus(node: Node, gpus: int) -> Iterator[Finding]:
    """What LLaMA-Factory 0.9.5 asks of Ray: a bundle of 10 CPUs for each GPU of the cluster, or, started where there is none, for each of its CPUs."""
    if not gpus:
        yield _warn(
            "ray-cpus",
            node,
            "GPUs",
            f"none to be seen, {node.cpus} CPUs",
            f"started here, LLaMA-Factory 0.9.5 asks Ray for {_CPUS} CPUs for each CPU that Ray has, and waits for ever",
            "start llamafactory-cli on a node that sees a GPU, or train without USE_RAY",
        )
    elif node.cpus < _CPUS * gpus:  # Ray may have been told of more than there are
        yield _warn(
            "ray-cpus",
            node,
            "CPUs",
            f"{node.cpus} CPUs for {gpus} GPUs",
            f"LLaMA-Factory 0.9.5 asks Ray for {_CPUS} CPUs with each GPU, and waits for ever where Ray has fewer",
            f"start Ray with `--num-cpus={_CPUS * gpus}`",
        )


def _settings(node: Node) -> Iterator[Finding]:
    said = node.training
    if said.get("zero_stage") == "3" and said.get("gather_16bit") and not is_true(said["gather_16bit"]):
        yield _warn(
            "zero3-no-model",
            node,
            "stage3_gather_16bit_weights_on_model_save",
            "false, with ZeRO-3",
            "save_model() writes no weights: the final model is only in the shards of the last checkpoint",
            "set it to true; or let a head consolidate the shards",
        )
    output = said.get("output_dir", "")
    if (
        output
        and not output.startswith("/")
        and (is_true(node.variables.get("USE_RAY", "")) or any(key.startswith("ray_") for key in said))
    ):
        yield _warn(
            "output-relative",
            node,
            "output_dir",
            f"{output}, relative, with Ray",
            "it is relative to wherever Ray starts the worker, often a session's directory that is removed with it",
            "give an absolute path",
        )


def scarce(node: Node) -> Iterator[Finding]:
    """Limits of the system that trainings run into."""
    limits = node.limits
    if 0 <= limits.get("nofile", _NOFILE) < _NOFILE:  # below 0: no limit
        why = "each rank, data loader and connection of NCCL needs some; a save fails with `Too many open files`"
        yield _warn(
            "few-files",
            node,
            "ulimit -n",
            f"{limits['nofile']}, {_NOFILE} or more wanted",
            why,
            "raise it: LimitNOFILE= of a unit, /etc/security/limits.conf",
        )
    if limits.get("shm", _SHM) < _SHM:
        why = "data loaders and NCCL share memory there: `Bus error`, or a hang"
        hint = "`--shm-size=16g` for a container, else `mount -o remount,size=50% /dev/shm`"
        yield _warn("small-shm", node, SHM, f"{limits['shm'] >> 20} MiB free, {_SHM >> 20} wanted", why, hint)
    if limits.get("hcas") and 0 <= limits.get("memlock", -1) < 1 << 30 and node.variables.get("NCCL_IB_DISABLE") != "1":
        what = f"{limits['memlock'] >> 10} KiB, with {limits['hcas']} adapters for RDMA"
        yield _warn(
            "memlock",
            node,
            "ulimit -l",
            what,
            "NCCL registers memory with the adapter, and fails where it may not",
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity",
        )


def _warn(kind: str, node: Node, *told: str) -> Finding:
    subject, what, why, hint = told
    return Finding("warn", kind, (node.name,), subject, what, why, hint)
