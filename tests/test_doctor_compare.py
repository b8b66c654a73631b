"""What nodes show beside each other; each kind of fault has its own file beside this one."""

import os
import subprocess
import sys

import pytest

from ckptsync.doctor.compare import alone, compare
from tests.doctor_nodes import found, kinds, pair, planted
from tests.doctor_real import PROJECT


def test_nothing_is_found_on_a_sound_pair() -> None:
    assert found(*pair()) == []
    assert found(*reversed(pair())) == []


def test_nothing_is_found_on_a_sound_node_that_waits_for_others() -> None:
    for node in pair():
        assert alone(node) == ()


def test_what_says_nothing_is_no_fault() -> None:
    assert compare([]) == ()
    assert compare([{}, {"node": 3, "gpus": "many", "variables": ["NNODES"], "places": None, "clock": True}]) == ()


def test_several_processes_of_one_node_are_one_node() -> None:
    first, second = pair()
    assert found(first, {**first, "versions": {}}, second) == []


def test_failures_come_first_and_each_once() -> None:
    levels = [level for level, _, _ in planted(versions={"torch": "2.7.1", "peft": "0.16.0"}, clock=40.0, gpus=["NVIDIA A100"] * 8)]
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
    assert alone(pair()[0]) == ()


def test_it_needs_nothing_but_the_standard_library() -> None:
    """Ray's workers, and its driver, may have nothing of what ckptsync depends on."""
    ask = "import ckptsync.doctor.compare as c, ckptsync.doctor.probe as p; print(c.compare([p.gather()]) is not None)"
    bare = [sys.executable, "-S", "-c", ask]
    done = subprocess.run(
        bare, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(PROJECT), "PATH": os.environ["PATH"]}
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("odd", [10**400, float("inf"), float("nan"), "²", "1" * 30, ["²"], {"a": {}}, "\0", None, True])
def test_whatever_a_node_says_the_others_are_compared(odd: object) -> None:
    for key in pair()[1]:
        alone(pair()[1] | {key: odd})
        assert isinstance(compare([pair()[0], pair()[1] | {key: odd}]), tuple)
    for name in pair()[1]["variables"]:
        compare([pair()[0], pair()[1] | {"variables": {**pair()[1]["variables"], name: odd}}])
