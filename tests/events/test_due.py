"""Which event is due, by tables; under any interleaving of two heads, kills and failures."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ckptsync.catalogue.location_summary import Handled, Proven, Summary
from ckptsync.events.definitions import Definition
from ckptsync.events.due import TRIES, DueEvent, due_events, is_over, list_occurrences
from ckptsync.records.event_record import EVENTS

EVAL = Definition("eval", ("verified",), ("/bin/eval",))
ALL = Definition("all", EVENTS, ("/bin/all",))
OLD: dict[tuple[str, str], float] = {(d.name, event): 0.0 for d in (EVAL, ALL) for event in EVENTS}


def location(step: int, run: str = "sft", **more: Any) -> Summary:
    """A VERIFIED one."""
    name = more.pop("name", f"checkpoint-{step}")
    at = 100.0 * step
    values: dict[str, Any] = {
        "manifests": (f"{run}/.ckptsync/{name}/manifest-n-0-{step:016x}.json",),
        "model_record": f"{run}/.ckptsync/{name}/model-0-{step:016x}.json",
        "proof": Proven(holds=True, first=at + 2, when=at + 2),
        "model": True,
        "consolidated": True,
        "ended": at,
        "first_arrival": at,
        "arrived": at,
        "merged": at + 1,
    }
    values |= {"status": "VERIFIED", **more}
    return Summary(run, name, name, step, **values)


def done(e: DueEvent, *, failures: int = 0, definition: str = "", at: float = 0.0) -> Handled:
    key = (e.definition.name, e.happened.event, e.happened.of)
    return Handled(*key, definition or e.definition.digest, not failures, failures, "no", at)


COMPLETE = location(1, status="COMPLETE", consolidated=False, proof=Proven(), model_record="")
HURT = Proven(damage=("a/report-3-0.json", "a/report-4-0.json"), damaged_at=9.0, holds=False)
MENDED = Proven(holds=True, first=2.0, answered="a/report-4-0.json", answered_at=10.0)


@pytest.mark.parametrize(
    ("s", "events"),
    [
        (replace(location(1), manifests=(), model=False), []),
        (replace(location(1), model=False, consolidated=False, proof=Proven()), []),
        (COMPLETE, [("complete", "")]),
        (replace(COMPLETE, unknown=True), []),
        (
            replace(location(1), proof=Proven()),
            [("complete", ""), ("consolidated", f"model-0-{1:016x}.json")],
        ),
        (
            location(1),
            [("complete", "")]
            + [(event, f"model-0-{1:016x}.json") for event in ("consolidated", "verified")],
        ),
        (replace(location(1), proof=HURT), [("complete", ""), ("damaged", "report-3-0.json")]),
        (
            replace(location(1), proof=MENDED, model_record=""),
            [
                ("complete", ""),
                ("consolidated", ""),
                ("verified", ""),
                ("repaired", "report-4-0.json"),
            ],
        ),
        (
            location(1, name="final", model_record="m"),
            [("complete", "")]
            + [(event, "m") for event in ("consolidated", "verified", "trained")],
        ),
        (
            replace(COMPLETE, retired="old", mark="a/tombstone-0-0.json"),
            [("complete", ""), ("retired", "tombstone-0-0.json")],
        ),
        (
            replace(COMPLETE, retired="old", mark="a/tombstone-0-0.json", begun=True),
            [("retired", "tombstone-0-0.json")],
        ),
        (replace(COMPLETE, status="CONFLICT"), []),
    ],
)
def test_what_happened_is_read_from_records(s: Summary, events: list[tuple[str, str]]) -> None:
    assert [(h.event, h.of) for h in list_occurrences(s)] == events


def names(found: Iterable[DueEvent]) -> list[str]:
    return [f"{e.run}/{e.location} {e.definition.name} {e.happened.event}" for e in found]


def test_the_oldest_checkpoint_is_first_and_runs_do_not_wait_for_each_other() -> None:
    store = [location(3), location(1), location(2), location(7, "other")]
    assert names(due_events([EVAL], store, OLD).now) == [
        "sft/checkpoint-1 eval verified",
        "other/checkpoint-7 eval verified",
    ]
    only = replace(EVAL, runs="ot*")
    assert names(due_events([only], store, OLD).now) == ["other/checkpoint-7 eval verified"]


def test_what_was_done_is_done_for_that_record_alone() -> None:
    s = location(1)
    [e] = due_events([EVAL], [s], OLD).now
    s = replace(s, handled=(done(e, failures=1, definition="0" * 16), done(e)))
    assert not due_events([EVAL], [s], OLD).now
    changed = replace(EVAL, command=("/bin/other",))
    assert not due_events([changed], [s], OLD).now
    assert due_events([replace(EVAL, name="again")], [s], OLD | {("again", "verified"): 0.0}).now
    anew = replace(s, model_record="sft/.ckptsync/checkpoint-1/model-1-0.json")
    assert due_events([EVAL], [anew], OLD).now


def test_what_failed_too_often_lets_the_next_go_on_until_its_definition_changes() -> None:
    store = [location(1), location(2)]
    [e] = due_events([EVAL], store, OLD).now
    store[0] = replace(store[0], handled=(done(e, failures=TRIES - 1),))
    assert not is_over(EVAL, store[0], e.happened)
    assert names(due_events([EVAL], store, OLD).now) == ["sft/checkpoint-1 eval verified"]
    store[0] = replace(store[0], handled=(done(e, failures=TRIES),))
    events = due_events([EVAL], store, OLD)
    assert names(events.now) == ["sft/checkpoint-2 eval verified"]
    assert names(events.given_up) == ["sft/checkpoint-1 eval verified"]
    changed = replace(EVAL, command=("/bin/eval", "--fixed"))
    assert is_over(EVAL, store[0], e.happened)
    assert not is_over(changed, store[0], e.happened)
    assert names(due_events([changed], store, OLD).now) == ["sft/checkpoint-1 eval verified"]


def test_what_happened_before_a_head_had_the_event_is_not_due() -> None:
    store = [location(1), location(2)]
    since: dict[tuple[str, str], float] = {("eval", "verified"): store[1].proof.first}
    assert names(due_events([EVAL], store, since).now) == ["sft/checkpoint-2 eval verified"]
    assert not due_events([EVAL], store, {}).now  # not known yet
