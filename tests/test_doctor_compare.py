"""What nodes show beside each other; each kind of fault has its own file beside this one."""

from ckptsync.doctor.compare import alone, compare
from tests.doctor_nodes import found, kinds, pair, planted


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
