"""What happened to a location, and which event is due. Pure.

Heads remember nothing of their own. What happened is read from records: that a save was complete,
its model was made, and so on, each with the record that shows it. An event is done if a record says
so of that very record, whichever head has done it. What failed is tried `TRIES` times, then given
up, until its definition changes. Of one run, one definition is due for one location at a time: the
oldest checkpoint first.

An event that is new in a configuration is due for what happens from then on: a store that has a
thousand old checkpoints must not start a thousand evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptsync.catalogue.location_summary import Handled, Summary, by_age
from ckptsync.checkpoint_dirs import FINAL
from ckptsync.events.definitions import Definition
from ckptsync.records.event_record import Event

TRIES = 8  # of an event, from which `service.jobs` waits 1, 2, 4, … minutes, at most an hour
Since = Mapping[tuple[str, str], float]
"""(name, event) → when a head first had it in its configuration, on the store's clock."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An event that happened to a location.

    ``of``: the record that shows it, without its directory. ``at``: seconds on the store's clock.
    """

    event: Event
    of: str
    at: float


@dataclass(frozen=True, slots=True)
class DueEvent:
    """A definition, and what happened to a location; ``failures``: how many tries failed."""

    definition: Definition
    run: str
    location: str
    happened: Occurrence
    failures: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class DueEvents:
    """What is due ``now``, at most one of each definition and run; and what is given up."""

    now: tuple[DueEvent, ...] = ()
    given_up: tuple[DueEvent, ...] = ()


def list_occurrences(summary: Summary) -> Iterator[Occurrence]:
    """Yield what happened to a location by its records, in the order of `EVENTS`.

    Of one in conflict, being deleted, or without manifests, nothing but that it was retired.
    """
    if not summary.manifests or (summary.retired and summary.begun) or summary.status == "CONFLICT":
        if summary.retired:
            yield Occurrence("retired", _file_name(summary.mark), summary.marked_at)
        return
    if summary.model and not summary.unknown:
        yield Occurrence("complete", "", summary.arrived)
    is_verified = summary.proof.holds and summary.model and summary.consolidated
    if summary.consolidated and not summary.proof.damage:
        yield Occurrence("consolidated", _file_name(summary.model_record), summary.merged)
    if is_verified:
        yield Occurrence("verified", _file_name(summary.model_record), summary.proof.first)
    if summary.proof.damage:
        yield Occurrence("damaged", _file_name(summary.proof.damage[0]), summary.proof.damaged_at)
    elif summary.proof.answered:
        yield Occurrence("repaired", _file_name(summary.proof.answered), summary.proof.answered_at)
    if is_verified and summary.checkpoint == FINAL:
        yield Occurrence("trained", _file_name(summary.model_record), summary.proof.first)
    if summary.retired:
        yield Occurrence("retired", _file_name(summary.mark), summary.marked_at)


def _file_name(name: str) -> str:
    """Return the last part of a record's name."""
    return name.rpartition("/")[2]


def due_events(
    definitions: Sequence[Definition], locations: Iterable[Summary], since: Since
) -> DueEvents:
    """Return which events are due now, and which are given up, for the locations of a store.

    Of each definition and run one is due: the first of the oldest checkpoint that is neither done
    nor given up. ``since``: when a head first had each definition and event; else nothing is.
    """
    runs: dict[str, list[Summary]] = {}
    for s in locations if definitions else ():
        runs.setdefault(s.run, []).append(s)
    due_now: list[DueEvent] = []
    given_up: list[DueEvent] = []
    for run, run_locations in runs.items():
        own_definitions = [d for d in definitions if fnmatchcase(run, d.runs)]
        open_events: dict[str, list[tuple[Summary, list[DueEvent]]]] = {
            d.name: [] for d in own_definitions
        }
        for s in run_locations if own_definitions else ():
            events = [*list_occurrences(s)]
            for definition in own_definitions:
                if own_events := [*_list_undone(definition, s, events, since)]:
                    open_events[definition.name].append((s, own_events))
        for waiting in open_events.values():
            if len(waiting) > 1:  # the order is that of all of the run's
                order = {s.location: n for n, s in enumerate(by_age(run_locations))}
                waiting.sort(key=lambda pair: order[pair[0].location])
            in_order = [event for _, each in waiting for event in each]
            given_up += [event for event in in_order if event.failures >= TRIES]
            due_now += [event for event in in_order if event.failures < TRIES][:1]
    return DueEvents(tuple(due_now), tuple(given_up))


def is_over(definition: Definition, summary: Summary, event: Occurrence) -> bool:
    """Return whether an event was done, or failed `TRIES` times as it is defined now."""
    handled = _find_handled(definition, summary, event)
    digest = definition.digest
    return any(h.done or (h.definition == digest and h.failures >= TRIES) for h in handled)


def _find_handled(definition: Definition, summary: Summary, event: Occurrence) -> list[Handled]:
    """Return what was done about this occurrence under the name of this definition."""
    key = (definition.name, event.event, event.of)
    return [h for h in summary.handled if (h.name, h.event, h.of) == key]


def _list_undone(
    definition: Definition, summary: Summary, events: Iterable[Occurrence], since: Since
) -> Iterator[DueEvent]:
    """Yield those of a location's ``events`` that are not done, in their order, also given up ones.

    What happened before the definition had it is left out. Failures are this digest's only.
    """
    for event in events:
        if event.event not in definition.on:
            continue
        start = since.get((definition.name, event.event))
        if start is None or event.at < start:
            continue
        handled = _find_handled(definition, summary, event)
        if not any(h.done for h in handled):
            of_definition = next((h for h in handled if h.definition == definition.digest), None)
            failures, error = (
                (of_definition.failures, of_definition.error) if of_definition else (0, "")
            )
            yield DueEvent(definition, summary.run, summary.location, event, failures, error)
