"""Which alarms are sent, and when."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.config.schema import KEYS
from ckptsync.status.alarms import (
    CODES,
    HOLD,
    KINDS,
    MOST_OF_CODE,
    Alarm,
    Memory,
    Message,
    Terms,
    decide,
    document,
)

TERMS = Terms(KINDS, 3600.0)
HURT = Alarm("damaged", "run/checkpoint-1", "critical", 5.0, "bytes differ", "repair it")
LATE = Alarm("waiting", "n0", "warning", None, "waits", "wait")


def statuses(
    alarms: list[Alarm], memory: Memory, now: float, terms: Terms = TERMS
) -> tuple[list[str], Memory]:
    decision = decide(alarms, memory, terms, now)
    return [f"{m.status} {m.alarm.code}" for m in decision.messages], decision.if_sent


def test_it_is_told_once_then_again_after_a_while_then_that_it_is_over() -> None:
    said, memory = statuses([HURT], {}, 0.0)
    assert said == ["raised damaged"]
    assert statuses([HURT], memory, 3599.0)[0] == []
    said, memory = statuses([HURT], memory, 3600.0)
    assert said == ["repeated damaged"]
    assert statuses([HURT], memory, 7199.0)[0] == []
    said, memory = statuses([], memory, 4000.0)
    assert said == []
    said, memory = statuses([], memory, 4000.0 + HOLD)
    assert said == ["resolved damaged"]
    assert memory == {}


def test_what_comes_and_goes_is_one_alarm() -> None:
    _, memory = statuses([HURT], {}, 0.0)
    for now in range(1, 1000, 60):
        said, memory = statuses([HURT] if now % 120 == 1 else [], memory, float(now))
        assert said == []


def test_what_becomes_critical_is_told_at_once_and_what_becomes_a_warning_is_not() -> None:
    worse = replace(LATE, severity="critical")
    _, memory = statuses([LATE], {}, 0.0)
    decision = decide([worse], memory, TERMS, 1.0)
    assert decision.messages == (Message("raised", worse, first=0.0),)
    assert statuses([LATE], decision.if_sent, 2.0)[0] == []


def test_kinds_that_nobody_asked_for_are_not_told() -> None:
    assert statuses([HURT, LATE], {}, 0.0, Terms(("late",), 9.0))[0] == ["raised waiting"]


def test_what_could_not_be_told_is_told_the_next_time_with_what_came_since() -> None:
    first = decide([HURT], {}, TERMS, 0.0)
    second = decide([HURT, LATE], first.if_not_sent, TERMS, 1.0)
    assert [m.status for m in second.messages] == ["raised", "raised"]
    over = decide([], decide([], second.if_sent, TERMS, 10.0).if_sent, TERMS, 10.0 + HOLD)
    again = decide([], over.if_not_sent, TERMS, 20.0 + HOLD)
    assert [m.status for m in again.messages] == ["resolved", "resolved"]


def test_a_clock_that_is_set_back_repeats_rather_than_falls_silent() -> None:
    _, memory = statuses([HURT], {}, 10_000.0)
    messages = decide([HURT], memory, TERMS, 5_000.0).messages
    assert messages == (Message("repeated", HURT, first=10_000.0),)


@given(st.lists(st.sets(st.sampled_from([HURT, LATE])), max_size=30), st.floats(1, 200))
def test_every_alarm_that_was_raised_is_resolved(looks: list[set[Alarm]], pause: float) -> None:
    memory: Memory = {}
    standing: set[str] = set()
    for n, alarms in enumerate([*looks, *[set[Alarm]()] * (int(HOLD / pause) + 3)]):
        decision = decide(alarms, memory, Terms(KINDS, 1e9), n * pause)
        memory = decision.if_sent
        for m in decision.messages:
            assert (m.status == "raised") == (m.alarm.key not in standing)
            standing ^= {m.alarm.key}
    assert standing == set()
    assert memory == {}


def test_a_message_is_plain_json_with_a_text_for_people_that_stays_short() -> None:
    many = [replace(HURT, subject=f"run/checkpoint-{n}") for n in range(25)]
    made = document(decide([*many, LATE], {}, TERMS, 7.0).messages, "/store", "boss", 7.0)
    assert json.loads(json.dumps(made)) == made
    first = made["alarms"][0]
    assert (first["status"], first["first"], first["kind"]) == ("raised", 7.0, "damage")
    damaged = [
        "CRITICAL damaged: bytes differ",
        "  since 1970-01-01 00:00 UTC",
        "  to do: repair it",
    ]
    assert made["title"] == "ckptsync: 26 raised (/store)"
    assert made["severity"] == "critical"
    assert made["text"].splitlines() == [
        made["title"],
        *damaged * MOST_OF_CODE,
        "and 22 more damaged: `ckptsync status --store /store` lists what holds",
        "WARNING waiting: waits",
        "  since 1970-01-01 00:00 UTC",
        "  to do: wait",
    ]


def test_a_message_is_as_severe_as_what_holds() -> None:
    over, late = Message("resolved", HURT, 1.0), Message("repeated", LATE, 2.0)
    for messages, severity in (((over, late), "warning"), ((over,), "resolved")):
        assert document(messages, "/store", "boss", 7.0)["severity"] == severity


def test_a_message_of_every_code_in_numbers_stays_short() -> None:
    many = [
        Alarm(code, str(n), "warning", 1e18, "x" * 900, "y") for code in CODES for n in range(9)
    ]
    text = document(decide(many, {}, TERMS, 7.0).messages, "/store", "boss", 7.0)["text"]
    assert len(text) < 12_000
    assert all(f" more {code}: " in text for code in CODES)


def test_an_alert_commands_no_terminal_forges_no_line_and_has_an_end() -> None:
    """Names and errors in a store come from anyone who may write to it."""
    evil = "a\x1b[2J\r\nCRITICAL \u202e\u200b\x9b"
    texts = (evil * 10_000, evil)
    alarms = [Alarm("waiting", f"{n}{evil}", "warning", None, *texts) for n in range(2)]
    told = document(decide(alarms, {}, TERMS, 0.0).messages, "/store", "head", 0.0)
    lines = told["text"].split("\n")
    assert len(lines) == 7
    assert all(line.isprintable() for line in lines)
    values = [value for one in told["alarms"] for value in one.values()]
    assert all(value.isprintable() for value in values if isinstance(value, str))
    assert "\\x1b[2J\\r\\nCRITICAL \\u202e" in lines[1]
    assert len(told["text"]) < 50_000
    assert len({one["key"] for one in told["alarms"]}) == 2


def test_every_kind_has_a_code_and_the_configuration_knows_all_of_them() -> None:
    assert set(CODES.values()) == set(KINDS)
    assert KEYS["alerts.on"].default == list(KINDS)
