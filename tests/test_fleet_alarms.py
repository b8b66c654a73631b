"""Each alarm: when it is raised, and when it is not."""

from typing import Any

import pytest

from ckptsync.catalogue.summary import Fault, Proven, Summary
from ckptsync.config.values import ALARMS
from ckptsync.errors import Corrupt
from ckptsync.fleet.alarms import CODES, KINDS, Room
from ckptsync.fleet.heartbeat import Disk
from ckptsync.fleet.told import Known
from ckptsync.records.names import parse_record_name
from ckptsync.stores.contract import Entry
from tests.scenes import DAY, HOUR, NOW, fact, heart, place, raised, shown

HEAD = heart("boss", ("head", "verifier"), verifies=7 * DAY)


def saves(*ago: float, **changes: Any) -> list[Summary]:
    return [place(f"run/checkpoint-{n}", ago=a, **changes) for n, a in enumerate(ago)]


def test_a_store_in_which_all_is_well_has_no_alarm() -> None:
    assert raised(heart(), HEAD, places=saves(900, 600, 300), room=Room(10**9, 10**10)) == {}


def test_damage_is_critical_and_says_what_was_found_and_since_when() -> None:
    hurt = place(word="DAMAGED", evidence=("model: digest: differs",), proof=Proven("r", "damaged", damage=("r",), said=NOW - 50))
    alarm = raised(heart(), places=[hurt])["damaged run/checkpoint-1"]
    assert (alarm.severity, alarm.kind, alarm.since) == ("critical", "damage", NOW - 50)
    assert "model: digest: differs" in alarm.text


def test_damage_that_no_node_can_send_again_says_so() -> None:
    proof = Proven("r", "damaged", damage=("r",), said=NOW - 50)
    hurt = place(word="DAMAGED", evidence=("m: missing",), proof=proof, nodes=("n0", "n1"))
    lacks = {"r": ("m",)}
    one = raised(heart(lacks=lacks), heart("n1"), places=[hurt])["damaged run/checkpoint-1"]
    both = raised(heart(lacks=lacks), heart("n1", lacks=lacks), places=[hurt])["damaged run/checkpoint-1"]
    assert one.text == "run/checkpoint-1: m: missing"
    assert both.text == "run/checkpoint-1: m: missing; n0, n1 no longer have its bytes"


def test_what_cannot_be_read_is_said_of_records_and_of_hearts() -> None:
    name = "run/.ckptsync/checkpoint-1/manifest-n0-1-" + "0" * 16 + ".json"
    record = parse_record_name(name)
    assert record
    odd = Known(Entry(".ckptsync/nodes/odd.json", 1, NOW), Corrupt("no heartbeat"))
    found = raised(odd, faults=(Fault(name, record, Corrupt("bad")),))
    assert {(a.severity, a.subject) for a in found.values()} == {("critical", name), ("warning", "odd")}


def test_an_ambiguous_place_is_said_for_a_week() -> None:
    assert "ambiguous run/checkpoint-1" in raised(places=[place(word="AMBIGUOUS", ago=DAY)])
    assert not raised(places=[place(word="AMBIGUOUS", ago=8 * DAY)])


@pytest.mark.parametrize(("last", "is_stalled"), [(3 * HOUR - 1, False), (3 * HOUR + 1, True), (8 * DAY, False)])
def test_a_run_is_stalled_when_three_times_the_usual_has_passed_and_history_after_a_week(last: float, is_stalled: bool) -> None:  # noqa: FBT001
    found = raised(heart(), places=saves(last + 2 * HOUR, last + HOUR, last))
    assert ("stalled run" in found) == is_stalled
    assert not is_stalled or "no checkpoint for 3h" in found["stalled run"].text


def test_a_run_is_not_stalled_while_a_save_is_on_its_way_its_nodes_are_gone_or_it_has_ended() -> None:
    late = saves(7 * HOUR, 6 * HOUR, 5 * HOUR)
    assert "stalled run" in raised(heart(), places=late)
    assert "stalled run" not in raised(heart(queue=("run/checkpoint-9",), oldest=1.0), places=late)
    assert "stalled run" not in raised(heart(ago=HOUR), places=late)
    assert "stalled run" not in raised(heart("n9"), places=late)
    assert "stalled run" not in raised(heart(), fact(run="ended"), places=late)
    assert "stalled run" not in raised(heart(), places=[*late, place("run/final", ago=4 * HOUR)])


def test_quick_saves_are_not_stalled_within_a_quarter_of_an_hour() -> None:
    assert "stalled run" not in raised(heart(), places=saves(890, 880, 870))
    assert "stalled run" in raised(heart(), places=saves(930, 920, 910))


def test_a_training_that_is_gone_without_having_ended_is_critical() -> None:
    late = saves(7 * HOUR, 6 * HOUR, 5 * HOUR)
    alarm = raised(heart(), fact(run="gone"), places=late)["stalled run"]
    assert (alarm.severity, "its training process is gone" in alarm.text) == ("critical", True)
    assert raised(heart(), fact(run="runs"), places=late)["stalled run"].severity == "warning"


def test_a_node_is_lost_after_ten_minutes_and_critical_with_work_in_its_queue() -> None:
    assert not raised(heart(ago=599))
    assert raised(heart(ago=601))["node-lost n0"].severity == "warning"
    lost = raised(heart(ago=601, queue=("run/checkpoint-1", "run/checkpoint-2")))["node-lost n0"]
    assert (lost.severity, lost.since, "2 on the way (run/checkpoint-1 (and 1 more))" in lost.text) == ("critical", NOW - 601, True)
    assert not raised(heart(ago=601, stopped=True))
    assert not raised(heart(ago=8 * DAY))


def test_a_store_that_had_a_head_and_has_none_is_critical_one_that_never_had_is_not() -> None:
    assert "no-head store" not in raised(heart())
    assert "no-head store" in raised(heart(), heart("boss", ("head",), ago=HOUR))
    assert "no-head store" in raised(heart(), heart("boss", ("head",), ago=HOUR, stopped=True))
    assert "no-head store" not in raised(heart("boss", ("head",), ago=HOUR), HEAD)


@pytest.mark.parametrize(("free", "is_full"), [(600, False), (499, True)])
def test_a_disk_is_full_when_the_next_save_does_not_fit(free: int, is_full: bool) -> None:  # noqa: FBT001
    two = place(nodes=("n0", "n1"))  # 1000 bytes of two nodes
    found = raised(heart(disk=(Disk("/out", free, 10_000, 0),)), places=[two])
    assert ("disk-full n0:/out" in found) == is_full


def test_a_disk_without_a_save_is_full_below_two_percent() -> None:
    assert not raised(heart(disk=(Disk("/out", 20, 1000, 0),)))
    assert "disk-full n0:/out" in raised(heart(disk=(Disk("/out", 19, 1000, 0),)))


def test_a_spool_warns_at_nine_tenths_of_its_budget_and_is_critical_beyond() -> None:
    def spool(used: int, budget: int) -> list[str]:
        return [a.severity for a in raised(heart(disk=(Disk("/out", 10**6, 10**6, used, budget),))).values()]

    assert [spool(89, 100), spool(90, 100), spool(100, 100), spool(100, 0)] == [[], ["warning"], ["critical"], []]


def test_a_store_warns_when_two_checkpoints_with_their_models_no_longer_fit_and_is_critical_at_one() -> None:
    def store(free: int) -> list[str]:
        return [a.severity for a in raised(places=[place(model_size=500)], room=Room(free, 10_000)).values()]

    assert [store(3000), store(2999), store(1499)] == [[], ["warning"], ["critical"]]


def test_a_save_arrives_for_too_long_after_an_hour_and_says_what_is_missing() -> None:
    def arriving(ago: float) -> dict[str, Any]:
        return raised(heart(), places=[place(word="ARRIVING", ago=ago, lost=("__3_0.distcp of n1",))])

    assert not arriving(HOUR - 1)
    assert "__3_0.distcp of n1" in arriving(HOUR + 1)["arriving run/checkpoint-1"].text
    assert not arriving(8 * DAY)


def test_a_queue_waits_for_too_long_after_an_hour_and_says_the_nodes_error() -> None:
    assert not raised(heart(queue=("run/checkpoint-1",), oldest=HOUR))
    found = raised(heart(queue=("run/checkpoint-1",), oldest=HOUR + 1, errors=("store: 503",)))
    assert found["waiting n0"].text == "n0: 1 on the way, the first for 1h; store: 503"


def test_what_waits_for_a_head_that_lives_is_said_once_for_a_run() -> None:
    places = [place("run/checkpoint-1", "COMPLETE", 3 * HOUR), place("run/checkpoint-2", "COMPLETE", 2 * HOUR)]
    found = raised(heart("boss", ("head",)), places=places)
    assert list(found) == ["unconsolidated run"]
    assert found["unconsolidated run"].text == "run/checkpoint-1: unconsolidated 3h after it was whole"
    assert not raised(heart(), places=places), "nobody has promised it"
    assert not raised(HEAD, places=[place(word="COMPLETE", ago=0.9 * HOUR)])


def test_what_waits_for_a_verifier_is_said_too_unless_it_was_proven_unmerged() -> None:
    verifier = heart("boss", ("verifier",))
    assert list(raised(verifier, places=[place(word="CONSOLIDATED", ago=2 * HOUR)])) == ["unverified run"]
    assert not raised(verifier, places=[place(word="COMPLETE", ago=2 * HOUR, proof=Proven(holds=True))])


def test_verification_behind_its_period_is_said_by_the_period_that_a_verifier_promises() -> None:
    old = place(ago=20 * DAY, proof=Proven("r", "ok", "digest", NOW - 8 * DAY, holds=True))
    assert not raised(HEAD, places=[old])
    assert "unread run" in raised(heart("boss", ("verifier",), verifies=6 * DAY), places=[old])
    assert not raised(heart(), places=[old])


def test_a_clock_that_is_off_is_said_in_both_directions() -> None:
    assert not raised(heart(), fact(offset=9.0))
    assert "10m ahead of the store's" in raised(heart(), fact(offset=600.0))["clock n0"].text
    assert "20s behind the store's" in raised(heart(), fact(offset=-20.0))["clock n0"].text


def test_the_critical_ones_come_first_and_then_the_oldest() -> None:
    nodes = [heart("a", ago=700), heart("b", ago=900, queue=("x/y",)), heart("c", ago=800, queue=("x/y",))]
    assert [a.subject for a in shown(*nodes).alarms] == ["b", "c", "a"]


def test_every_kind_has_a_code_and_the_configuration_knows_all_of_them() -> None:
    assert set(CODES.values()) == set(KINDS)
    assert ALARMS == KINDS
