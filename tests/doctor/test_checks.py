"""Checks of machines and versions: what is planted in one of two sound nodes is found, and nothing
else.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.doctor import probe
from ckptsync.doctor.checks import check_node, compare, count_visible, parse_version
from ckptsync.doctor.facts import NodeFacts, OutputDir, group_by, read_facts, show_groups
from ckptsync.doctor.findings import STORAGE, exit_code, in_order, warn
from tests.doctor.nodes import found, kinds, pair, planted
from tests.doctor.real import PROJECT


def test_nothing_is_found_on_a_sound_pair() -> None:
    assert found(*pair()) == []
    assert found(*reversed(pair())) == []


def test_nothing_is_found_on_a_sound_node_that_waits_for_others() -> None:
    for node in pair():
        assert check_node(node) == ()


def test_what_says_nothing_is_no_fault() -> None:
    assert compare([]) == ()
    assert (
        compare(
            [
                {},
                {
                    "node": 3,
                    "gpus": "many",
                    "variables": ["NNODES"],
                    "output_dirs": None,
                    "clock": True,
                },
            ]
        )
        == ()
    )


def test_several_processes_of_one_node_are_one_node() -> None:
    first, second = pair()
    assert found(first, {**first, "versions": {}}, second) == []


def test_failures_come_first_and_each_once() -> None:
    levels = [
        level
        for level, _, _ in planted(
            versions={"torch": "2.7.1", "peft": "0.16.0"}, clock=40.0, gpus=["NVIDIA A100"] * 8
        )
    ]
    assert levels == sorted(levels)
    assert (levels[0], levels[-1]) == ("fail", "warn")


def test_a_finding_says_where_what_why_and_what_to_do() -> None:
    first, second = pair()
    second["versions"]["torch"] = "2.7.1"
    (one,) = found(first, second)
    assert (one.where, one.what) == ("n0, n1: torch", "2.8.0 on n0; 2.7.1 on n1")
    assert "hang" in one.why
    assert "install the same torch" in one.hint


def test_one_node_of_two_is_told_that_another_is_missing_only_where_all_should_be_here() -> None:
    assert kinds(pair()[0]) == [("fail", "nodes-missing", "NNODES")]
    assert check_node(pair()[0]) == ()


def test_it_needs_nothing_but_the_standard_library() -> None:
    """Ray's workers, and its driver, may have nothing of what ckptsync depends on."""
    ask = (
        "import ckptsync.doctor.checks as c, ckptsync.doctor.probe as p;"
        " print(c.compare([p.gather()]) is not None)"
    )
    bare = [sys.executable, "-S", "-c", ask]
    done = subprocess.run(
        bare,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(PROJECT), "PATH": os.environ["PATH"]},
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "odd", [10**400, float("inf"), float("nan"), "²", "1" * 30, ["²"], {"a": {}}, "\0", None, True]
)
def test_whatever_a_node_says_the_others_are_compared(odd: object) -> None:
    for key in pair()[1]:
        check_node(pair()[1] | {key: odd})
        assert isinstance(compare([pair()[0], pair()[1] | {key: odd}]), tuple)
    for name in pair()[1]["variables"]:
        compare([pair()[0], pair()[1] | {"variables": {**pair()[1]["variables"], name: odd}}])


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
    assert (
        count_visible(NodeFacts("n", gpus=("H200",) * 8, variables={"CUDA_VISIBLE_DEVICES": text}))
        == count
    )


def test_without_the_variable_all_are_visible_and_without_an_answer_nobody_knows() -> None:
    assert count_visible(NodeFacts("n", gpus=("H200",) * 8)) == 8
    assert count_visible(NodeFacts("n")) is None


def test_fewer_gpus_than_processes_are_found() -> None:
    assert planted(variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == [
        ("fail", "gpus-too-few", "NPROC_PER_NODE")
    ]


def test_devices_that_are_not_there_are_found() -> None:
    assert ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES") in planted(
        variables={"CUDA_VISIBLE_DEVICES": "4,5,6,8"}
    )
    assert ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES") in planted(
        variables={"CUDA_VISIBLE_DEVICES": "0,1,1"}
    )


def test_other_numbers_of_ranks_are_a_warning_since_torchrun_trains_with_them() -> None:
    assert planted(variables={"NPROC_PER_NODE": "4"}) == [
        ("warn", "ranks-differ", "NPROC_PER_NODE")
    ]
    fewer = {"NPROC_PER_NODE": None, "CUDA_VISIBLE_DEVICES": "0,1"}
    assert planted(variables=fewer) == [("warn", "ranks-differ", "NPROC_PER_NODE")]
    assert planted(variables={"NPROC_PER_NODE": "4", "USE_RAY": "1"}) == [
        ("fail", "launch-differs", "USE_RAY")
    ], "Ray counts"


def test_a_node_on_which_llamafactory_would_train_alone_is_a_failure() -> None:
    one = {"NPROC_PER_NODE": None, "CUDA_VISIBLE_DEVICES": "0"}
    assert planted(variables=one) == [("fail", "ranks-differ", "NPROC_PER_NODE")]
    assert ("warn", "ranks-differ", "NPROC_PER_NODE") in planted(
        variables={**one, "FORCE_TORCHRUN": "1"}
    )


def test_gpus_of_two_kinds_are_found_on_one_node_or_between_two() -> None:
    assert planted(gpus=["NVIDIA A100"] * 8) == [("warn", "gpus-mixed", "GPUs")]
    assert planted(gpus=["NVIDIA H200"] * 7 + ["NVIDIA L4"]) == [("warn", "gpus-mixed", "GPUs")]


def test_a_driver_of_an_older_major_cuda_than_torchs_is_found() -> None:
    assert planted(driver_cuda="11.8") == [("fail", "driver-too-old", "the driver")]
    assert planted(driver_cuda="12.4") == [], "within a major version the driver runs what is newer"


def test_gpus_that_are_named_where_there_are_none_are_found() -> None:
    assert count_visible(NodeFacts("n", gpus=(), variables={"CUDA_VISIBLE_DEVICES": "0,1"})) == 2
    planted_there = {"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": "4"}
    none = [
        n
        | {
            "gpus": [],
            "driver": "",
            "driver_cuda": "",
            "variables": {**n["variables"], "CUDA_VISIBLE_DEVICES": ""},
        }
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
    nodes = [
        n
        | {
            "gpus": [],
            "driver_cuda": "",
            "variables": {**n["variables"], "CUDA_VISIBLE_DEVICES": text},
        }
        for n in pair()
    ]
    assert kinds(*nodes) == []


def test_all_is_no_device() -> None:
    assert ("fail", "gpus-not-there", "CUDA_VISIBLE_DEVICES") in planted(
        variables={"CUDA_VISIBLE_DEVICES": "all"}
    )


def test_a_node_without_gpus_beside_one_that_has_them_is_found() -> None:
    assert planted(gpus=[], driver="", driver_cuda="") == [("fail", "gpus-on-some", "GPUs")]
    assert ("fail", "gpus-on-some", "GPUs") in planted(variables={"CUDA_VISIBLE_DEVICES": ""})


FAIL = ("torch", "nccl", "transformers", "deepspeed", "ray")
WARN = ("accelerate", "peft", "safetensors", "llamafactory")


@pytest.mark.parametrize("library", [*FAIL, *WARN])
def test_another_version_on_one_node_is_found(library: str) -> None:
    level = "fail" if library in FAIL else "warn"
    assert planted(versions={library: "0.6.9"}) == [(level, "versions-differ", library)]


@pytest.mark.parametrize("library", FAIL)
def test_a_library_that_only_one_node_has_is_found(library: str) -> None:
    assert planted(versions={library: None}) == [("fail", "versions-differ", library)]


def test_another_build_of_the_same_torch_is_found() -> None:
    assert planted(builds={"cuda": "12.6"}) == [("fail", "versions-differ", "the CUDA of torch")]
    assert planted(builds={"cuda": None, "hip": "6.4"}) == [
        ("fail", "versions-differ", "the CUDA of torch"),
        ("fail", "versions-differ", "the HIP of torch"),
    ]


def test_another_nccl_before_torchs_own_is_found_where_only_some_load_it() -> None:
    assert planted(overrides=["/usr/lib/libnccl.so.2.21.5"]) == [
        ("fail", "versions-differ", "libnccl")
    ]
    same = [node | {"overrides": ["/usr/lib/libnccl.so.2.21.5"]} for node in pair()]
    assert kinds(*same) == []


def test_another_minor_python_is_found_and_another_patch_is_not() -> None:
    assert planted(python="3.12.1") == [("fail", "versions-differ", "python")]
    assert planted(python="3.11.9") == []


def test_another_driver_is_a_warning() -> None:
    assert planted(driver="580.65.06") == [("warn", "versions-differ", "the driver")]


def test_a_node_whose_python_is_not_known_is_not_compared() -> None:
    assert (
        planted(versions=dict.fromkeys([*FAIL, *WARN]), builds={"cuda": None}, python="3.12.0")
        == []
    )


def test_one_nccl_at_two_places_is_one() -> None:
    nodes = [n | {"overrides": [f"/home/{n['node']}/lib/libnccl.so.2.21.5"]} for n in pair()]
    assert kinds(*nodes) == []
    nodes[1]["overrides"] = ["/usr/lib/libnccl.so.2.18.3"]
    assert kinds(*nodes) == [("fail", "versions-differ", "libnccl")]


def test_one_torch_from_two_indexes_is_one_and_a_vendors_build_is_not() -> None:
    assert planted(versions={"torch": "2.8.0+cu128"}) == []
    assert planted(versions={"torch": "2.8.0+cpu"}, builds={"cuda": None}) == [
        ("fail", "versions-differ", "the CUDA of torch"),
        ("warn", "torch-for-cpus", "torch"),
    ]
    assert planted(versions={"torch": "2.8.0+nv25.06"}) == [("fail", "versions-differ", "torch")]


def kinds_alone(**told: object) -> list[tuple[str, str]]:
    node = pair()[0]
    for key, value in told.items():
        node[key] = {**node[key], **value} if isinstance(value, dict) else value
    return [(f.level, f.kind) for f in check_node(node)]


def test_versions_are_numbers() -> None:
    assert parse_version("5.15.0.dev0") == (5, 15, 0)
    assert parse_version("2.8.0+cu128") == (2, 8, 0)
    assert parse_version("unknown") == ()
    assert parse_version("2.9") < parse_version("2.10")


@pytest.mark.parametrize(
    ("transformers", "flag", "found"),
    [("5.15.0", "true", 1), ("5.14.1", "true", 0), ("5.23.0", "false", 0), ("5.23.0", "True", 1)],
)
def test_save_on_each_node_with_a_new_transformers_is_found(
    transformers: str, flag: str, found: int
) -> None:
    got = kinds_alone(versions={"transformers": transformers}, training={"save_on_each_node": flag})
    assert got == [("warn", "save-on-each-node")] * found


@pytest.mark.parametrize(
    ("factory", "ray", "found"),
    [("0.9.2", "2.54.0", 1), ("0.9.2", "2.55.0", 0), ("0.9.3", "2.54.0", 0), ("0.9.1", "2.9.3", 1)],
)
def test_the_pair_that_destroys_the_process_group_twice_is_found(
    factory: str, ray: str, found: int
) -> None:
    assert (
        kinds_alone(versions={"llamafactory": factory, "ray": ray})
        == [("warn", "ray-destroys-twice")] * found
    )


def test_ray_that_waits_for_cpus_for_ever_is_found() -> None:
    planted = {"versions": {"llamafactory": "0.9.5"}, "variables": {"USE_RAY": "1"}}
    assert kinds_alone(**planted, cpus=64) == [("warn", "ray-cpus")]
    assert kinds_alone(**planted, cpus=80) == []


def test_llamafactorys_ray_launcher_on_a_node_without_gpus_is_found() -> None:
    planted = {
        "versions": {"llamafactory": "0.9.5"},
        "variables": {"USE_RAY": "1"},
        "driver_cuda": "",
    }
    assert kinds_alone(**planted, gpus=[]) == [("warn", "ray-cpus")]
    assert kinds_alone(
        **{
            **planted,
            "variables": {"USE_RAY": "1", "CUDA_VISIBLE_DEVICES": "", "NPROC_PER_NODE": ""},
        }
    ) == [("warn", "ray-cpus")]
    assert kinds_alone(**{**planted, "variables": {}}, gpus=[]) == []


def test_zero3_that_saves_no_model_is_found() -> None:
    assert kinds_alone(training={"zero_stage": "3", "gather_16bit": "false"}) == [
        ("warn", "zero3-no-model")
    ]
    assert kinds_alone(training={"zero_stage": "3", "gather_16bit": "true"}) == []
    assert kinds_alone(training={"zero_stage": "2", "gather_16bit": "false"}) == []


def test_a_relative_output_directory_is_found_with_ray_check_node() -> None:
    assert kinds_alone(training={"output_dir": "saves/x", "ray_run_name": "x"}) == [
        ("warn", "output-relative")
    ]
    assert kinds_alone(training={"output_dir": "saves/x"}, variables={"USE_RAY": "1"}) == [
        ("warn", "output-relative")
    ]
    assert kinds_alone(training={"output_dir": "saves/x"}) == []


def test_what_the_system_gives_too_little_of_is_found() -> None:
    assert kinds_alone(limits={"nofile": 256}) == [("warn", "few-files")]
    assert kinds_alone(limits={"nofile": -1}) == [], "no limit"
    assert kinds_alone(limits={"shm": 64 << 20}) == [("warn", "small-shm")]
    assert kinds_alone(limits={"memlock": 64 << 10}) == [("warn", "memlock")]
    assert kinds_alone(limits={"memlock": 64 << 10, "hcas": 0}) == []


def test_a_torch_for_cpus_is_found_where_there_are_gpus() -> None:
    assert kinds_alone(versions={"torch": "2.8.0+cpu"}, builds={"cuda": ""}) == [
        ("warn", "torch-for-cpus")
    ]
    assert kinds_alone(versions={"torch": "2.8.0+cpu"}, builds={"cuda": ""}, gpus=[]) == []


@pytest.mark.parametrize(
    ("transformers", "nodes", "found"),
    [("4.37.2", "2", 1), ("4.37.2", "1", 0), ("4.40.0", "2", 0), ("4.35.0", "2", 0)],
)
def test_saves_that_are_renamed_on_one_node_only_are_found(
    transformers: str, nodes: str, found: int
) -> None:
    assert (
        kinds_alone(versions={"transformers": transformers}, variables={"NNODES": nodes})
        == [("warn", "tmp-checkpoint")] * found
    )


@pytest.mark.parametrize(
    ("seconds", "level"), [(2.0, "warn"), (-2.0, "warn"), (31.0, "fail"), (-31.0, "fail")]
)
def test_a_clock_that_is_off_is_found_beside_the_store_and_beside_another_node(
    seconds: float, level: str
) -> None:
    assert planted(clock=seconds) == [(level, "clock", "the clock")] * 2
    assert [(f.level, f.kind) for f in check_node(pair()[0] | {"clock": seconds})] == [
        (level, "clock")
    ]


def test_clocks_that_are_near_the_store_and_far_from_each_other_are_found() -> None:
    nodes = [n | {"clock": clock} for n, clock in zip(pair(), (-0.8, 0.8), strict=True)]
    assert [f.nodes for f in found(*nodes)] == [("n0", "n1")]


def test_a_clock_within_a_second_or_that_nobody_measured_is_no_fault() -> None:
    assert planted(clock=0.4) == planted(clock=None) == []


def test_machines_that_share_a_name_or_an_id_are_found() -> None:
    assert planted(host="gpu0") == [("warn", "identity-shared", "the host name")]
    assert planted(machine="0" * 32) == [("warn", "identity-shared", "/etc/machine-id")]
    assert planted(host="gpu0", machine="0" * 32, boot="boot-0") == [], "containers of one machine"


def test_another_output_directory_is_found() -> None:
    first, second = pair()
    second["output_dirs"] = {"/scratch/out": {"nonce": "nonce1", "seen": ["nonce1"]}}
    assert kinds(first, second) == [("warn", "output-differs", "output_dir")]
    one = [n | {"boot": "boot", "network": "4026531840"} for n in (first, second)]
    assert kinds(*one) == [], (
        "two nodes on one machine cannot have one directory each under one name"
    )


def test_one_path_that_is_one_disk_for_some_nodes_only_is_found() -> None:
    first, second = pair()
    third = pair()[1] | {
        "node": "n2",
        "host": "gpu2",
        "machine": "2" * 32,
        "boot": "boot-2",
        "addresses": ["10.0.0.3"],
    }
    third["output_dirs"] = {"/data/out": {"nonce": "nonce2", "seen": ["nonce0", "nonce2"]}}
    for node, rank in ((first, 0), (second, 1), (third, 2)):
        node["variables"] |= {"NNODES": "3", "NODE_RANK": str(rank)}
    (one,) = found(first, second, third)
    assert (one.kind, one.level, one.exit_code, one.what) == (
        "disk-differs",
        "fail",
        STORAGE,
        "one disk for n0, n2, another for n1",
    )
    third["output_dirs"]["/data/out"]["seen"] = ["nonce2"]
    assert found(first, second, third) == []


def test_a_shared_disk_is_sound_but_with_save_on_each_node() -> None:
    shared = {"/data/out": {"nonce": "nonce1", "seen": ["nonce0", "nonce1"]}}
    assert planted(output_dirs=shared) == []
    assert planted(output_dirs=shared, training={"save_on_each_node": "true"}) == [
        ("fail", "disk-shared", "/data/out")
    ]
    assert planted(training={"save_on_each_node": "true"}) == []


def test_another_base_model_is_found() -> None:
    assert planted(digest="fedcba9876543210") == [("warn", "model-differs", "the base model")]
    assert planted(digest="") == [("warn", "model-differs", "the base model")]


def test_a_path_that_is_a_servers_for_one_node_and_a_local_disk_for_the_other_is_found() -> None:
    assert planted(
        output_dirs={"/data/out": {"nonce": "nonce1", "seen": ["nonce1"], "server": "nfs4"}}
    ) == [("fail", "disk-differs", "/data/out")]
    shared = {
        "/data/out": {"nonce": "nonce1", "seen": ["nonce0", "nonce1"], "server": "fuse.bindfs"}
    }
    assert planted(output_dirs=shared) == [], "it was tried"


def test_two_machines_whose_names_lead_to_one_address_are_found() -> None:
    bridged = [n | {"addresses": ["172.17.0.2"]} for n in pair()]
    assert kinds(*bridged) == [("warn", "identity-shared", "the address of the host's name")]
    assert kinds(*(n | {"boot": "boot-0"} for n in bridged)) == [], "namespaces of one machine"
    assert kinds(*(n | {"addresses": ["127.0.1.1"]} for n in pair())) == []


def test_users_of_other_numbers_are_found_where_the_disk_is_one() -> None:
    shared = {"/data/out": {"nonce": "nonce1", "seen": ["nonce0", "nonce1"]}}
    assert planted(output_dirs=shared, uid=1001) == [("warn", "users-differ", "/data/out")]
    assert planted(uid=1001) == []


def test_what_the_probe_gathers_is_read(tmp_path: Path) -> None:
    raw = probe.gather([str(tmp_path)], "n0")
    node = read_facts(raw)
    assert (node.name, node.host, node.python) == ("n0", raw["host"], raw["python"])
    assert node.gpus == tuple(raw["gpus"])
    assert node.output_dirs[str(tmp_path)].nonce in node.output_dirs[str(tmp_path)].seen
    assert node.limits["nofile"] > 0


def test_what_is_not_of_its_type_was_not_said() -> None:
    output_dirs = {"/a": {"nonce": 1, "seen": ["b", 2]}}
    odd = {
        "node": "n",
        "uid": True,
        "cpus": "8",
        "versions": {"torch": 2, 3: "x"},
        "output_dirs": output_dirs,
        "clock": "now",
    }
    assert read_facts(odd) == NodeFacts(
        "n", versions={"torch": ""}, output_dirs={"/a": OutputDir("", ("b",))}
    )
    assert read_facts([]).name == "?"  # type: ignore[arg-type]
    assert len(read_facts({"host": "x" * 5000}).host) == 1000


def test_nodes_are_grouped_by_what_they_say_and_named() -> None:
    nodes = [NodeFacts(f"n{n}", python="3.12" if n == 4 else "3.11") for n in range(5)]
    assert (
        show_groups(group_by(nodes, lambda n: n.python))
        == "3.11 on n0, n1, n2 and 1 more; 3.12 on n4"
    )
    assert show_groups({"": ("n0",)}) == "none on n0"


def test_the_greatest_code_of_a_failure_counts_and_failures_come_first() -> None:
    a = warn("a", "s", "w", why="y", hint="h", nodes=("n0",), code=STORAGE)
    b = replace(a, level="fail", kind="b", exit_code=2)
    assert [exit_code(found) for found in ([], [a], [a, b], [b, replace(a, level="fail")])] == [
        0,
        0,
        2,
        4,
    ]
    assert in_order([a, b, a]) == (b, a)
    assert (a.where, replace(a, nodes=()).where) == ("n0: s", "s")
