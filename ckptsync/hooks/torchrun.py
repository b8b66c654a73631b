"""What LLaMA-Factory's own command tells torchrun, from the same variables (0.9.5, ``llamafactory/launcher.py``)."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ckptsync.errors import ConfigError

_TRUE = frozenset({"1", "true", "y"})
_FORCING = ("FORCE_TORCHRUN", "USE_MCA", "USE_MEGATRON_BRIDGE")
_ALONE = ("USE_RAY", "USE_KT")  # Ray starts the processes itself; KTransformers has one for all devices
_OPTIMISED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def is_on(environment: Mapping[str, str], variable: str, default: str = "0") -> bool:
    """As LLaMA-Factory reads a switch."""
    return environment.get(variable, default).lower() in _TRUE


def is_within(environment: Mapping[str, str]) -> bool:
    """Whether this process is one that torchrun has started."""
    return {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"} <= environment.keys()


def is_wanted(environment: Mapping[str, str], devices: int) -> bool:
    """Whether the training wants several processes that torchrun starts."""
    alone = any(is_on(environment, variable) for variable in _ALONE)
    return any(is_on(environment, variable) for variable in _FORCING) or (devices > 1 and not alone)


def where(environment: Mapping[str, str], devices: int) -> list[str]:
    """torchrun's options; raises ConfigError where the nodes could never meet."""
    nodes, node = environment.get("NNODES", "1"), environment.get("NODE_RANK", "0")
    if node != "0":
        _check_meeting(environment, f"NODE_RANK={node}")
    address, port = environment.get("MASTER_ADDR", "127.0.0.1"), environment.get("MASTER_PORT") or _free_port()
    processes = ["--nproc-per-node", environment.get("NPROC_PER_NODE", str(max(1, devices)))]
    if "RDZV_ID" not in environment:
        return ["--nnodes", nodes, "--node-rank", node, *processes, "--master-addr", address, "--master-port", port]
    if {"MIN_NNODES", "MAX_NNODES"} <= environment.keys():
        nodes = f"{environment['MIN_NNODES']}:{environment['MAX_NNODES']}"
    meeting = ["--rdzv-id", environment["RDZV_ID"], "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
    return ["--nnodes", nodes, *processes, *meeting, "--max-restarts", environment.get("MAX_RESTARTS", "0")]


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What the processes get."""
    return {**environment, **(_OPTIMISED if is_on(environment, "OPTIM_TORCH", "1") else {})}


def _check_meeting(environment: Mapping[str, str], why: str) -> None:
    lacking = [variable for variable in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(variable)]
    if lacking:
        raise ConfigError(
            f"{' and '.join(lacking)}: not set, and {why}: the nodes would wait for each other for ever",
            hint="give every node the same MASTER_ADDR and MASTER_PORT: the first node's address, and a free port there",
        )


def _free_port() -> str:
    with socket.socket() as asked:
        asked.bind(("", 0))
        return str(asked.getsockname()[1])
