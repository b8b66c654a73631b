"""Which event is due, by tables; under any interleaving of two heads, kills and failures."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    s = replace(s, handled=(done(e),))
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
    assert names(due_events([EVAL], store, OLD).now) == ["sft/checkpoint-1 eval verified"]
    store[0] = replace(store[0], handled=(done(e, failures=TRIES),))
    events = due_events([EVAL], store, OLD)
    assert names(events.now) == ["sft/checkpoint-2 eval verified"]
    assert names(events.given_up) == ["sft/checkpoint-1 eval verified"]
    changed = replace(EVAL, command=("/bin/eval", "--fixed"))
    assert names(due_events([changed], store, OLD).now) == ["sft/checkpoint-1 eval verified"]


def test_what_happened_before_a_head_had_the_event_is_not_due() -> None:
    store = [location(1), location(2)]
    since: dict[tuple[str, str], float] = {("eval", "verified"): store[1].proof.first}
    assert names(due_events([EVAL], store, since).now) == ["sft/checkpoint-2 eval verified"]
    assert not due_events([EVAL], store, {}).now  # not known yet


class Heads:
    """Two heads that look, begin, end, fail and are killed; a store of what they wrote."""

    def __init__(self, steps: list[int], definitions: list[Definition]) -> None:
        self.store = {step: location(step, f"run{step % 2}") for step in steps}
        self.definitions = definitions
        self.views = [list(self.store.values())] * 2
        self.at_work: list[DueEvent | None] = [None, None]
        self.begun: list[str] = []

    def look(self, head: int) -> None:
        self.views[head] = list(self.store.values())

    def begin(self, head: int, which: int) -> None:
        events = due_events(self.definitions, self.views[head], OLD).now
        if self.at_work[head] or not events:
            return
        e = events[which % len(events)]
        if names([e]) in [names([other]) for other in self.at_work if other]:  # its claim
            return
        here = next(s for s in self.store.values() if (s.run, s.location) == (e.run, e.location))
        if is_over(e.definition, here, e.happened):  # --if-due
            return
        # no earlier one of its run and definition is open
        of = [replace(e.definition, runs=e.run)]
        [first] = due_events(of, self.store.values(), OLD).now
        assert names([first]) == names([e])
        self.at_work[head] = e
        self.begun.append(names([e])[0])

    def end(self, head: int, *, fails: bool) -> None:
        e, self.at_work[head] = self.at_work[head], None
        if e is None:
            return
        [(step, s)] = [
            (step, s)
            for step, s in self.store.items()
            if (s.run, s.location) == (e.run, e.location)
        ]
        key = (e.definition.name, e.happened.event, e.happened.of)
        mine = [h for h in s.handled if (h.name, h.event, h.of) == key]
        others = tuple(h for h in s.handled if h not in mine)
        tries = mine[0].failures if mine else 0
        now = replace(done(e), done=not fails, failures=tries + fails)
        self.store[step] = replace(s, handled=(*others, now))

    def kill(self, head: int) -> None:
        self.at_work[head] = None


MOVES = st.tuples(st.sampled_from(["look", "begin", "end", "fail", "kill"]), st.integers(0, 1),
                  st.integers(0, 3))  # fmt: skip


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True),
    st.lists(MOVES, max_size=40),
    st.sampled_from([[EVAL], [ALL], [EVAL, ALL]]),
)
def test_each_event_runs_at_least_once_and_in_order(
    steps: list[int], moves: list[tuple[str, int, int]], definitions: list[Definition]
) -> None:
    heads = Heads(steps, definitions)
    for move, head, which in moves:
        if move == "look":
            heads.look(head)
        elif move == "begin":
            heads.begin(head, which)
        elif move == "kill":
            heads.kill(head)
        else:
            heads.end(head, fails=move == "fail")
    heads.kill(1)
    for _ in range(TRIES * 40):
        heads.end(0, fails=False)
        heads.look(0)
        heads.begin(0, 0)
    assert not due_events(definitions, heads.store.values(), OLD).now
    wanted = {
        f"{s.run}/{s.location} {d.name} {h.event}"
        for s in heads.store.values()
        for d in definitions
        for h in list_occurrences(s)
        if h.event in d.on
    }
    assert set(heads.begun) == wanted
    assert not heads.at_work[0]
