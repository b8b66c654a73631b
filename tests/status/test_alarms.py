"""Alarms of nodes, locations, runs and stores: when each is raised, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptsync.catalogue.location_summary import DamagedFile, Gap, Proven, Summary
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.records.io import Fault
from ckptsync.records.location_status import Status
from ckptsync.records.manifest_groups import Sibling
from ckptsync.records.store_paths import parse_record_name
from ckptsync.status.heartbeat import Disk
from ckptsync.status.nodes import NodeFile
from ckptsync.status.overview import Room
from ckptsync.stores.contract import Entry
from tests.support.status_examples import (
    DAY,
    HOUR,
    NOW,
    fact,
    heart,
    location,
    raised,
    waiting,
)

HEAD = heart("boss", ("head", "verifier"), verifies=7 * DAY)


def test_a_node_is_lost_after_ten_minutes_and_critical_with_work_in_its_queue() -> None:
    assert not raised(heart(ago=599))
    assert raised(heart(ago=601))["node-lost n0"].severity == "warning"
    lost = raised(heart(ago=601, queue=("run/checkpoint-1", "run/checkpoint-2")))["node-lost n0"]
    assert (lost.severity, lost.since) == ("critical", NOW - 601)
    assert lost.text == "n0: no heartbeat for 10m1s; still to upload: run/checkpoint-1 (and 1 more)"
    assert not raised(heart(ago=601, stopped=True))
    assert not raised(heart(ago=8 * DAY))


def test_a_store_that_had_a_head_and_has_none_is_critical_one_that_never_had_is_not() -> None:
    assert "no-head store" not in raised(heart())
    earlier = heart("a", ("head",), ago=2 * HOUR)
    alarm = raised(heart(), earlier, heart("boss", ("head",), ago=HOUR))["no-head store"]
    assert alarm.todo == "start ckptsync-head on boss"
    assert "no-head store" in raised(heart(), heart("boss", ("head",), ago=HOUR, stopped=True))
    assert "no-head store" not in raised(heart("boss", ("head",), ago=HOUR), HEAD)


def test_a_disk_is_full_when_the_next_save_does_not_fit() -> None:
    two = [location(nodes=("n0", "n1"))]  # 1000 bytes of two nodes
    assert not raised(heart(disk=(Disk("/out", 500, 10_000, 0),)), locations=two)
    [alarm] = raised(heart(disk=(Disk("/out", 499, 10_000, 0),)), locations=two).values()
    assert alarm.text == "n0:/out: 499 B of 10 KB are free; a save needs 500 B"


@pytest.mark.parametrize(
    ("disk", "alarms"),
    [
        (Disk("/out", 20, 1000, 0), []),  # without a save it is full below two per cent
        (Disk("/out", 19, 1000, 0), ["disk-full critical"]),
        (Disk("/out", 10**6, 10**6, 89, 100), []),
        (Disk("/out", 10**6, 10**6, 90, 100), ["spool-full warning"]),
        (Disk("/out", 10**6, 10**6, 100, 100), ["spool-full critical"]),
        (Disk("/out", 10**6, 10**6, 100, 0), []),
    ],
)
def test_a_disk_and_a_spool_have_a_limit(disk: Disk, alarms: list[str]) -> None:
    found = raised(heart(disk=(disk,))).values()
    assert [f"{a.code} {a.severity}" for a in found] == alarms
    assert {a.subject for a in found} <= {"n0:/out"}


def test_a_lost_node_that_has_what_a_save_lacks_is_critical_and_the_save_says_so() -> None:
    locations = [
        location(word="INCOMPLETE", ago=2 * HOUR, missing_lines=("rank 3",), awaited_nodes=("n9",))
    ]
    found = raised(heart(), heart("n9", ago=2 * HOUR), locations=locations)
    assert found["node-lost n9"].severity == "critical"
    assert found["incomplete run/checkpoint-1"].text.endswith("rank 3; not running: n9")
    found = raised(heart(), heart("n9"), locations=locations)
    assert found["incomplete run/checkpoint-1"].text.endswith("rank 3")


def test_a_queue_waits_for_too_long_after_an_hour_and_says_the_nodes_error() -> None:
    assert not raised(heart(queue=("run/checkpoint-1",), oldest=HOUR))
    found = raised(heart(queue=("run/checkpoint-1",), oldest=HOUR + 1, errors=("store: 503",)))
    alarm = found["waiting n0"]
    assert alarm.text == "n0: 1 in the upload queue, the oldest for 1h; store: 503"
    assert alarm.since == NOW - 5 - HOUR - 1


def test_what_a_node_does_for_another_run_is_no_alarm_of_a_run() -> None:
    late = heart(queue=("run/checkpoint-1", "other/checkpoint-1"), oldest=HOUR + 1)
    assert "2 in the upload queue" in raised(late)["waiting n0"].text
    assert "1 in the upload queue" in raised(late, run="run")["waiting n0"].text
    assert not raised(late, run="third")
    lost = heart(ago=601, queue=("other/checkpoint-1",))
    assert raised(lost, run="run")["node-lost n0"].severity == "warning"


def test_a_clock_that_is_off_is_said_in_both_directions() -> None:
    assert not raised(heart(), fact(offset=9.0))
    assert "10m ahead of the store's" in raised(heart(), fact(offset=600.0))["clock n0"].text
    assert "20s behind the store's" in raised(heart(), fact(offset=-20.0))["clock n0"].text


def test_models_without_their_configuration_are_said_once_of_a_run() -> None:
    lacking = saves(300, 200, 100, to_open=("config.json",))
    locations = [*lacking, replace(lacking[0], location="checkpoint-9", consolidated=False)]
    alarm = raised(heart(), locations=locations)["no-config run"]
    assert alarm.since == lacking[0].arrived
    assert alarm.text == (
        "run/checkpoint-2 (and 2 more models of this run):"
        " no config.json: from_pretrained cannot open it"
    )


def test_files_that_are_dated_against_their_arrival_or_another_save_are_said_once() -> None:
    ahead = location("run/checkpoint-9", ahead=700.0)
    [alarm] = raised(heart(), locations=[ahead]).values()
    assert (alarm.key, alarm.since) == ("clock run/checkpoint-9", ahead.first_arrival)
    assert alarm.text.endswith("its files are dated 11m40s after their arrival in the store")
    assert alarm.todo.startswith("set the clock of n0, or of its file server, by NTP")
    for well in ({"ahead": 10.0}, {"retired": "old"}, {"first_arrival": NOW - 8 * DAY}):
        assert not raised(heart(), locations=[replace(ahead, **well)])
    third = replace(saves(300, 200, 150, 100)[3], ended=NOW - 220)
    [alarm] = raised(heart(), locations=[*saves(300, 200, 150), third]).values()
    earlier = "checkpoint-2, which has the smaller step"
    assert alarm.text == f"run/checkpoint-3: its files are dated 1m10s before those of {earlier}"


@pytest.mark.parametrize(
    "text", ["No space left on device", "507 XMinioStorageFull", "Disk quota exceeded"]
)
def test_a_write_that_found_no_room_is_said_in_its_own_words(text: str) -> None:
    error = f"worker: /store: {text}"
    assert [a.text for a in raised(heart(errors=(error,))).values()] == [f"n0: {error}"]
    assert not raised(heart(errors=(error,), stopped=True))
    assert not raised(heart(errors=("worker: s3://b: 503 SlowDown",)))


def saves(*ago: float, **changes: Any) -> list[Summary]:
    return [location(f"run/checkpoint-{n}", ago=a, **changes) for n, a in enumerate(ago)]


def test_damage_is_critical_says_what_was_found_and_whether_no_node_can_send_it_again() -> None:
    proof = Proven("r", "damaged", damage=("r",), damaged_at=NOW - 50)
    files = (DamagedFile("m", "file", ("n0", "n1")),)
    hurt = location(
        word="DAMAGED", evidence=("m: missing",), proof=proof, nodes=("n0", "n1"), damaged=files
    )
    lacks = {"r": ("m",)}
    key, text = "damaged run/checkpoint-1", "run/checkpoint-1: m: missing"
    alarm = raised(heart(lacks=lacks), heart("n1"), locations=[hurt])[key]
    assert (alarm.severity, alarm.kind, alarm.since) == ("critical", "damage", NOW - 50)
    assert alarm.text == text
    both = raised(heart(lacks=lacks), heart("n1", lacks=lacks), locations=[hurt])[key]
    assert both.text == f"{text}; n0, n1 no longer have its bytes"
    assert both.todo.startswith(
        "`ckptsync repair run/checkpoint-1 --store /store` copies what other"
    )


SHARD = DamagedFile("checkpoint-1/a", "file", ("n0",))
MODEL = DamagedFile("consolidated/checkpoint-1/m", "model")
RECORD = DamagedFile(".ckptsync/checkpoint-1/manifest-n1-0-0.json", "record", ("n1",))
HEAD_MAKES = "a head makes the consolidated model again from the shards"


@pytest.mark.parametrize(
    ("files", "nodes", "todo"),
    [
        ([SHARD], [heart(), heart("n1")], "n0 uploads again what it still has"),
        ([SHARD], [heart(ago=HOUR), heart("n1")], "start the service on n0: it uploads again"),
        ([SHARD], [heart("n1")], "start the service on n0: it uploads again"),
        ([RECORD], [heart(), heart("n1")], "n1 writes its record again"),
        ([MODEL], [heart(), HEAD], HEAD_MAKES),
        (
            [MODEL],
            [heart()],
            "`ckptsync repair run/checkpoint-1 --store /store`, or a head that you start",
        ),
        ([SHARD, MODEL], [heart(), HEAD], f"n0 uploads again what it still has; {HEAD_MAKES}"),
    ],
)
def test_damage_is_the_heads_or_the_nodes_whose_files_they_are(
    files: list[DamagedFile], nodes: list[NodeFile], todo: str
) -> None:
    hurt = location(word="DAMAGED", nodes=("n0", "n1"), damaged=tuple(files))
    alarm = raised(*nodes, locations=[hurt])["damaged run/checkpoint-1"]
    assert (alarm.severity, alarm.todo[: len(todo)]) == ("critical", todo)
    assert alarm.todo.count("`ckptsync repair run/checkpoint-1 --store /store`") == 1
    if SHARD not in files and RECORD not in files:
        assert "n0" not in alarm.todo


def test_a_node_that_lacks_its_own_shard_is_not_covered_by_another_node() -> None:
    proof = Proven("r", "damaged", damage=("r",), damaged_at=NOW - 50)
    hurt = location(word="DAMAGED", proof=proof, nodes=("n0", "n1"), damaged=(SHARD,))
    nodes = [heart(lacks={"r": (SHARD.name,)}), heart("n1")]
    alarm = raised(*nodes, locations=[hurt])["damaged run/checkpoint-1"]
    assert "n0 no longer has its bytes" in alarm.text
    assert "use an earlier checkpoint" in alarm.todo


def test_a_model_whose_shards_were_deleted_is_made_by_nobody() -> None:
    hurt = location(word="DAMAGED", damaged=(MODEL,), shards_retired="keep-last")
    alarm = raised(heart(), HEAD, locations=[hurt])["damaged run/checkpoint-1"]
    assert "use an earlier checkpoint" in alarm.todo


def test_damage_that_was_repaired_waits_for_the_verifier_and_is_critical_no_longer() -> None:
    done = tuple(replace(file, is_rewritten=True) for file in (SHARD, MODEL))
    hurt = location(word="DAMAGED", damaged=done)
    for known, verifier in ((HEAD, "wait for the verifier, or "), (heart(), "")):
        alarm = raised(known, heart("n1"), locations=[hurt])["damaged run/checkpoint-1"]
        read = f"{verifier}run `ckptsync verify run/checkpoint-1 --store /store`"
        assert (alarm.severity, alarm.todo) == ("warning", read)
    half = location(word="DAMAGED", damaged=(done[0], MODEL))
    assert raised(HEAD, locations=[half])["damaged run/checkpoint-1"].severity == "critical"


def test_what_cannot_be_read_is_said_of_records_and_of_hearts() -> None:
    name = "run/.ckptsync/checkpoint-1/manifest-n0-1-" + "0" * 16 + ".json"
    record = parse_record_name(name)
    assert record
    odd = NodeFile(Entry(".ckptsync/nodes/odd.json", 1, NOW), Corrupt("no heartbeat"))
    found = raised(odd, faults=(Fault(name, record, Corrupt("bad")),))
    said = {(a.severity, a.subject) for a in found.values()}
    assert said == {("critical", name), ("warning", "odd")}


@pytest.mark.parametrize(
    ("record", "error", "todo"),
    [
        ("manifest-n0-1", Corrupt("bad"), "n0 writes its record again"),
        ("manifest-n9-1", Corrupt("bad"), "start the service on n9: it writes its record again"),
        ("model-1", Corrupt("bad"), "`ckptsync repair run/checkpoint-1 --store /store`, or a head"),
        ("report-1", Corrupt("bad"), "the next verification of that checkpoint replaces it"),
        (
            "keep-1",
            Corrupt("bad"),
            "`ckptsync repair run/checkpoint-1 --store /store` keeps the checkp",
        ),
        ("manifest-n0-1", Unsupported("format 9"), "a newer ckptsync wrote it: upgrade this one"),
    ],
)
def test_what_to_do_depends_on_the_record(record: str, error: CkptsyncError, todo: str) -> None:
    name = f"run/.ckptsync/checkpoint-1/{record}-{'0' * 16}.json"
    parsed = parse_record_name(name)
    assert parsed
    faults = (Fault(name, parsed, error),)
    alarm = raised(heart(), heart("n1", lacks={name: ("a",)}), faults=faults)[f"unreadable {name}"]
    assert alarm.todo.startswith(todo)


def test_a_manifest_that_its_own_node_cannot_write_again_is_said_to_be_lost() -> None:
    name = f"run/.ckptsync/checkpoint-1/manifest-n0-1-{'0' * 16}.json"
    parsed = parse_record_name(name)
    assert parsed
    faults = (Fault(name, parsed, Corrupt("bad")),)
    alarm = raised(heart(lacks={name: ("a",)}), faults=faults)[f"unreadable {name}"]
    assert alarm.todo.startswith("n0 cannot write it again")


def test_files_that_no_record_names_and_that_may_run_are_said_of_a_model_that_is_proven() -> None:
    found: dict[str, Any] = {"unnamed": ("a.py",), "unnamed_files": 1, "unnamed_runs": True}
    three = [
        location("run/checkpoint-1", **found),
        location("run/checkpoint-2", **found),
        location("run/checkpoint-3", "DAMAGED", **found),
    ]
    alarm = raised(heart(), locations=three)["unnamed run"]
    assert alarm.text == (
        "run/checkpoint-2: 1 file that no record names: a.py; 1 more of its checkpoints have some"
    )
    assert "unnamed run" not in raised(heart(), locations=three[2:])
    assert not raised(heart(), locations=[location(unnamed=("a",), unnamed_files=1)])


def test_what_an_incomplete_save_needs_depends_on_what_is_missing() -> None:
    def todo(**changes: Any) -> str:
        save = location(word="INCOMPLETE", ago=2 * HOUR, **changes)
        return raised(heart(), locations=[save])["incomplete run/checkpoint-1"].todo

    assert todo(awaited_nodes=("n0",)).startswith("see the errors and notes of n0")
    assert todo(awaited_nodes=("n9",)).startswith("start the service on n9: it uploads the rest")
    assert todo().startswith("`ckptsync push` it from the node")
    assert "repair run/checkpoint-1 --store /store" in todo(gaps=(Gap(1, "a", -1, "n0"),))
    assert todo(siblings=(Sibling("checkpoint-1~a", ("n1",), ()),)).startswith("if they are one")
    assert "ckptsync pull run/checkpoint-1" in todo(unknown=True)


@pytest.mark.parametrize(
    ("word", "ago", "code"),
    [
        ("INCOMPLETE", HOUR - 1, ""),
        ("INCOMPLETE", HOUR + 1, "incomplete"),
        ("INCOMPLETE", 8 * DAY, ""),
        ("CONFLICT", DAY, "conflict"),
        ("CONFLICT", 8 * DAY, ""),
    ],
)
def test_what_is_not_complete_is_said_for_a_week(word: Status, ago: float, code: str) -> None:
    found = raised(heart(), locations=[location(word=word, ago=ago)])
    assert list(found) == ([f"{code} run/checkpoint-1"] if code else [])


LATE = saves(7 * HOUR, 6 * HOUR, 5 * HOUR)


def hourly(last: float, hours: float = 1) -> list[Summary]:
    """Three checkpoints, the last of them so long ago."""
    return saves(last + 2 * hours * HOUR, last + hours * HOUR, last)


@pytest.mark.parametrize(
    ("locations", "known", "severity"),
    [
        # three times the usual, and a week
        (hourly(3 * HOUR - 1), [fact(run="runs")], ""),
        (hourly(3 * HOUR + 1), [fact(run="runs")], "warning"),
        (hourly(6 * DAY), [fact(run="runs")], "warning"),
        (hourly(8 * DAY), [fact(run="runs")], ""),
        # quick saves: a quarter of an hour
        (saves(890, 880, 870), [], ""),
        (saves(930, 920, 910), [], "warning"),
        # without a hook a run has ended after a day, or ten times the usual
        (hourly(0.9 * DAY), [], "warning"),
        (hourly(1.1 * DAY), [], ""),
        (hourly(1.1 * DAY, 5), [], "warning"),
        (hourly(60 * HOUR, 5), [], ""),
        (hourly(1.1 * DAY), [fact(run="runs")], "warning"),
        # it died; a save is sent, the run's nodes are gone, it has ended
        (LATE, [fact(run="gone")], "critical"),
        (LATE, [heart(queue=("run/checkpoint-9",), oldest=1.0)], ""),
        (LATE, [heart(ago=HOUR)], ""),
        (LATE, [fact(run="ended")], ""),
        ([*LATE, location("run/final", ago=4 * HOUR)], [], ""),
    ],
)
def test_a_run_is_stalled_when_checkpoints_stay_away_for_much_longer_than_usual(
    locations: list[Summary], known: list[NodeFile], severity: str
) -> None:
    alarm = raised(heart(), *known, locations=locations).get("stalled run")
    assert (alarm.severity if alarm else "") == severity
    if alarm:
        assert ("the training process died" in alarm.text) == (severity == "critical")


def test_a_stalled_run_is_said_with_what_was_usual_and_only_where_one_of_its_nodes_lives() -> None:
    alarm = raised(heart(), locations=LATE)["stalled run"]
    assert "before that, one every 1h" in alarm.text
    assert alarm.since == NOW - 4 * HOUR
    assert "stalled run" not in raised(heart("n9"), locations=LATE)


def test_a_store_warns_when_two_checkpoints_with_models_do_not_fit_and_is_critical_at_one() -> None:
    for locations, total, free in (
        ([location(model_size=500)], 10_000, (3000, 2999, 1500, 1499)),
        ([], 1000, (20, 19, 10, 9)),
    ):
        found = [raised(locations=locations, room=Room(one, total)).values() for one in free]
        severities = [a.severity for alarms in found for a in alarms]
        assert severities == ["warning", "warning", "critical"]


def test_a_save_that_waits_on_a_live_node_is_late_all_the_same_and_says_why_it_waits() -> None:
    save = location(word="INCOMPLETE", ago=2 * HOUR, missing_lines=("rank 1 of n1",), nodes=("n0",))
    entries = waiting("run/checkpoint-1", reason="a file is still written")
    alarm = raised(heart("n1", running=entries), locations=[save])["incomplete run/checkpoint-1"]
    assert alarm.text.endswith("rank 1 of n1")
    assert alarm.todo.endswith("n1 waits: a file is still written")
    sent = waiting("run/checkpoint-1", state="uploading")
    assert not raised(heart("n1", running=sent), locations=[save])


def test_what_waits_for_a_head_that_lives_is_said_once_for_a_run() -> None:
    locations = [
        location("run/checkpoint-1", "COMPLETE", 3 * HOUR),
        location("run/checkpoint-2", "COMPLETE", 2 * HOUR),
    ]
    [alarm] = raised(heart("boss", ("head",)), locations=locations).values()
    assert alarm.key == "unconsolidated run"
    assert alarm.text == "run/checkpoint-1: still unconsolidated 3h after it was complete"
    assert not raised(heart(), locations=locations), "nobody has promised it"
    assert not raised(HEAD, locations=[location(word="COMPLETE", ago=0.9 * HOUR)])


def test_what_waits_for_a_verifier_is_said_too_unless_it_was_proven_unmerged() -> None:
    verifier, ago = heart("boss", ("verifier",)), 2 * HOUR
    waits = location(word="CONSOLIDATED", ago=ago)
    proven = location(word="COMPLETE", ago=ago, proof=Proven(holds=True))
    assert list(raised(verifier, locations=[waits])) == ["unverified run"]
    assert not raised(verifier, locations=[proven])


def test_verification_behind_its_period_is_said_by_the_period_that_a_verifier_promises() -> None:
    old = location(ago=20 * DAY, proof=Proven("r", "ok", "digest", NOW - 8 * DAY, holds=True))
    assert not raised(HEAD, locations=[old])
    both = [old, location("run/checkpoint-2", proof=Proven("r", "ok", "digest", NOW, holds=True))]
    alarm = raised(heart("boss", ("verifier",), verifies=6 * DAY), locations=both)["unread run"]
    assert alarm.since == NOW - 2 * DAY
    assert alarm.text == "run: one checkpoint was last verified 8d ago; verify.period is 6d"
    assert not raised(heart(), locations=[old])
