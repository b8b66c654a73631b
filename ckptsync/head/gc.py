"""Retention over a store: decide, mark what no rule keeps, withdraw or remove what is marked.

A store can hold many runs, and a fault in one must not stop retention in the others: it becomes a
`FailedLocation`. `retention` decides for each run from summaries and from what trainers and events
measured; `removal` acts on one location. `plan_retention` only says what is due; `apply_retention`
does it. Killed at any moment and called again, it continues; two at once do what one would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import Summary
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt, NotFound, Unsupported, without_frames
from ckptsync.head.removal import Removal, RemovalOutcome, check_alone, write_tombstone
from ckptsync.head.retention import RetentionDecision, RunEvidence, decide, unreadable_checkpoints
from ckptsync.head.retention_rules import Rules
from ckptsync.plain_json import parse
from ckptsync.records.io import read_record
from ckptsync.records.location_status import record_names
from ckptsync.records.manifest import Manifest
from ckptsync.records.manifest_groups import locate_files
from ckptsync.records.save_decisions import Tombstone
from ckptsync.records.store_paths import records_prefix
from ckptsync.stores.clock import store_now
from ckptsync.stores.contract import Store, read_all

TRAINER_STATE = "trainer_state.json"
_STATE_LIMIT = 256 << 20
_MOST = 200  # names of metrics that are kept of one checkpoint


@dataclass(frozen=True, slots=True)
class RetentionRequest:
    """What retention to apply: rules by a run's name, the grace period in seconds, and which run.

    An empty ``run`` means all runs.
    """

    rules: Callable[[str], Rules]
    grace: float = 86400.0
    run: str = ""


@dataclass(frozen=True, slots=True)
class PlannedRemoval:
    """The decision on one location, and the files and bytes that would be deleted."""

    decision: RetentionDecision
    summary: Summary
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class FailedLocation:
    """The error of a location, or of a whole run (``location`` is empty)."""

    run: str
    location: str
    error: CkptsyncError

    def __post_init__(self) -> None:
        """Drop the frames of the error's traceback, which hold what was read."""
        object.__setattr__(self, "error", without_frames(self.error))


@dataclass(frozen=True, slots=True)
class RetentionResult:
    """What was decided of all locations, what was done, and which locations failed."""

    planned: tuple[PlannedRemoval, ...] = ()
    done: tuple[RemovalOutcome, ...] = ()
    failed: tuple[FailedLocation, ...] = ()


def plan_retention(
    store: Store,
    request: RetentionRequest,
    now: float,
    cache: Cache | None = None,
    metrics: TrainerMetrics | None = None,
) -> RetentionResult:
    """Return the decision on each location, also "nothing" and "wait"; write nothing in the store.

    Of a run without rules only locations whose removal has begun are planned. A run whose metrics
    cannot be read is in ``failed``; they are read only for ``keep_best``. ``now``: seconds on the
    store's clock. Raise StoreError if the store cannot be listed.
    """
    metrics = metrics or TrainerMetrics(store)
    catalogue = read_catalogue(store, cache, request.run)
    runs: dict[str, list[Summary]] = {}
    for summary in catalogue.summaries:
        # Without a rule another head's marks stay: only a removal that has begun is finished.
        if request.rules(summary.run) != Rules() or (summary.begun and not summary.shards_deleted):
            runs.setdefault(summary.run, []).append(summary)
    planned: list[PlannedRemoval] = []
    failed: list[FailedLocation] = []
    for run, locations in runs.items():
        try:
            rules = request.rules(run)
            best = metrics.values(locations, rules.keep_best.metric) if rules.keep_best else {}
            evidence = RunEvidence(best, unreadable_checkpoints(catalogue.faults, run))
            by_name = {s.location: s for s in locations}
            decisions = decide(locations, rules, evidence, now, request.grace)
            planned += [_sized(decision, by_name[decision.location]) for decision in decisions]
        except CkptsyncError as e:  # noqa: PERF203 - a run costs round trips
            failed.append(FailedLocation(run, "", e))
    return RetentionResult(tuple(planned), (), tuple(failed))


def apply_retention(
    store: Store,
    request: RetentionRequest,
    cache: Cache | None = None,
    progress: Callable[[int], object] = lambda _: None,
    is_over: Callable[[], bool] = lambda: False,
) -> RetentionResult:
    """Mark, withdraw and remove what is due; return what was planned, done, and failed.

    One location's failure stops no other. Each removal waits `Store.late` seconds.

    ``progress`` gets the bytes of each deleted file. ``is_over`` is asked after each location once
    something was done or failed: if true, the others are left to the next call. Raise StoreError if
    the store cannot be listed, or its clock not read.
    """
    cache = cache or Cache()
    metrics, removal = TrainerMetrics(store), Removal(store, cache, progress)
    plan = plan_retention(store, request, store_now(store), cache, metrics)
    done: list[RemovalOutcome] = []
    failed = list(plan.failed)
    for removal_plan in plan.planned:
        decision = removal_plan.decision
        try:
            if decision.action == "mark":
                done.append(_mark(store, removal_plan, metrics))
            elif decision.action == "withdraw":
                done.append(
                    removal.withdraw(
                        decision.run, decision.location, decision.scope, decision.reason
                    )
                )
            elif decision.action == "remove":
                done.append(removal.remove(decision))
        except CkptsyncError as e:
            failed.append(FailedLocation(decision.run, decision.location, e))
        if (done or failed) and is_over():
            break
    return RetentionResult(plan.planned, tuple(done), tuple(failed))


def _sized(decision: RetentionDecision, summary: Summary) -> PlannedRemoval:
    """Return a decision with the files and bytes that it deletes, now or after its grace period."""
    files = size = 0
    if decision.action not in ("nothing", "withdraw"):
        if not (summary.shards_retired and summary.shards_deleted):
            files, size = summary.files, summary.size
        if decision.scope == "location":
            files, size = files + summary.model_files, size + summary.model_size
    return PlannedRemoval(decision, summary, files, size)


def _mark(store: Store, planned: PlannedRemoval, metrics: TrainerMetrics) -> RemovalOutcome:
    """Write the tombstone that marks a location, or its shards; return the outcome.

    That of shards holds what the trainer measured, so that the best checkpoints are still known.
    Raise ConfigError if another run's records lie among its files; Corrupt, Unsupported or NotFound
    if a manifest cannot be read; StoreError.
    """
    run, location, scope = planned.decision.run, planned.decision.location, planned.decision.scope
    reason = planned.decision.reason
    check_alone(store, run, location)
    manifests = read_manifests(store, planned.summary.manifests)
    measured = (metrics.of(planned.summary) or {}) if scope == "shards" else {}
    write_tombstone(store, manifests, scope, "marked", reason=reason, metrics=measured)
    return RemovalOutcome(run, location, "marked", scope, reason, planned.files, planned.size)


def read_manifests(store: Store, names: Iterable[str]) -> dict[str, Manifest]:
    """Read manifests; return them by name, without ``names`` that are of no manifest.

    Raise Corrupt, Unsupported, NotFound or StoreError at the first that cannot be read.
    """
    records = {name: read_record(store, parsed) for name, parsed in record_names(names).items()}
    return {name: r for name, r in records.items() if isinstance(r, Manifest)}


class TrainerMetrics:
    """What events and trainers measured of checkpoints; each `trainer_state.json` is read once."""

    def __init__(self, store: Store) -> None:
        """Read nothing yet: `values` and `of` read what they need."""
        self._store = store
        self._known: dict[tuple[str, str], Mapping[str, float] | None] = {}

    def values(self, locations: list[Summary], metric: str) -> dict[str, float | None]:
        """Return location → value of a metric: an event's, or else the one that the trainer logged.

        None if a location's metrics cannot be read, or if an event may still measure it: it
        arrived, or was merged or verified, after the last location that an event measured did.
        No entry if it was not measured. Raise StoreError.
        """
        by_event = {
            s.location: dict(s.metrics)[metric] for s in locations if metric in dict(s.metrics)
        }
        measured_last = max((s.arrived for s in locations if s.location in by_event), default=0.0)
        by_location: dict[str, float | None] = dict(by_event)
        for summary in locations:
            if summary.location in by_event:
                continue
            measured = self.of(summary)
            if measured is None or metric in measured:
                by_location[summary.location] = measured[metric] if measured else None
            elif (
                by_event
                and max(summary.arrived, summary.merged, summary.proof.first) > measured_last
            ):
                # its event is yet to come
                by_location[summary.location] = None
        return by_location

    def of(self, summary: Summary) -> Mapping[str, float] | None:
        """Return all metrics that a location's trainer logged; None if they cannot be read.

        If shards are marked, they are read from a tombstone. They are read once, and remembered.
        Raise StoreError if the store does not answer.
        """
        key = (summary.run, summary.location)
        if key not in self._known:
            reader = self._of_tombstone if summary.shards_retired else self._of_state
            try:
                self._known[key] = reader(summary)
            except (NotFound, Corrupt, Unsupported):
                self._known[key] = None
        return self._known[key]

    def _of_state(self, summary: Summary) -> Mapping[str, float]:
        """Return the metrics in a location's `trainer_state.json`; none if it has no such file.

        Raise Corrupt if the bytes are not those of its manifest, and as `read_manifests` does.
        """
        copies = locate_files(read_manifests(self._store, summary.manifests).values()).get(
            TRAINER_STATE
        )
        if not copies:
            return {}
        data = read_all(self._store, copies[0].name, _STATE_LIMIT)
        if digest(data) != copies[0].entry.digest:
            raise Corrupt(f"{copies[0].name}: not the bytes that its node sent")
        return parse_metrics(data, summary.step)

    def _of_tombstone(self, summary: Summary) -> Mapping[str, float]:
        """Return the metrics of the newest tombstone of shards that has any; {} if none has.

        Raise StoreError, or NotFound, Corrupt or Unsupported for a tombstone.
        """
        names = (e.name for e in self._store.names(records_prefix(summary.run, summary.location)))
        stones = [p for p in record_names(names).values() if p.kind == "tombstone"]
        for parsed in sorted(stones, key=lambda p: -p.n):
            stone = read_record(self._store, parsed)
            if isinstance(stone, Tombstone) and stone.scope == "shards" and stone.metrics:
                return stone.metrics
        return {}


def parse_metrics(data: bytes, step: int | None) -> dict[str, float]:
    """Return the last finite value of every metric that was logged up to and with ``step``.

    Without ``step`` all steps count. Only the first `_MOST` names in order are returned. ``data``:
    a `trainer_state.json`, whose ``log_history`` is a list of mappings, in the order of time, with
    ``step`` and what was measured. Raise Corrupt if it is not.
    """
    metrics: dict[str, float] = {}
    try:
        for entry in parse(data, TRAINER_STATE)["log_history"]:
            if step is None or entry.get("step", 0) <= step:
                numbers = {str(k): float(v) for k, v in entry.items() if isinstance(v, int | float)}
                metrics.update({name: n for name, n in numbers.items() if math.isfinite(n)})
    except (KeyError, TypeError, AttributeError, OverflowError) as e:
        raise Corrupt(f"{TRAINER_STATE}: no history of a trainer's: {e}") from e
    return dict(sorted(metrics.items())[:_MOST])
