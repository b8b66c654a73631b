import pytest

from tests.doctor_nodes import kinds, pair, planted

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
    assert planted(overrides=["/usr/lib/libnccl.so.2.21.5"]) == [("fail", "versions-differ", "libnccl")]
    same = [node | {"overrides": ["/usr/lib/libnccl.so.2.21.5"]} for node in pair()]
    assert kinds(*same) == []


def test_another_minor_python_is_found_and_another_patch_is_not() -> None:
    assert planted(python="3.12.1") == [("fail", "versions-differ", "python")]
    assert planted(python="3.11.9") == []


def test_another_driver_is_a_warning() -> None:
    assert planted(driver="580.65.06") == [("warn", "versions-differ", "the driver")]


def test_a_node_whose_python_is_not_known_is_not_compared() -> None:
    assert planted(versions=dict.fromkeys([*FAIL, *WARN]), builds={"cuda": None}, python="3.12.0") == []


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
