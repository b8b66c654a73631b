"""What is said of an event that was given up: one alarm; of one that is tried again: none."""

from dataclasses import replace

from ckptsync.status.live_catalogue import describe
from tests.support.status_examples import NOW, heart, job, location, shown


def test_an_event_that_was_given_up_is_one_alarm_and_one_that_is_tried_again_is_none() -> None:
    running = job("event", "a/checkpoint-4", name="eval (verified)")
    failed = replace(
        running, state="failed", reason="given up after 8 tries: no GPU", hint="run it"
    )
    later = replace(failed, until=NOW + 60)
    s = location()

    def alarms(*entries: object) -> list[tuple[str, str, str]]:
        nodes = [heart(f"h{n}", ("head",), running=(e,)) for n, e in enumerate(entries)]
        seen = shown(*nodes, locations=[s])
        return [(a.subject, a.text, a.todo) for a in seen.alarms if a.code == "event-failed"]

    subject = "a/checkpoint-4 eval (verified)"
    assert alarms(failed, failed) == [(subject, f"{subject}: {failed.reason}", "run it")]
    assert alarms(running, later) == []
    told = [
        describe(e, NOW) for e in shown(heart("h0", ("head",), running=(running, failed))).running
    ]
    assert [text.partition(" (")[0] for text in told] == [
        "h0 runs eval",
        "h0 could not run eval",
    ]
