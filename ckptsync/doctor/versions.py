"""Libraries: which must be the same on all nodes, and which versions and settings are known to fail together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.doctor.findings import Finding, Level
from ckptsync.doctor.machines import visible
from ckptsync.doctor.nodes import Node, grouped, is_true, told

_CPUS = 10  # that LLaMA-Factory 0.9.5 asks of Ray for each GPU
_WIRE = "ranks of different builds hang in the first collective, or fail in it"
_FILES = "ranks of one save write, and read, other files or formats"
_RAY = "Ray refuses a node of another version"
_BUILD = re.compile(
    r"\+(cpu|cu[0-9]+|rocm[0-9.]+)$"
)  # one torch is 2.8.0 from PyPI and 2.8.0+cu128 from pytorch.org; for what it is built is compared by itself
_NCCL = re.compile(r"libnccl\.so\.([0-9]+\.[0-9.]+)$")


@dataclass(frozen=True, slots=True)
class _Same:
    """What is compared: the part of a version that must be equal, and why."""

    level: Level
    value: Callable[[Node], str]
    why: str


def _library(name: str) -> Callable[[Node], str]:
    return lambda node: node.versions.get(name, "")


def _torch(node: Node) -> str:
    return _BUILD.sub("", node.versions.get("torch", ""))


def _put_before(node: Node) -> str:
    """The versions of libnccl, where the files' names tell them: they may lie elsewhere on each node."""
    return ", ".join(found[1] if (found := _NCCL.search(path)) else path for path in node.overrides)


def _minor(node: Node) -> str:
    return ".".join(node.python.split(".")[:2])


_TABLE: dict[str, _Same] = {
    "torch": _Same("fail", _torch, _WIRE),
    "the CUDA of torch": _Same("fail", lambda n: n.builds.get("cuda", ""), _WIRE),
    "the HIP of torch": _Same("fail", lambda n: n.builds.get("hip", ""), _WIRE),
    "nccl": _Same("fail", _library("nccl"), _WIRE),
    "libnccl": _Same("fail", _put_before, "LD_PRELOAD or LD_LIBRARY_PATH puts another NCCL before torch's own: " + _WIRE),
    "transformers": _Same("fail", _library("transformers"), _FILES),
    "deepspeed": _Same("fail", _library("deepspeed"), _FILES),
    "ray": _Same("fail", _library("ray"), _RAY),
    "python": _Same("fail", _minor, "what is pickled between ranks, or by Ray, is not read by another minor version"),
    "llamafactory": _Same("warn", _library("llamafactory"), "its arguments, and who starts whom, change between versions"),
    "accelerate": _Same("warn", _library("accelerate"), _FILES),
    "peft": _Same("warn", _library("peft"), _FILES),
    "safetensors": _Same("warn", _library("safetensors"), "files get other modes: 0600 from 0.8 on"),
    "the driver": _Same("warn", lambda n: n.driver, "what works on one node may not on the other"),
}


def compare_versions(nodes: Sequence[Node]) -> Iterator[Finding]:
    """A finding for each that differs, or that only some have.  A node that tells nothing of a training's Python is not compared."""
    known = [node for node in nodes if node.versions or node.builds]
    for name, same in _TABLE.items():
        groups = grouped((n for n in known if n.driver) if name == "the driver" else known, same.value)
        if len(groups) > 1:
            who = tuple(n for names in groups.values() for n in names)
            yield Finding(same.level, "versions-differ", who, name, told(groups), same.why, f"install the same {name} on all nodes")


def version(text: str) -> tuple[int, ...]:
    """``5.15.0.dev0`` → (5, 15, 0); empty for what is none."""
    found = re.match(r"[0-9]{1,6}(\.[0-9]{1,6})*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_versions(node: Node) -> Iterator[Finding]:
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


def _warn(kind: str, node: Node, *told: str) -> Finding:
    subject, what, why, hint = told
    return Finding("warn", kind, (node.name,), subject, what, why, hint)
