"""Everything that is known of a store: its runs, and the one document."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.catalogue.location_summary import Proven
from ckptsync.records.manifest_groups import Sibling
from ckptsync.records.weights_record import (
    GroupValues,
    ModelValues,
    WeightsFinding,
    nonfinite_finding,
)
from ckptsync.status.heartbeat import Disk, Facts
from ckptsync.status.locations import describe_locations, newer_saves
from ckptsync.status.overview import Room, document
from ckptsync.status.run_status import describe_run, interval
from tests.support.status_examples import DAY, HOUR, NOW, fact, heart, job, location, raised, shown

DAMAGE = Proven(damage=("r",), damaged_at=NOW - 9)
GONE: dict[str, Any] = {"retired": "keep_last", "marked_at": NOW - 5, "begun": True}
LOCATIONS = [
    location("b/checkpoint-1", "RETIRED", model_size=24, **GONE),
    location("a/checkpoint-1", model_size=5, kept="for the paper"),
    location("a/checkpoint-2", "DAMAGED", evidence=("m: digest: differs",), proof=DAMAGE),
]


def test_it_has_everything_and_is_plain_json() -> None:
    work = job("consolidate", "a/checkpoint-3", done=5, total=10, since=NOW - 7)
    known = heart(disk=(Disk("/out", 10**9, 10**10, 0),)), heart("boss", ("head",), running=(work,))
    seen = shown(*known, fact(a="runs"), locations=LOCATIONS, room=Room(10**6, 10**7))
    made = document(seen)
    assert made.keys() == document(shown()).keys()
    assert json.loads(json.dumps(made)) == json.loads(json.dumps(made, default=None))
    assert (made["store"], made["at"]) == ("/store", NOW)
    assert made["checkpoints"] == {"VERIFIED": 1, "DAMAGED": 1, "RETIRED": 1}
    assert (made["bytes"], made["model_bytes"]) == (3000, 29)
    assert made["room"] == {"free": 10**6, "total": 10**7}
    assert [n["name"] for n in made["nodes"]] == ["boss~head", "n0"]
    told = {"kind": "consolidate", "subject": "a/checkpoint-3", "done": 5, "total": 10}
    assert made["nodes"][0]["jobs"] == [told | {"seconds": 2.0}]
    assert [r["run"] for r in made["runs"]] == ["a", "b"]
    [alarm] = made["alarms"]
    named = (alarm["kind"], alarm["code"], alarm["subject"])
    assert named == ("damage", "damaged", "a/checkpoint-2")


def test_repairs_and_what_is_retired_have_lists_of_their_own() -> None:
    gone = [
        location("c/checkpoint-1", shards_retired="old", model_size=7),
        location("c/checkpoint-2", shards_retired="old", shards_deleted=True),
    ]
    nodes = [heart(name, lacks={"r": ("m",)}) for name in ("n0", "n9")]
    made = document(shown(*nodes, locations=[*LOCATIONS, *gone]))
    [repair] = made["repairs"]
    assert (repair["location"], repair["findings"]) == ("checkpoint-2", ["m: digest: differs"])
    assert (repair["nodes"], repair["lacking"]) == (["n0"], ["n0"])
    assert (repair["reported"], repair["changed"]) == (NOW - 9, None)
    keys = ("run", "location", "scope", "reason", "since", "begun", "bytes")
    whole = ("b", "checkpoint-1", "location", "keep_last", NOW - 5, True, 1024)
    shards = ("c", "checkpoint-1", "shards", "old", None, False, 1000)
    assert made["retired"] == [dict(zip(keys, one, strict=True)) for one in (whole, shards)]
    assert made["kept"] == [{"run": "a", "location": "checkpoint-1", "reason": "for the paper"}]


def test_the_critical_ones_come_first_and_then_the_oldest() -> None:
    late, later = (heart(n, ago=ago, queue=("x/y",)) for n, ago in (("c", 800), ("b", 900)))
    full = heart("d", disk=(Disk("/out", 19, 1000, 0),))  # nobody knows since when
    alarms = shown(heart("a", ago=700), full, later, late).alarms
    assert [a.subject for a in alarms] == ["b", "c", "d:/out", "a"]


def test_a_run_counts_its_locations_and_names_the_newest_and_the_newest_verified() -> None:
    locations = [
        location("run/checkpoint-1", ago=300, nodes=("n9",), to_open=("config.json",)),
        location("run/checkpoint-2", ago=200, model_size=7),
        location("run/checkpoint-3", "CONSOLIDATED", ago=100),
        location(
            "run/checkpoint-4",
            "INCOMPLETE",
            ago=50,
            missing_lines=("rank 3 of n1",),
            to_open=("config.json",),
        ),
        location("run/checkpoint-5", "RETIRED", ago=10),
        location("run/checkpoint-6", "CONFLICT", ago=5),
    ]
    found = describe_run("run", locations)
    once = dict.fromkeys(("INCOMPLETE", "CONSOLIDATED", "RETIRED", "CONFLICT"), 1)
    assert found.checkpoints == once | {"VERIFIED": 2}
    assert (found.size, found.model_size) == (6000, 7)
    assert (found.nodes, found.unopenable) == (("n0",), ("checkpoint-1",))
    assert found.newest
    assert found.verified
    assert found.unverified
    assert (found.newest.location, found.unverified.location) == ("checkpoint-4", "checkpoint-3")
    assert found.verified.step == 2
    assert [(a.location, a.lost) for a in found.incomplete] == [("checkpoint-4", ("rank 3 of n1",))]


def test_the_oldest_unverified_is_the_one_that_waits_longest_not_that_of_the_least_step() -> None:
    waiting = [
        location("run/checkpoint-9", "COMPLETE", ago=900),
        location("run/checkpoint-1", "CONSOLIDATED", ago=100),
    ]
    proven = location("run/checkpoint-2", "COMPLETE", ago=5000, proof=Proven(holds=True))
    found = describe_run("run", [*waiting, proven])
    assert found.unverified
    assert found.unverified.location == "checkpoint-9"


@given(st.lists(st.floats(0, 1e9), max_size=40))
def test_an_interval_is_known_of_three_and_between_the_extremes(times: list[float]) -> None:
    newest = sorted(set(times))[-8:]
    gaps = [b - a for a, b in pairwise(newest)]
    found = interval(times)
    assert (found is None) == (len(newest) < 3)
    assert found is None or min(gaps) <= found <= max(gaps)


def test_one_long_pause_does_not_change_how_often_checkpoints_come() -> None:
    assert interval([0, 100, 200, 90_000, 90_100, 90_200]) == 100
    assert interval([0, 1, 3, 7, 15]) == 4


def test_a_training_runs_if_any_node_says_so_and_has_ended_where_its_final_model_is() -> None:
    told = [heart(), fact(run="ended"), heart("n1"), fact("n1", run="runs")]
    [running] = shown(*told, locations=[location()]).runs
    facts = fact(run="gone"), fact("n1", run="ended")
    [gone] = shown(told[0], told[2], *facts, locations=[location()]).runs
    [final] = shown(*told, locations=[location(ago=HOUR), location("run/final")]).runs
    [silent] = shown(heart(), locations=[location()]).runs
    assert [r.training for r in (running, gone, final, silent)] == ["runs", "gone", "ended", ""]
    assert final.newest
    assert final.newest.ended == NOW - 60
    before = told[3].content
    assert isinstance(before, Facts)
    for began, state in ((NOW - DAY - 599, "runs"), (NOW - DAY - 600, "ended")):
        trains = {"run": replace(before.trains["run"], began=began)}
        earlier = replace(told[3], content=replace(before, trains=trains))
        [run] = shown(*told[:3], earlier, locations=[location()]).runs
        assert run.training == state


def test_a_later_save_of_a_checkpoint_is_newer_unless_it_is_another_part_or_gone() -> None:
    first, later = location("r/final", ago=900), location("r/final~ab", ago=1)
    named = [location("r/checkpoint-1", ago=950, consolidated=False, whole=9000), first]
    part = replace(first, siblings=(Sibling("final~ab", ("n1",), ()),))
    for saves, newer in (
        ([*named, later], {("r", "final"): "final~ab"}),
        ([*named, replace(later, retired="old")], {}),
        ([named[0], part, later], {}),
    ):
        assert newer_saves(saves) == newer
    incomplete, final = describe_locations("/s/", named)
    assert (incomplete["bytes"], incomplete["model"]) == (9000, None)
    assert (final["bytes"], final["model"]) == (1000, "/s/r/consolidated/final")


def values(*findings: WeightsFinding) -> ModelValues:
    return ModelValues((GroupValues("mlp", 2, 10, 1.5, -1.0, 1.0, 3, 0, 0),), findings=findings)


def test_a_newest_model_with_nan_is_an_alarm_that_names_what_to_resume_from() -> None:
    sound = values()
    sick = values(nonfinite_finding(["model.layers.3.mlp.up_proj.weight"]))
    saves = [
        location("a/checkpoint-1", ago=400, weights=sound),
        location("a/checkpoint-2", ago=300, weights=sick),
        location("a/checkpoint-3", ago=200, weights=sick),
        location("a/checkpoint-4", "COMPLETE", ago=100),
    ]
    [alarm] = raised(heart(), locations=saves).values()
    assert (alarm.code, alarm.subject, alarm.severity) == ("nonfinite", "a", "warning")
    assert alarm.text == (
        "a/checkpoint-3: 1 tensor holds NaN or infinity (model.layers.3.mlp.up_proj.weight)"
    )
    assert "resume it from checkpoint-1, the newest without findings" in alarm.todo
    assert not raised(heart(), locations=[*saves, location("a/checkpoint-5", weights=sound)])
    [alarm] = raised(heart(), locations=saves[1:]).values()
    assert alarm.todo.endswith("resume it from an earlier checkpoint")


def test_what_else_looks_wrong_in_a_newest_model_is_one_alarm() -> None:
    sick = values(
        WeightsFinding("zero", "2 tensors are all zero", 2, ("a", "b")),
        nonfinite_finding(["c"]),
        WeightsFinding("same", "its weights are bit-identical to those of checkpoint-1"),
    )
    saves = [
        location("a/checkpoint-1", ago=400, weights=values()),
        location("a/checkpoint-2", ago=300, weights=sick),
    ]
    alarms = raised(heart(), locations=saves)
    assert {a.code: a.text for a in alarms.values()} == {
        "nonfinite": "a/checkpoint-2: 1 tensor holds NaN or infinity (c)",
        "weights": "a/checkpoint-2: 2 tensors are all zero (a, b); its weights are bit-identical to"
        " those of checkpoint-1",
    }
    assert "without findings is checkpoint-1" in alarms["weights a"].todo
    assert [a.kind for a in alarms.values()] == ["damage", "weights"]
