from __future__ import annotations

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks import torchrun

NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
WHERE = {
    "two nodes": (NODE, "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29501"),
    "fewer processes than devices": (
        {"NPROC_PER_NODE": "2", "MASTER_PORT": "1"},
        "--nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 1",
    ),
    "a meeting by name": (
        {**NODE, "RDZV_ID": "job", "MAX_RESTARTS": "3"},
        "--nnodes 2 --nproc-per-node 8 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29501 --max-restarts 3",
    ),
    "any number of nodes": (
        {**NODE, "RDZV_ID": "job", "MIN_NNODES": "1", "MAX_NNODES": "4"},
        "--nnodes 1:4 --nproc-per-node 8 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29501 --max-restarts 0",
    ),
}


@pytest.mark.parametrize(("environment", "words"), WHERE.values(), ids=WHERE)
def test_torchrun_is_told_what_llamafactory_tells_it(environment: dict[str, str], words: str) -> None:
    assert " ".join(torchrun.where(environment, 8)) == words


def test_one_node_takes_a_port_that_is_free() -> None:
    *_, port = torchrun.where({}, 0)
    assert 1024 < int(port) < 65536
    assert "--nproc-per-node 1 " in " ".join(torchrun.where({}, 0)), "a machine without devices trains on its processor"


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT"])
def test_nodes_that_could_never_meet_are_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: not set, and NODE_RANK=1"):
        torchrun.where({name: value for name, value in NODE.items() if name != variable}, 1)


WANTED = [
    ({}, 2),
    ({"FORCE_TORCHRUN": "1"}, 0),
    ({"FORCE_TORCHRUN": "true"}, 1),
    ({"USE_MCA": "1"}, 1),
    ({"USE_RAY": "1", "FORCE_TORCHRUN": "1"}, 8),
]
UNWANTED = [({}, 0), ({}, 1), ({"FORCE_TORCHRUN": "0"}, 1), ({"USE_RAY": "1"}, 8), ({"USE_KT": "1"}, 8)]


@pytest.mark.parametrize(("environment", "devices"), WANTED)
def test_several_processes_are_wanted_where_llamafactory_wants_them(environment: dict[str, str], devices: int) -> None:
    assert torchrun.is_wanted(environment, devices)


@pytest.mark.parametrize(("environment", "devices"), UNWANTED)
def test_and_nowhere_else(environment: dict[str, str], devices: int) -> None:
    assert not torchrun.is_wanted(environment, devices)


def test_a_rank_of_torchruns_is_known() -> None:
    assert torchrun.is_within({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"})
    assert not torchrun.is_within({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"})


def test_the_processes_get_what_llamafactory_gives_them() -> None:
    given = torchrun.environment_of({"HOME": "/root"})
    assert given == {"HOME": "/root", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert torchrun.environment_of({"OPTIM_TORCH": "0"}) == {"OPTIM_TORCH": "0"}
