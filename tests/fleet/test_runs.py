"""Runs, by their checkpoints and trainers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.catalogue.summary import Proven
from ckptsync.fleet.runs import every, run, runs
from tests.scenes import HOUR, NOW, fact, heart, location, shown


def test_a_run_counts_its_locations_and_names_the_newest_and_the_newest_verified() -> None:
    locations = [
        location("run/checkpoint-1", ago=300),
        location("run/checkpoint-2", ago=200, model_size=7),
        location("run/checkpoint-3", "CONSOLIDATED", ago=100),
        location("run/checkpoint-4", "ARRIVING", ago=50, lost=("rank 3 of n1",)),
        location("run/checkpoint-5", "RETIRED", ago=10),
    ]
    found = run("run", locations)
    assert found.checkpoints == {"ARRIVING": 1, "CONSOLIDATED": 1, "VERIFIED": 2, "RETIRED": 1}
    assert (found.size, found.model_size) == (5000, 7)
    assert found.newest
    assert found.verified
    assert found.unverified
    assert (found.newest.location, found.verified.step, found.unverified.location) == ("checkpoint-4", 2, "checkpoint-3")
    assert [(a.location, a.lost) for a in found.arriving] == [("checkpoint-4", ("rank 3 of n1",))]


def test_the_oldest_unverified_is_the_one_that_waits_longest_not_the_one_of_the_least_step() -> None:
    waiting = [location("run/checkpoint-9", "COMPLETE", ago=900), location("run/checkpoint-1", "CONSOLIDATED", ago=100)]
    proven = location("run/checkpoint-2", "COMPLETE", ago=5000, proof=Proven(holds=True))
    found = run("run", [*waiting, proven])
    assert found.unverified
    assert found.unverified.location == "checkpoint-9"


def test_a_run_whose_checkpoints_all_went_has_no_newest() -> None:
    found = run("run", [location(word="RETIRED")])
    assert (found.newest, found.verified, found.unverified, found.nodes) == (None, None, None, ())


@given(st.lists(st.floats(0, 1e9), max_size=40))
def test_how_often_checkpoints_come_is_said_of_three_or_more_and_lies_between_the_extremes(times: list[float]) -> None:
    newest = sorted(set(times))[-8:]
    gaps = [b - a for a, b in pairwise(newest)]
    found = every(times)
    assert (found is None) == (len(newest) < 3)
    assert found is None or min(gaps) <= found <= max(gaps)


def test_one_long_pause_does_not_change_how_often_checkpoints_come() -> None:
    assert every([0, 100, 200, 90_000, 90_100, 90_200]) == 100


def test_runs_go_by_name_and_are_apart() -> None:
    found = runs([location("b/checkpoint-1"), location("a/checkpoint-1"), location("a/checkpoint-2")], ())
    assert [(r.run, r.checkpoints["VERIFIED"]) for r in found] == [("a", 2), ("b", 1)]


def test_a_training_runs_if_any_node_says_so_and_has_ended_where_its_final_model_is() -> None:
    told = [heart(), fact(run="ended"), heart("n1"), fact("n1", run="runs")]
    [running] = shown(*told, locations=[location()]).runs
    [gone] = shown(told[0], fact(run="gone"), told[2], fact("n1", run="ended"), locations=[location()]).runs
    [final] = shown(*told, locations=[location(ago=HOUR), location("run/final")]).runs
    [silent] = shown(heart(), locations=[location()]).runs
    assert [r.training for r in (running, gone, final, silent)] == ["runs", "gone", "ended", ""]
    assert final.newest
    assert final.newest.ended == NOW - 60
