"""The one value, and its one document."""

import json

from ckptsync.catalogue.summary import Proven
from ckptsync.fleet.alarms import Room
from ckptsync.fleet.heartbeat import Disk, Job
from ckptsync.fleet.overview import document
from tests.scenes import NOW, fact, heart, place, shown

PLACES = [
    place("a/checkpoint-1", model_size=5),
    place("a/checkpoint-2", "DAMAGED", evidence=("m: digest: differs",), proof=Proven(damage=("r",), said=NOW - 9)),
    place("b/checkpoint-1", "RETIRED", retired="keep_last", model_size=24),
]


def test_it_has_everything_and_is_plain_json() -> None:
    busy = heart("boss", ("head",), jobs=(Job("consolidate", "a/checkpoint-3", 5, 10, 2.0),))
    disk = Disk("/out", 10**9, 10**10, 0)
    made = document(shown(heart(disk=(disk,)), fact(a="runs"), busy, places=PLACES, room=Room(10**6, 10**7)))
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
    made = document(shown(places=PLACES))
    [repair] = made["repairs"]
    assert (repair["place"], repair["findings"], repair["said"], repair["changed"]) == (
        "checkpoint-2",
        ["m: digest: differs"],
        NOW - 9,
        None,
    )
    assert made["retired"] == [{"run": "b", "place": "checkpoint-1", "reason": "keep_last", "size": 1024}]


def test_a_store_with_nothing_in_it_has_the_same_keys() -> None:
    assert document(shown()).keys() == document(shown(heart(), places=PLACES)).keys()
