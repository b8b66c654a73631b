"""Libraries that must be the same on all nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckptsync.doctor.findings import Finding, Level
from ckptsync.doctor.nodes import Node, grouped, told

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


def differing(nodes: Sequence[Node]) -> Iterator[Finding]:
    """A finding for each that differs, or that only some have.  A node that tells nothing of a training's Python is not compared."""
    known = [node for node in nodes if node.versions or node.builds]
    for name, same in _TABLE.items():
        groups = grouped((n for n in known if n.driver) if name == "the driver" else known, same.value)
        if len(groups) > 1:
            who = tuple(n for names in groups.values() for n in names)
            yield Finding(same.level, "versions-differ", who, name, told(groups), same.why, f"install the same {name} on all nodes")
