"""Checks of machines and versions: what is planted in sound nodes is found, and nothing else."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ckptsync.doctor import probe
from ckptsync.doctor.checks import check_node, compare, count_visible
from ckptsync.doctor.facts import NodeFacts, OutputDir, group_by, read_facts, show_groups
from ckptsync.doctor.findings import STORAGE, exit_code, in_order, warn
from tests.doctor.nodes import alone, changed, found, kinds, on_both, pair, planted, written
from tests.doctor.real import PROJECT


def test_nothing_is_found_on_sound_nodes_or_where_they_say_nothing() -> None:
    assert kinds(*pair()) == kinds(*reversed(pair())) == []
    assert [check_node(node) for node in pair()] == [(), ()]
    odd = {"node": 3, "gpus": "many", "variables": ["NNODES"], "output_dirs": None, "clock": True}
    assert kinds() == kinds({}, odd) == []


def test_several_processes_of_one_node_are_one_node() -> None:
    first, second = pair()
    assert found(first, {**first, "versions": {}}, second) == []
    clone = second | {"node": "n0", "python": "3.12.1"}
    assert "fail versions-differ python" in kinds(first, clone), "another machine has the id"


def test_failures_come_first_and_each_says_where_what_why_and_what_to_do() -> None:
    first, second = pair()
    changed(second, versions={"torch": "2.7.1", "peft": "0.16.0"}, clock=40.0, gpus=["A100"] * 8)
    findings = found(first, second)
    assert [f.level for f in findings] == ["fail"] * 3 + ["warn"] * 2
    one = findings[2]
    assert (one.where, one.what) == ("n0, n1: torch", "2.8.0 on n0; 2.7.1 on n1")
    assert "hang" in one.why
    assert "install the same torch" in one.hint


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


def visible(text: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": text}


NO_GPUS = {"gpus": [], "driver": "", "driver_cuda": ""}
TOO_FEW = "fail gpus-too-few NPROC_PER_NODE"
NOT_THERE = "fail gpus-not-there CUDA_VISIBLE_DEVICES"


def test_gpus_that_a_launch_counts_on_are_there() -> None:
    assert planted(variables=visible("0,1,2,3")) == [TOO_FEW]
    for text in ("4,5,6,8", "0,1,1", "all"):
        assert NOT_THERE in planted(variables=visible(text)), text
    first, second = (changed(node, variables=visible(""), **NO_GPUS) for node in pair())
    assert kinds(first, second) == []
    changed(second, variables={**visible("0,1"), "NPROC_PER_NODE": "4"})
    assert kinds(first, second) == [NOT_THERE, TOO_FEW, "fail ranks-differ NPROC_PER_NODE"]


def test_nodes_without_gpus_train_on_their_cpus() -> None:
    assert on_both(**NO_GPUS) == []
    for text in ("NoDevFiles", "-1", "none", ""):
        assert on_both(**NO_GPUS, variables=visible(text)) == [], text
    assert planted(**NO_GPUS) == ["fail gpus-on-some GPUs"]
    assert "fail gpus-on-some GPUs" in planted(variables=visible(""))


def test_other_numbers_of_ranks_are_a_warning_unless_llamafactory_would_train_alone() -> None:
    differ = ["warn ranks-differ NPROC_PER_NODE"]
    assert planted(variables={"NPROC_PER_NODE": "4"}) == differ
    assert planted(variables={"NPROC_PER_NODE": None, **visible("0,1")}) == differ
    with_ray = {"NPROC_PER_NODE": "4", "USE_RAY": "1"}
    assert planted(variables=with_ray) == ["fail launch-differs USE_RAY"], "Ray counts"
    one = {"NPROC_PER_NODE": None, **visible("0")}
    assert planted(variables=one) == ["fail ranks-differ NPROC_PER_NODE"]
    assert differ[0] in planted(variables={**one, "FORCE_TORCHRUN": "1"})


def test_gpus_of_two_kinds_and_what_does_not_drive_them_are_found() -> None:
    assert planted(gpus=["NVIDIA A100"] * 8) == ["warn gpus-mixed GPUs"]
    assert planted(gpus=["NVIDIA H200"] * 7 + ["NVIDIA L4"]) == ["warn gpus-mixed GPUs"]
    assert planted(driver_cuda="11.8") == ["fail driver-too-old the driver"]
    assert planted(driver_cuda="12.4") == [], "within a major version the driver runs what is newer"
    cpu = {"versions": {"torch": "2.8.0+cpu"}, "builds": {"cuda": ""}}
    assert alone(**cpu) == ["warn torch-for-cpus torch"]
    assert alone(**cpu, gpus=[]) == []


FAIL = ("torch", "nccl", "transformers", "deepspeed", "ray")
WARN = ("accelerate", "peft", "safetensors", "llamafactory")


def test_another_version_on_one_node_is_found() -> None:
    for library in (*FAIL, *WARN):
        level = "fail" if library in FAIL else "warn"
        assert planted(versions={library: "0.6.9"}) == [f"{level} versions-differ {library}"]
    for library in FAIL:
        assert planted(versions={library: None}) == [f"fail versions-differ {library}"]
    assert planted(python="3.12.1") == ["fail versions-differ python"]
    assert planted(python="3.11.9") == []
    assert planted(driver="580.65.06") == ["warn versions-differ the driver"]
    unknown = {"versions": dict.fromkeys([*FAIL, *WARN]), "builds": {"cuda": None}}
    assert planted(**unknown, python="3.12.0") == [], "a Python that nobody asked"


def test_another_build_of_the_same_torch_is_found() -> None:
    cuda, hip = (f"fail versions-differ the {name} of torch" for name in ("CUDA", "HIP"))
    assert planted(builds={"cuda": "12.6"}) == [cuda]
    assert planted(builds={"cuda": None, "hip": "6.4"}) == [cuda, hip]
    assert planted(versions={"torch": "2.8.0+cu128"}) == [], "from another index"
    no_cuda = planted(versions={"torch": "2.8.0+cpu"}, builds={"cuda": None})
    assert no_cuda == [cuda, "warn torch-for-cpus torch"]
    assert planted(versions={"torch": "2.8.0+nv25.06"}) == ["fail versions-differ torch"]


def test_another_nccl_before_torchs_own_is_found_where_only_some_load_it() -> None:
    path, differ = "/usr/lib/libnccl.so.2.21.5", ["fail versions-differ libnccl"]
    assert planted(overrides=[path]) == differ
    assert on_both(overrides=[path]) == []
    nodes = [n | {"overrides": [f"/home/{n['node']}/lib/libnccl.so.2.21.5"]} for n in pair()]
    assert kinds(*nodes) == []
    assert kinds(nodes[0], nodes[1] | {"overrides": ["/usr/lib/libnccl.so.2.18.3"]}) == differ


EACH = "warn save-on-each-node save_on_each_node"
TWICE = "warn ray-destroys-twice ray"
RENAMED = "warn tmp-checkpoint transformers"


@pytest.mark.parametrize(
    ("versions", "facts", "expected"),
    [
        ({"transformers": "5.15.0"}, {"training": {"save_on_each_node": "true"}}, [EACH]),
        ({"transformers": "5.14.1"}, {"training": {"save_on_each_node": "true"}}, []),
        ({"transformers": "5.23.0"}, {"training": {"save_on_each_node": "false"}}, []),
        ({"transformers": "5.23.0"}, {"training": {"save_on_each_node": "True"}}, [EACH]),
        ({"transformers": "4.36.0"}, {"variables": {"NNODES": "2"}}, [RENAMED]),
        ({"transformers": "4.38.2"}, {"variables": {"NNODES": "2"}}, [RENAMED]),
        ({"transformers": "4.38.2"}, {"variables": {"NNODES": "1"}}, []),
        ({"transformers": "4.39.0"}, {"variables": {"NNODES": "2"}}, []),
        ({"transformers": "4.35.2"}, {"variables": {"NNODES": "2"}}, []),
        ({"llamafactory": "0.9.2", "ray": "2.54.0"}, {}, [TWICE]),
        ({"llamafactory": "0.9.2", "ray": "2.55.0"}, {}, []),
        ({"llamafactory": "0.9.3", "ray": "2.54.0"}, {}, []),
        ({"llamafactory": "0.9.1", "ray": "2.9.3"}, {}, [TWICE]),
    ],
)
def test_versions_that_are_known_to_go_wrong_are_found(
    versions: dict[str, str], facts: dict[str, object], expected: list[str]
) -> None:
    assert alone(versions=versions, **facts) == expected


def test_llamafactory_that_waits_for_rays_cpus_for_ever_is_found() -> None:
    new, ray = {"versions": {"llamafactory": "0.9.5"}}, {"USE_RAY": "1"}
    assert alone(**new, variables=ray, cpus=64) == ["warn ray-cpus CPUs"]
    assert alone(**new, variables=ray, cpus=80) == []
    assert alone(**new, variables=ray, gpus=[], driver_cuda="") == ["warn ray-cpus GPUs"]
    no_gpu = {**ray, **visible(""), "NPROC_PER_NODE": ""}
    assert alone(**new, variables=no_gpu, driver_cuda="") == ["warn ray-cpus GPUs"]
    assert alone(**new, gpus=[], driver_cuda="") == []


def test_settings_of_the_training_that_lose_its_model_or_output_are_found() -> None:
    def zero(stage: str, gathers: str) -> list[str]:
        return alone(training={"zero_stage": stage, "gather_16bit": gathers})

    assert zero("3", "false") == ["warn zero3-no-model stage3_gather_16bit_weights_on_model_save"]
    assert zero("3", "true") == zero("2", "false") == []
    relative, output = ["warn output-relative output_dir"], {"output_dir": "saves/x"}
    assert alone(training={**output, "ray_run_name": "x"}) == relative
    assert alone(training=output, variables={"USE_RAY": "1"}) == relative
    assert alone(training=output) == []


def test_what_the_system_gives_too_little_of_is_found() -> None:
    for name, enough, kind in (
        ("nofile", 1024, "few-files ulimit -n"),
        ("shm", 512 << 20, "small-shm /dev/shm"),
        ("memlock", 1 << 30, "memlock ulimit -l"),
    ):
        assert alone(limits={name: enough - 1}) == [f"warn {kind}"]
        assert alone(limits={name: enough}) == []
    assert alone(limits={"nofile": -1}) == alone(limits={"memlock": -1}) == [], "no limit"
    ethernet = {"NCCL_IB_DISABLE": "1"}
    assert alone(limits={"memlock": 64 << 10}, variables=ethernet) == []
    assert alone(limits={"memlock": 64 << 10, "hcas": 0}) == []


def test_a_clock_that_is_off_is_found_beside_the_store_and_beside_another_node() -> None:
    for seconds, level in ((1.1, "warn"), (-30.0, "warn"), (30.1, "fail"), (-31.0, "fail")):
        assert planted(clock=seconds) == [f"{level} clock the clock"] * 2
        assert alone(clock=seconds) == [f"{level} clock the clock"]
    nodes = [n | {"clock": clock} for n, clock in zip(pair(), (-0.8, 0.8), strict=True)]
    assert [f.nodes for f in found(*nodes)] == [("n0", "n1")]
    assert planted(clock=1.0) == planted(clock=None) == []


def test_machines_that_share_a_name_an_id_or_an_address_are_found() -> None:
    assert planted(host="gpu0") == ["warn identity-shared the host name"]
    assert planted(machine="0" * 32) == ["warn identity-shared /etc/machine-id"]
    assert planted(host="gpu0", machine="0" * 32, boot="boot-0") == [], "containers of one machine"
    bridged = {"addresses": ["172.17.0.2"]}
    assert on_both(**bridged) == ["warn identity-shared the address of the host's name"]
    assert on_both(**bridged, boot="boot-0") == [], "namespaces of one machine"
    assert on_both(addresses=["127.0.1.1"]) == []


def disk(path: str = "/data/out", *seen: str, server: str = "") -> dict[str, object]:
    return {path: {"nonce": "nonce1", "seen": [*seen, "nonce1"], "server": server}}


def test_another_output_directory_or_base_model_is_found() -> None:
    first, second = pair()
    second["output_dirs"] = disk("/scratch/out")
    assert kinds(first, second) == ["warn output-differs output_dir"]
    one = [n | {"boot": "boot", "network": "4026531840"} for n in (first, second)]
    assert kinds(*one) == [], "two nodes of one machine cannot have a disk each under one name"
    for digest in ("fedcba9876543210", ""):
        assert planted(digest=digest) == ["warn model-differs the base model"]


def test_one_path_that_is_one_disk_for_some_nodes_only_is_found() -> None:
    first, second = pair()
    third = pair()[1] | {"node": "n2", "host": "gpu2", "machine": "2" * 32, "boot": "boot-2"}
    third["addresses"] = ["10.0.0.3"]
    third["output_dirs"] = {"/data/out": {"nonce": "nonce2", "seen": ["nonce0", "nonce2"]}}
    for node, rank in ((first, 0), (second, 1), (third, 2)):
        node["variables"] |= {"NNODES": "3", "NODE_RANK": str(rank)}
    (one,) = found(first, second, third)
    assert (written(one), one.exit_code) == ("fail disk-differs /data/out", STORAGE)
    assert one.what == "one disk for n0, n2, another for n1"
    third["output_dirs"]["/data/out"]["seen"] = ["nonce2"]
    assert found(first, second, third) == []


def test_a_disk_that_nodes_share_is_sound_unless_they_write_the_same_names() -> None:
    shared, each = disk("/data/out", "nonce0"), {"save_on_each_node": "true"}
    assert planted(output_dirs=shared) == planted(training=each) == planted(uid=1001) == []
    assert planted(output_dirs=shared, training=each) == ["fail disk-shared /data/out"]
    assert planted(output_dirs=shared, uid=1001) == ["warn users-differ /data/out"]
    assert planted(output_dirs=disk(server="nfs4")) == ["fail disk-differs /data/out"]
    tried = disk("/data/out", "nonce0", server="fuse.bindfs")
    assert planted(output_dirs=tried) == [], "it was tried"


def test_what_the_probe_gathers_is_read(tmp_path: Path) -> None:
    raw = probe.gather([str(tmp_path)], "n0")
    node = read_facts(raw)
    assert (node.name, node.host, node.python) == ("n0", raw["host"], raw["python"])
    assert node.gpus == tuple(raw["gpus"])
    assert node.output_dirs[str(tmp_path)].nonce in node.output_dirs[str(tmp_path)].seen
    assert node.limits["nofile"] > 0
    added = {"training", "clock"}  # by doctor, from the training's file and from the store
    assert {field.name for field in fields(NodeFacts)} - {"name"} - added <= raw.keys()
    assert pair()[0].keys() - added <= raw.keys()


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
