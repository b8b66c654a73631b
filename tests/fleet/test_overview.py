"""The one value, and its one document."""

import json

from ckptsync.catalogue.summary import Proven
from ckptsync.fleet.alarms import Room
from ckptsync.fleet.heartbeat import Disk, Job
from ckptsync.fleet.overview import document
from tests.scenes import DAY, NOW, fact, heart, location, raised, shown

LOCATIONS = [
    location("a/checkpoint-1", model_size=5, kept="for the paper"),
    location("a/checkpoint-2", "DAMAGED", evidence=("m: digest: differs",), proof=Proven(damage=("r",), said=NOW - 9)),
    location("b/checkpoint-1", "RETIRED", retired="keep_last", model_size=24, said=NOW - 5, begun=True),
]


def test_it_has_everything_and_is_plain_json() -> None:
    busy = heart("boss", ("head",), jobs=(Job("consolidate", "a/checkpoint-3", 5, 10, 2.0),))
    disk = Disk("/out", 10**9, 10**10, 0)
    made = document(shown(heart(disk=(disk,)), fact(a="runs"), busy, locations=LOCATIONS, room=Room(10**6, 10**7)))
    assert json.loads(json.dumps(made)) == json.loads(json.dumps(made, default=None))
    assert (made["format"], made["store"], made["at"]) == (1, "/store", NOW)
    assert made["checkpoints"] == {"VERIFIED": 1, "DAMAGED": 1, "RETIRED": 1}
    assert (made["size"], made["model_size"], made["room"]) == (3000, 29, {"free": 10**6, "total": 10**7})
    assert [n["name"] for n in made["nodes"]] == ["boss~head", "n0"]
    assert made["nodes"][0]["jobs"] == (
        {"kind": "consolidate", "subject": "a/checkpoint-3", "done": 5, "total": 10, "seconds": 2.0},
    )
    assert [r["run"] for r in made["runs"]] == ["a", "b"]
    assert [(a["kind"], a["code"], a["subject"]) for a in made["alarms"]] == [("damage", "damaged", "a/checkpoint-2")]


def test_repairs_and_what_is_retired_have_lists_of_their_own() -> None:
    gone = [location("c/checkpoint-1", let_go="old", model_size=7), location("c/checkpoint-2", let_go="old", done=True)]
    made = document(shown(locations=[*LOCATIONS, *gone]))
    [repair] = made["repairs"]
    assert (repair["location"], repair["findings"], repair["said"], repair["changed"]) == (
        "checkpoint-2",
        ["m: digest: differs"],
        NOW - 9,
        None,
    )
    whole = {
        "run": "b",
        "location": "checkpoint-1",
        "scope": "location",
        "reason": "keep_last",
        "since": NOW - 5,
        "begun": True,
        "size": 1024,
    }
    shards = {
        "run": "c",
        "location": "checkpoint-1",
        "scope": "shards",
        "reason": "old",
        "since": None,
        "begun": False,
        "size": 1000,
    }
    assert made["retired"] == [whole, shards]
    assert made["kept"] == [{"run": "a", "location": "checkpoint-1", "reason": "for the paper"}]


def test_a_store_with_nothing_in_it_has_the_same_keys() -> None:
    assert document(shown()).keys() == document(shown(heart(), locations=LOCATIONS)).keys()


def test_a_store_in_which_all_is_well_has_no_alarm() -> None:
    saves = [location(f"run/checkpoint-{n}", ago=900 - 300 * n) for n in range(3)]
    head = heart("boss", ("head", "verifier"), verifies=7 * DAY)
    assert raised(heart(), head, locations=saves, room=Room(10**9, 10**10)) == {}


def test_the_critical_ones_come_first_and_then_the_oldest() -> None:
    nodes = [heart("a", ago=700), heart("b", ago=900, queue=("x/y",)), heart("c", ago=800, queue=("x/y",))]
    assert [a.subject for a in shown(*nodes).alarms] == ["b", "c", "a"]
