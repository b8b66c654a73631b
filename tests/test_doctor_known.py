import pytest

from ckptsync.doctor.compare import alone
from ckptsync.doctor.versions import version
from tests.doctor_nodes import pair


def kinds(**told: object) -> list[tuple[str, str]]:
    node = pair()[0]
    for key, value in told.items():
        node[key] = {**node[key], **value} if isinstance(value, dict) else value
    return [(f.level, f.kind) for f in alone(node)]


def test_versions_are_numbers() -> None:
    assert version("5.15.0.dev0") == (5, 15, 0)
    assert version("2.8.0+cu128") == (2, 8, 0)
    assert version("unknown") == ()
    assert version("2.9") < version("2.10")


@pytest.mark.parametrize(
    ("transformers", "flag", "found"), [("5.15.0", "true", 1), ("5.14.1", "true", 0), ("5.23.0", "false", 0), ("5.23.0", "True", 1)]
)
def test_save_on_each_node_with_a_new_transformers_is_found(transformers: str, flag: str, found: int) -> None:
    got = kinds(versions={"transformers": transformers}, training={"save_on_each_node": flag})
    assert got == [("warn", "save-on-each-node")] * found


@pytest.mark.parametrize(
    ("factory", "ray", "found"), [("0.9.2", "2.54.0", 1), ("0.9.2", "2.55.0", 0), ("0.9.3", "2.54.0", 0), ("0.9.1", "2.9.3", 1)]
)
def test_the_pair_that_destroys_the_process_group_twice_is_found(factory: str, ray: str, found: int) -> None:
    assert kinds(versions={"llamafactory": factory, "ray": ray}) == [("warn", "ray-destroys-twice")] * found


def test_ray_that_waits_for_cpus_for_ever_is_found() -> None:
    planted = {"versions": {"llamafactory": "0.9.5"}, "variables": {"USE_RAY": "1"}}
    assert kinds(**planted, cpus=64) == [("warn", "ray-cpus")]
    assert kinds(**planted, cpus=80) == []


def test_llamafactorys_ray_launcher_on_a_node_without_gpus_is_found() -> None:
    planted = {"versions": {"llamafactory": "0.9.5"}, "variables": {"USE_RAY": "1"}, "driver_cuda": ""}
    assert kinds(**planted, gpus=[]) == [("warn", "ray-cpus")]
    assert kinds(**{**planted, "variables": {"USE_RAY": "1", "CUDA_VISIBLE_DEVICES": "", "NPROC_PER_NODE": ""}}) == [
        ("warn", "ray-cpus")
    ]
    assert kinds(**{**planted, "variables": {}}, gpus=[]) == []


def test_zero3_that_saves_no_model_is_found() -> None:
    assert kinds(training={"zero_stage": "3", "gather_16bit": "false"}) == [("warn", "zero3-no-model")]
    assert kinds(training={"zero_stage": "3", "gather_16bit": "true"}) == []
    assert kinds(training={"zero_stage": "2", "gather_16bit": "false"}) == []


def test_a_relative_output_directory_is_found_with_ray_alone() -> None:
    assert kinds(training={"output_dir": "saves/x", "ray_run_name": "x"}) == [("warn", "output-relative")]
    assert kinds(training={"output_dir": "saves/x"}, variables={"USE_RAY": "1"}) == [("warn", "output-relative")]
    assert kinds(training={"output_dir": "saves/x"}) == []


def test_what_the_system_gives_too_little_of_is_found() -> None:
    assert kinds(limits={"nofile": 256}) == [("warn", "few-files")]
    assert kinds(limits={"nofile": -1}) == [], "no limit"
    assert kinds(limits={"shm": 64 << 20}) == [("warn", "small-shm")]
    assert kinds(limits={"memlock": 64 << 10}) == [("warn", "memlock")]
    assert kinds(limits={"memlock": 64 << 10, "hcas": 0}) == []


def test_a_torch_for_cpus_is_found_where_there_are_gpus() -> None:
    assert kinds(versions={"torch": "2.8.0+cpu"}, builds={"cuda": ""}) == [("warn", "torch-for-cpus")]
    assert kinds(versions={"torch": "2.8.0+cpu"}, builds={"cuda": ""}, gpus=[]) == []


@pytest.mark.parametrize(
    ("transformers", "nodes", "found"), [("4.37.2", "2", 1), ("4.37.2", "1", 0), ("4.40.0", "2", 0), ("4.35.0", "2", 0)]
)
def test_saves_that_are_renamed_on_one_node_only_are_found(transformers: str, nodes: str, found: int) -> None:
    assert kinds(versions={"transformers": transformers}, variables={"NNODES": nodes}) == [("warn", "tmp-checkpoint")] * found
