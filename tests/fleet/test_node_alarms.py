"""Alarms of nodes: when each is raised, and when it is not."""

import pytest

from ckptsync.fleet.heartbeat import Disk
from tests.scenes import DAY, HOUR, NOW, fact, heart, location, raised

HEAD = heart("boss", ("head", "verifier"), verifies=7 * DAY)


def test_a_node_is_lost_after_ten_minutes_and_critical_with_work_in_its_queue() -> None:
    assert not raised(heart(ago=599))
    assert raised(heart(ago=601))["node-lost n0"].severity == "warning"
    lost = raised(heart(ago=601, queue=("run/checkpoint-1", "run/checkpoint-2")))["node-lost n0"]
    assert (lost.severity, lost.since) == ("critical", NOW - 601)
    assert lost.text == "n0: no sign of life for 10m1s, and it has run/checkpoint-1 (and 1 more)"
    assert not raised(heart(ago=601, stopped=True))
    assert not raised(heart(ago=8 * DAY))


def test_a_store_that_had_a_head_and_has_none_is_critical_one_that_never_had_is_not() -> None:
    assert "no-head store" not in raised(heart())
    assert raised(heart(), heart("boss", ("head",), ago=HOUR))["no-head store"].todo == "start ckptsync-head on boss"
    assert "no-head store" in raised(heart(), heart("boss", ("head",), ago=HOUR, stopped=True))
    assert "no-head store" not in raised(heart("boss", ("head",), ago=HOUR), HEAD)


@pytest.mark.parametrize(("free", "is_full"), [(600, False), (499, True)])
def test_a_disk_is_full_when_the_next_save_does_not_fit(free: int, is_full: bool) -> None:  # noqa: FBT001
    two = location(nodes=("n0", "n1"))  # 1000 bytes of two nodes
    found = raised(heart(disk=(Disk("/out", free, 10_000, 0),)), locations=[two])
    said = "n0:/out: 499 B of 10 KB are free, where a save takes 500 B"
    assert [a.text for a in found.values()] == ([said] if is_full else [])


def test_a_disk_without_a_save_is_full_below_two_percent() -> None:
    assert not raised(heart(disk=(Disk("/out", 20, 1000, 0),)))
    assert "disk-full n0:/out" in raised(heart(disk=(Disk("/out", 19, 1000, 0),)))


def test_a_spool_warns_at_nine_tenths_of_its_budget_and_is_critical_beyond() -> None:
    def spool(used: int, budget: int) -> list[str]:
        return [a.severity for a in raised(heart(disk=(Disk("/out", 10**6, 10**6, used, budget),))).values()]

    assert [spool(89, 100), spool(90, 100), spool(100, 100), spool(100, 0)] == [[], ["warning"], ["critical"], []]


def test_a_lost_node_that_has_what_a_save_lacks_is_critical_and_the_save_says_so() -> None:
    locations = [location(word="ARRIVING", ago=2 * HOUR, lost=("rank 3",), awaited=("n9",))]
    found = raised(heart(), heart("n9", ago=2 * HOUR), locations=locations)
    assert found["node-lost n9"].severity == "critical"
    assert found["arriving run/checkpoint-1"].text.endswith("rank 3; n9 does not live")
    found = raised(heart(), heart("n9"), locations=locations)
    assert found["arriving run/checkpoint-1"].text.endswith("rank 3")


def test_a_queue_waits_for_too_long_after_an_hour_and_says_the_nodes_error() -> None:
    assert not raised(heart(queue=("run/checkpoint-1",), oldest=HOUR))
    found = raised(heart(queue=("run/checkpoint-1",), oldest=HOUR + 1, errors=("store: 503",)))
    alarm = found["waiting n0"]
    assert (alarm.text, alarm.since) == ("n0: 1 on the way, the first for 1h; store: 503", NOW - 5 - HOUR - 1)


def test_a_clock_that_is_off_is_said_in_both_directions() -> None:
    assert not raised(heart(), fact(offset=9.0))
    assert "10m ahead of the store's" in raised(heart(), fact(offset=600.0))["clock n0"].text
    assert "20s behind the store's" in raised(heart(), fact(offset=-20.0))["clock n0"].text


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        ("worker: /store: No space left on device", True),
        ("worker: s3://b: 507 XMinioStorageFull", True),
        ("worker: sftp://h: Disk quota exceeded", True),
        ("worker: s3://b: 503 SlowDown", False),
    ],
)
def test_a_write_that_found_no_room_is_said_in_its_own_words(error: str, is_full: bool) -> None:  # noqa: FBT001
    found = raised(heart(errors=(error,)))
    assert [a.text for a in found.values()] == ([f"n0: {error}"] if is_full else [])
    assert not raised(heart(errors=(error,), stopped=True))
