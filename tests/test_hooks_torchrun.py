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
    "variables that are empty": (
        {"NNODES": "", "NODE_RANK": "", "NPROC_PER_NODE": " ", "MASTER_ADDR": "", "RDZV_ID": "", "MASTER_PORT": "1"},
        "--nnodes 1 --node-rank 0 --nproc-per-node 8 --master-addr 127.0.0.1 --master-port 1",
    ),
    "the first of two nodes": (
        {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "1"},
        "--nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 127.0.0.1 --master-port 1",
    ),
    "as many nodes as come": (
        {"RDZV_ID": "job", "MIN_NNODES": "1", "MAX_NNODES": "4", "MASTER_PORT": "1"},
        "--nnodes 1:4 --nproc-per-node 8 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:1 --max-restarts 0",
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


LOST = [
    ({**NODE, "MASTER_ADDR": ""}, "MASTER_ADDR: not set, and NODE_RANK=1"),
    ({**NODE, "MASTER_PORT": ""}, "MASTER_PORT: not set, and NODE_RANK=1"),
    ({"NODE_RANK": "1"}, "MASTER_ADDR and MASTER_PORT: not set, and NODE_RANK=1"),
    ({"NNODES": "2"}, "MASTER_PORT: not set, and NNODES=2"),
    ({"NNODES": "2", "RDZV_ID": "job", "MASTER_PORT": "1"}, "MASTER_ADDR: not set, and NNODES=2"),
    ({"MIN_NNODES": "2", "MAX_NNODES": "4", "RDZV_ID": "job"}, "MASTER_ADDR and MASTER_PORT: not set, and NNODES=2:4"),
]


@pytest.mark.parametrize(("environment", "said"), LOST)
def test_nodes_that_could_never_meet_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        torchrun.where(environment, 1)


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


def test_a_rank_that_a_launcher_has_started_is_known() -> None:
    assert torchrun.is_within({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"})
    assert torchrun.is_within({"CROSS_RANK": "0", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}), "by DeepSpeed's"


@pytest.mark.parametrize("said", [{}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, {"LOCAL_RANK": "0"}])
def test_what_a_cluster_says_of_a_node_is_no_rank(said: dict[str, str]) -> None:
    assert not torchrun.is_within(said)


def test_the_processes_get_what_llamafactory_gives_them() -> None:
    given = torchrun.environment_of({"HOME": "/root"})
    assert given == {"HOME": "/root", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert torchrun.environment_of({"OPTIM_TORCH": "0"}) == {"OPTIM_TORCH": "0"}
