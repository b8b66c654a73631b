import pytest

from ckptsync.doctor.machines import visible
from ckptsync.doctor.nodes import Node
from tests.doctor_nodes import kinds, pair, planted


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0,1,2,3", 4),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,9", 1),
        ("0,0", 1),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-GPU-1/3/0", 1),
        (" 2 , 3", 2),
    ],
)
def test_what_is_visible_is_what_cuda_makes_of_the_variable(text: str, count: int) -> None:
    assert visible(Node("n", gpus=("H200",) * 8, variables={"CUDA_VISIBLE_DEVICES": text})) == count


def test_without_the_variable_all_are_visible_and_without_an_answer_nobody_knows() -> None:
    assert visible(Node("n", gpus=("H200",) * 8)) == 8
    assert visible(Node("n")) is None


def test_fewer_gpus_than_processes_are_found() -> None:
    assert planted(variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == [("fail", "gpus-too-few", "NPROC_PER_NODE")]


def test_devices_that_are_not_there_are_found() -> None:
    assert ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES") in planted(variables={"CUDA_VISIBLE_DEVICES": "4,5,6,8"})
    assert ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES") in planted(variables={"CUDA_VISIBLE_DEVICES": "0,1,1"})


def test_other_numbers_of_ranks_are_a_warning_since_torchrun_trains_with_them() -> None:
    assert planted(variables={"NPROC_PER_NODE": "4"}) == [("warn", "ranks-differ", "NPROC_PER_NODE")]
    fewer = {"NPROC_PER_NODE": None, "CUDA_VISIBLE_DEVICES": "0,1"}
    assert planted(variables=fewer) == [("warn", "ranks-differ", "NPROC_PER_NODE")]
    assert planted(variables={"NPROC_PER_NODE": "4", "USE_RAY": "1"}) == [("fail", "launch-differs", "USE_RAY")], "Ray counts"


def test_a_node_on_which_llamafactory_would_train_alone_is_a_failure() -> None:
    one = {"NPROC_PER_NODE": None, "CUDA_VISIBLE_DEVICES": "0"}
    assert planted(variables=one) == [("fail", "ranks-differ", "NPROC_PER_NODE")]
    assert ("warn", "ranks-differ", "NPROC_PER_NODE") in planted(variables={**one, "FORCE_TORCHRUN": "1"})


def test_gpus_of_two_kinds_are_found_on_one_node_or_between_two() -> None:
    assert planted(gpus=["NVIDIA A100"] * 8) == [("warn", "gpus-mixed", "GPUs")]
    assert planted(gpus=["NVIDIA H200"] * 7 + ["NVIDIA L4"]) == [("warn", "gpus-mixed", "GPUs")]


def test_a_driver_of_an_older_major_cuda_than_torchs_is_found() -> None:
    assert planted(driver_cuda="11.8") == [("fail", "driver-too-old", "the driver")]
    assert planted(driver_cuda="12.4") == [], "within a major version the driver runs what is newer"


def test_gpus_that_are_named_where_there_are_none_are_found() -> None:
    assert visible(Node("n", gpus=(), variables={"CUDA_VISIBLE_DEVICES": "0,1"})) == 2
    planted_there = {"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": "4"}
    none = [
        n | {"gpus": [], "driver": "", "driver_cuda": "", "variables": {**n["variables"], "CUDA_VISIBLE_DEVICES": ""}}
        for n in pair()
    ]
    assert kinds(*none) == []
    none[1]["variables"] |= planted_there
    assert kinds(*none) == [
        ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES"),
        ("fail", "gpus-too-few", "NPROC_PER_NODE"),
        ("fail", "ranks-differ", "NPROC_PER_NODE"),
    ]


def test_nodes_without_gpus_train_on_their_cpus() -> None:
    assert kinds(*(n | {"gpus": [], "driver": "", "driver_cuda": ""} for n in pair())) == []


@pytest.mark.parametrize("text", ["NoDevFiles", "-1", "none", ""])
def test_a_node_that_is_told_of_no_gpus_is_sound(text: str) -> None:
    nodes = [n | {"gpus": [], "driver_cuda": "", "variables": {**n["variables"], "CUDA_VISIBLE_DEVICES": text}} for n in pair()]
    assert kinds(*nodes) == []


def test_all_is_no_device() -> None:
    assert ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES") in planted(variables={"CUDA_VISIBLE_DEVICES": "all"})


def test_a_node_without_gpus_beside_one_that_has_them_is_found() -> None:
    assert planted(gpus=[], driver="", driver_cuda="") == [("fail", "gpus-on-some", "GPUs")]
    assert ("fail", "gpus-on-some", "GPUs") in planted(variables={"CUDA_VISIBLE_DEVICES": ""})
