"""What LLaMA-Factory's own command tells torchrun, from the same variables (0.9.5, ``llamafactory/launcher.py``)."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from ckptsync.errors import ConfigError

_TRUE = frozenset({"1", "true", "y"})
_FORCING = ("FORCE_TORCHRUN", "USE_MCA", "USE_MEGATRON_BRIDGE")
_ALONE = ("USE_RAY", "USE_KT")  # Ray starts the processes itself; KTransformers has one for all devices
_OPTIMISED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def is_on(environment: Mapping[str, str], variable: str, default: str = "0") -> bool:
    """As LLaMA-Factory reads a switch."""
    return environment.get(variable, default).lower() in _TRUE


def is_within(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that a launcher has started: torchrun, accelerate's or DeepSpeed's, which all say that of each."""
    return all(environment.get(variable) for variable in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))


def is_wanted(environment: Mapping[str, str], devices: int) -> bool:
    """Whether the training wants several processes that torchrun starts."""
    alone = any(is_on(environment, variable) for variable in _ALONE)
    return any(is_on(environment, variable) for variable in _FORCING) or (devices > 1 and not alone)


def where(environment: Mapping[str, str], devices: int) -> list[str]:
    """torchrun's options; an empty variable is none.  Raises ConfigError where the nodes could never meet."""

    def told(variable: str, default: str = "") -> str:
        return environment.get(variable, "").strip() or default

    nodes, node, name = told("NNODES", "1"), told("NODE_RANK", "0"), told("RDZV_ID")
    if name and told("MIN_NNODES") and told("MAX_NNODES"):
        nodes = f"{told('MIN_NNODES')}:{told('MAX_NNODES')}"
    _check_meeting([variable for variable in ("MASTER_ADDR", "MASTER_PORT") if not told(variable)], nodes, node, name)
    address, port = told("MASTER_ADDR", "127.0.0.1"), told("MASTER_PORT") or _free_port()
    processes = ["--nproc-per-node", told("NPROC_PER_NODE", str(max(1, devices)))]
    if not name:
        return ["--nnodes", nodes, "--node-rank", node, *processes, "--master-addr", address, "--master-port", port]
    meeting = ["--rdzv-id", name, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
    return ["--nnodes", nodes, *processes, *meeting, "--max-restarts", told("MAX_RESTARTS", "0")]


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What the processes get."""
    return {**environment, **(_OPTIMISED if is_on(environment, "OPTIM_TORCH", "1") else {})}


def _check_meeting(lacking: Sequence[str], nodes: str, node: str, name: str) -> None:
    """The first node may wait at any address of its own, but nobody guesses its port; where nodes meet by name, each may be the first."""
    if node == "0" and not name:
        lacking = [variable for variable in lacking if variable != "MASTER_ADDR"]
    if lacking and (node != "0" or nodes.partition(":")[0] not in ("0", "1")):
        why = f"NODE_RANK={node}" if node != "0" else f"NNODES={nodes}"
        raise ConfigError(
            f"{' and '.join(lacking)}: not set, and {why}: the nodes would wait for each other for ever",
            hint="give every node the same MASTER_ADDR and MASTER_PORT: the first node's address, and a free port there",
        )


def _free_port() -> str:
    with socket.socket() as asked:
        asked.bind(("", 0))
        return str(asked.getsockname()[1])
