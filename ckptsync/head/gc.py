"""Retention, as a tick: decide for every run, mark what is to go, take back what is kept after all, remove what has been marked for long enough.

Killed anywhere and called again, it goes on.  Two at once do what one would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptsync.catalogue.reading import Cache, read
from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.errors import CkptsyncError
from ckptsync.head import metrics, tombs
from ckptsync.head.clearing import Told, check_alone
from ckptsync.head.marking import Step, steps
from ckptsync.head.metrics import Measured
from ckptsync.head.removing import Removal, Road, nobody, remove, take_back
from ckptsync.head.retaining import Decision, Evidence, decide, doubtful
from ckptsync.head.rules import Rules
from ckptsync.head.tombs import Grave
from ckptsync.stores.contract import Store

Outcome = Literal["marked", "removed", "taken back", "waits", "gone", "marked again"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What an operator wants: ``rules`` by a run's name, ``grace`` in seconds; ``run``: of that one only."""

    rules: Callable[[str], Rules]
    grace: float = 86400.0
    run: str = ""


@dataclass(slots=True)
class Memory:
    """What may be forgotten at any time: it saves reading again."""

    cache: Cache = field(default_factory=Cache)
    measured: Measured = field(default_factory=Measured)


@dataclass(frozen=True, slots=True)
class Planned:
    """One location: what becomes of it, and what is due now; files and bytes of what would go."""

    decision: Decision
    step: Step
    seen: Summary
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class Deed:
    """What was done about a location; ``reason`` of it, or of its waiting."""

    run: str
    location: str
    outcome: Outcome
    scope: str
    reason: str
    files: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A location, or a whole run (``location`` is empty), that it could not be done for."""

    run: str
    location: str
    error: CkptsyncError


@dataclass(frozen=True, slots=True)
class Swept:
    """``planned``: what the tick began with, of all locations; ``done``: what it did."""

    planned: tuple[Planned, ...] = ()
    done: tuple[Deed, ...] = ()
    failed: tuple[Failed, ...] = ()


def plan(store: Store, asked: Asked, now: float, memory: Memory | None = None) -> Swept:
    """What is due, with nothing written.  ``now``: seconds on the store's clock.  Raises StoreError if the store cannot be listed."""
    memory = memory or Memory()
    catalogue = read(store, memory.cache, asked.run)
    planned: list[Planned] = []
    failed: list[Failed] = []
    for run, locations in _runs(catalogue, asked).items():
        try:
            rules = asked.rules(run)
            decisions = decide(locations, rules, _evidence(store, locations, catalogue, rules, memory), now)
            planned += _planned(decisions, locations, rules, asked.grace, now)
        except CkptsyncError as e:  # noqa: PERF203 - a run costs round trips
            failed.append(Failed(run, "", e))
    return Swept(tuple(planned), (), tuple(failed))


def endless() -> bool:
    """There is time for all of it."""
    return False


def tick(
    store: Store, asked: Asked, memory: Memory | None = None, told: Told = nobody, is_over: Callable[[], bool] = endless
) -> Swept:
    """Do what is due.  One location's failure stops no other.  Raises StoreError as `plan` does.

    ``told`` hears of the bytes of each file that is gone.  ``is_over`` is asked after each location: then the rest is left to the next tick.
    """
    memory = memory or Memory()
    now = tombs.store_now(store)
    found = plan(store, asked, now, memory)
    done: list[Deed] = []
    failed = list(found.failed)
    for one in found.planned:
        try:
            done += _done(store, one, memory, Road(memory.cache, told))
        except CkptsyncError as e:
            failed.append(Failed(one.step.run, one.step.location, e))
        if (done or failed) and is_over():
            break
    return Swept(found.planned, tuple(done), tuple(failed))


def _runs(catalogue: Catalogue, asked: Asked) -> dict[str, list[Summary]]:
    """Where nothing is asked for, another head's rules are not ours to undo: only what is half removed is finished."""
    found: dict[str, list[Summary]] = {}
    for seen in catalogue.summaries:
        if asked.rules(seen.run) != Rules() or (seen.begun and not seen.done):
            found.setdefault(seen.run, []).append(seen)
    return found


def _evidence(store: Store, locations: Sequence[Summary], catalogue: Catalogue, rules: Rules, memory: Memory) -> Evidence:
    best = rules.keep_best
    known = metrics.of_locations(store, locations, best.metric, memory.measured) if best else {}
    return Evidence(known, doubtful(catalogue.faults, locations[0].run))


def _planned(
    decisions: Sequence[Decision], locations: Sequence[Summary], rules: Rules, grace: float, now: float
) -> Iterable[Planned]:
    by_name = {s.location: s for s in locations}
    for decision, step in zip(decisions, steps(decisions, by_name, grace, now), strict=True):
        seen = by_name[decision.location]
        yield Planned(decision, replace(step, is_last_too=rules.shards == 0), seen, *_going(seen, step))


def _going(seen: Summary, step: Step) -> tuple[int, int]:
    if step.deed in ("nothing", "take-back"):
        return 0, 0
    own = (0, 0) if seen.let_go and seen.done else (seen.files, seen.size)
    return own if step.scope == "shards" else (own[0] + seen.model_files, own[1] + seen.model_size)


def _done(store: Store, one: Planned, memory: Memory, road: Road) -> Iterable[Deed]:
    step = one.step
    if step.deed in ("nothing", "wait"):
        return
    if step.deed == "mark":
        yield _marked(store, one, memory)
        return
    yield _deed(step, take_back(store, step, road) if step.deed == "take-back" else remove(store, step, road))


def _marked(store: Store, one: Planned, memory: Memory) -> Deed:
    step = one.step
    check_alone(store, step.run, step.location)
    seen = one.seen
    manifests = {name: metrics.read_manifests(store, [name])[0] for name in seen.manifests}
    measured = (metrics.of_location(store, seen, memory.measured) or {}) if step.scope == "shards" else {}
    tombs.write(store, Grave(manifests, step.scope, step.reason, measured), "said")
    return Deed(step.run, step.location, "marked", step.scope, step.reason, one.files, one.size)


def _deed(step: Step, found: Removal) -> Deed:
    reason = found.reason or step.reason
    return Deed(step.run, step.location, found.outcome, step.scope, reason, found.cleared.files, found.cleared.size)
