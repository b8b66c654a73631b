"""Two sound nodes as `ckptsync.doctor.probe` describes them, and faults that are planted in them.

A finding is written as its level, kind and subject: ``"warn few-files ulimit -n"``.
"""

from __future__ import annotations

import copy
from typing import Any

from ckptsync.doctor.checks import check_node, compare
from ckptsync.doctor.findings import Finding

_SOUND: dict[str, Any] = {
    "user": "train",
    "uid": 1000,
    "cpus": 96,
    "python": "3.11.4",
    "prefix": "/opt/train",
    "versions": {
        "torch": "2.8.0",
        "transformers": "4.57.1",
        "accelerate": "1.11.0",
        "deepspeed": "0.17.5",
        "peft": "0.17.1",
        "safetensors": "0.6.2",
        "ray": "2.55.0",
        "nccl": "2.27.3",
        "llamafactory": "0.9.4",
    },
    "builds": {"cuda": "12.8"},
    "gpus": ["NVIDIA H200"] * 8,
    "driver": "570.124.06",
    "driver_cuda": "12.8",
    "overrides": [],
    "interfaces": {
        "lo": {"state": "unknown", "mtu": "65536", "speed": ""},
        "eth0": {"state": "up", "mtu": "9000", "speed": "100000"},
        "docker0": {"state": "down", "mtu": "1500", "speed": ""},
    },
    "limits": {"nofile": 1048576, "memlock": -1, "shm": 64 << 30, "hcas": 8},
    "model": "/models/base",
    "digest": "0123456789abcdef",
    "training": {"save_on_each_node": "false", "output_dir": "/data/out"},
    "clock": 0.0,
}


def pair() -> list[dict[str, Any]]:
    """Nodes n0 and n1, each with a disk of its own; n1 told of itself later."""
    return [_node(rank) for rank in (0, 1)]


def _node(rank: int) -> dict[str, Any]:
    variables = {
        "NNODES": "2",
        "NODE_RANK": str(rank),
        "NPROC_PER_NODE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    return copy.deepcopy(_SOUND) | {
        "node": f"n{rank}",
        "host": f"gpu{rank}",
        "machine": f"{rank}" * 32,
        "boot": f"boot-{rank}",
        "variables": {
            **variables,
            "NCCL_SOCKET_IFNAME": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_DEBUG": ["INFO", "WARN"][rank],
        },
        "addresses": [f"10.0.0.{rank + 1}"],
        "master": ["10.0.0.1"],
        "is_master": rank == 0,
        "port": ["free", "refused"][rank],
        "output_dirs": {"/data/out": {"nonce": f"nonce{rank}", "seen": [f"nonce{rank}"]}},
    }


def changed(node: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A node with other facts.  Of mappings only the given keys change; ``None`` removes a key."""
    for key, value in facts.items():
        if isinstance(value, dict):
            merged = {**node.get(key, {}), **value}
            node[key] = {name: one for name, one in merged.items() if one is not None}
        else:
            node[key] = value
    return node


def found(*nodes: dict[str, Any]) -> list[Finding]:
    return list(compare(nodes))


def kinds(*nodes: dict[str, Any]) -> list[str]:
    return [written(finding) for finding in compare(nodes)]


def written(finding: Finding) -> str:
    return f"{finding.level} {finding.kind} {finding.subject}"


def planted(**facts: Any) -> list[str]:
    """What is found where the second node of a sound pair has these facts."""
    first, second = pair()
    return kinds(first, changed(second, **facts))


def on_both(**facts: Any) -> list[str]:
    """What is found where both nodes of a sound pair have these facts."""
    return kinds(*(changed(node, **facts) for node in pair()))


def alone(**facts: Any) -> list[str]:
    """What is found on one sound node with these facts, whoever trains with it."""
    return [written(finding) for finding in check_node(changed(pair()[0], **facts))]
