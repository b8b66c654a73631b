"""What happened to a location, and which event is due.  Pure.

What happened is read from records: that a save was complete, its model was made, and so on, each
with the record that shows it.  An event is done if a record says so of that very record, whichever
head has done it.  What failed is tried `TRIES` times, then given up, until its definition changes.
Of one run, one definition is due for one location at a time: the oldest checkpoint first.

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
    """An event of a location.

    ``of``: the record that shows it, without its directory.  ``at``: seconds on the store's clock.
    """

    event: Event
    of: str
    at: float


@dataclass(frozen=True, slots=True)
class DueEvent:
    """A definition, and what happened to a location.  ``failures``: tries that failed."""

    definition: Definition
    run: str
    location: str
    happened: Occurrence
    failures: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class DueEvents:
    """``now``: at most one of each definition and run; ``given_up``: what failed too often."""

    now: tuple[DueEvent, ...] = ()
    given_up: tuple[DueEvent, ...] = ()


def list_occurrences(s: Summary) -> Iterator[Occurrence]:
    """Yield what records show that happened to a location, in the order of `EVENTS`."""
    if not s.manifests or (s.retired and s.begun) or s.status == "CONFLICT":
        if s.retired:
            yield Occurrence("retired", _base(s.mark), s.marked_at)
        return
    if s.model and not s.unknown:
        yield Occurrence("complete", "", s.arrived)
    is_verified = s.proof.holds and s.model and s.consolidated
    if s.consolidated and not s.proof.damage:
        yield Occurrence("consolidated", _base(s.model_record), s.merged)
    if is_verified:
        yield Occurrence("verified", _base(s.model_record), s.proof.first)
    if s.proof.damage:
        yield Occurrence("damaged", _base(s.proof.damage[0]), s.proof.damaged_at)
    elif s.proof.answered:
        yield Occurrence("repaired", _base(s.proof.answered), s.proof.answered_at)
    if is_verified and s.checkpoint == FINAL:
        yield Occurrence("trained", _base(s.model_record), s.proof.first)
    if s.retired:
        yield Occurrence("retired", _base(s.mark), s.marked_at)


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def due_events(
    definitions: Sequence[Definition], locations: Iterable[Summary], since: Since
) -> DueEvents:
    """Return what is due now, of the locations of a store."""
    runs: dict[str, list[Summary]] = {}
    for s in locations if definitions else ():
        runs.setdefault(s.run, []).append(s)
    now: list[DueEvent] = []
    given_up: list[DueEvent] = []
    for run, its in runs.items():
        own = [d for d in definitions if fnmatchcase(run, d.runs)]
        open_: dict[str, list[tuple[Summary, list[DueEvent]]]] = {d.name: [] for d in own}
        for s in its if own else ():
            events = [*list_occurrences(s)]
            for definition in own:
                if due := [*_open(definition, s, events, since)]:
                    open_[definition.name].append((s, due))
        for waiting in open_.values():
            if len(waiting) > 1:  # the order is that of all of the run's
                order = {s.location: n for n, s in enumerate(by_age(its))}
                waiting.sort(key=lambda pair: order[pair[0].location])
            in_order = [event for _, each in waiting for event in each]
            given_up += [event for event in in_order if event.failures >= TRIES]
            now += [event for event in in_order if event.failures < TRIES][:1]
    return DueEvents(tuple(now), tuple(given_up))


def is_over(definition: Definition, s: Summary, event: Occurrence) -> bool:
    """Return whether an event of a location was done, or given up."""
    its = _tries(definition, s, event)
    digest = definition.digest
    return any(h.done or (h.definition == digest and h.failures >= TRIES) for h in its)


def _tries(definition: Definition, s: Summary, event: Occurrence) -> list[Handled]:
    key = (definition.name, event.event, event.of)
    return [h for h in s.handled if (h.name, h.event, h.of) == key]


def _open(
    definition: Definition, s: Summary, events: Iterable[Occurrence], since: Since
) -> Iterator[DueEvent]:
    """Yield which of ``events``, that happened to a location, were not done, the first first."""
    for event in events:
        if event.event not in definition.on:
            continue
        start = since.get((definition.name, event.event))
        if start is None or event.at < start:
            continue
        its = _tries(definition, s, event)
        if not any(h.done for h in its):
            tries = next((h for h in its if h.definition == definition.digest), None)
            failures, error = (tries.failures, tries.error) if tries else (0, "")
            yield DueEvent(definition, s.run, s.location, event, failures, error)
