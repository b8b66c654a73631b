"""The status of each run: its newest checkpoints, sizes, interval, and whether it trains.

A store has locations, and people ask about trainings; so this summarises the locations of a run and
the trainings that its nodes announce. Pure; times are seconds on the store's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptsync.catalogue.location_summary import Summary, by_age, times_written
from ckptsync.records.location_status import STATUSES, Status
from ckptsync.records.manifest_groups import Sibling
from ckptsync.status.nodes import Node

FINAL = "final"  # what the trainer leaves in a run's root when it has ended
RECENT = 8  # checkpoints whose times say how often they come
LEAST = 3  # of them, before anything is said
SAME = 600.0  # seconds within which the nodes of one training begin


@dataclass(frozen=True, slots=True)
class Point:
    """A location, with the times of its newest file (``ended``) and manifest (``arrived``).

    If that file's date is too early, ``ended`` is that of the checkpoint before it.
    """

    checkpoint: str
    location: str
    step: int | None
    status: Status
    ended: float
    arrived: float


@dataclass(frozen=True, slots=True)
class IncompleteSave:
    """An incomplete location that no node is uploading.

    ``lost``: the missing parts and, if known, the nodes that should have them; ``awaited``: those
    nodes. ``siblings``: other locations that have, or may have, parts of the same save.
    """

    location: str
    since: float
    nodes: tuple[str, ...]
    lost: tuple[str, ...]
    awaited: tuple[str, ...] = ()
    siblings: tuple[Sibling, ...] = ()


@dataclass(frozen=True, slots=True)
class RunUpload:
    """A location that ``nodes`` are uploading now.

    ``percent``: how much of the files that its model needs is stored, None if unknown.
    """

    location: str
    nodes: tuple[str, ...]
    percent: int | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run.

    ``checkpoints``: status → number of locations. Sizes are in bytes, of the checkpoints and of
    the models. ``newest``, ``verified`` (the newest VERIFIED location) and ``unverified`` (the one
    that has waited longest for verification) leave out RETIRED and CONFLICT ones. ``every``:
    seconds between checkpoints, None while there are too few. ``proven``: the oldest of the times
    at which each verified location was last read. ``nodes``: those of its newest checkpoint.
    ``training``: runs, ended, gone, or empty if no hook says. ``unopenable``: locations whose
    models lack their configuration.
    """

    run: str
    checkpoints: Mapping[str, int]
    size: int
    model_size: int
    newest: Point | None
    verified: Point | None
    unverified: Point | None
    every: float | None
    proven: float | None
    incomplete: tuple[IncompleteSave, ...]
    nodes: tuple[str, ...]
    training: str
    unopenable: tuple[str, ...] = ()
    uploading: tuple[RunUpload, ...] = ()


def list_runs(summaries: Iterable[Summary], nodes: Iterable[Node]) -> tuple[RunStatus, ...]:
    """Return the status of every run that has a location, by name."""
    by_run: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        by_run[summary.run].append(summary)
    trainings = _trainings(nodes)
    return tuple(
        describe_run(name, summaries_of_run, trainings.get(name, ""))
        for name, summaries_of_run in sorted(by_run.items())
    )


def describe_run(name: str, summaries: Sequence[Summary], training: str = "") -> RunStatus:
    """Return the status of one run; ``training``: its state as its nodes announce it.

    A run whose newest location is `FINAL` has ended, whatever they announce. Only ``checkpoints``,
    sizes and ``uploading`` count locations without manifests; only these and ``every`` count
    RETIRED and CONFLICT ones.
    """
    stored = [s for s in summaries if s.manifests]
    live = [s for s in by_age(stored) if s.status not in ("RETIRED", "CONFLICT")]
    written = times_written(live)
    verified = [s for s in live if s.status == "VERIFIED"]
    whole = [s for s in live if s.status in ("COMPLETE", "CONSOLIDATED", "DAMAGED")]
    waiting = sorted((s for s in whole if not s.proof.holds), key=lambda s: (s.arrived, s.location))
    return RunStatus(
        run=name,
        checkpoints=count_statuses(summaries),
        size=sum(s.size for s in summaries),
        model_size=sum(s.model_size for s in summaries),
        newest=_first_point(live[-1:], written),
        verified=_first_point(verified[-1:], written),
        unverified=_first_point(waiting[:1], written),
        every=interval([s.ended for s in stored]),
        proven=min((s.proof.when for s in verified), default=None),
        incomplete=tuple(
            IncompleteSave(
                s.location,
                s.arrived,
                s.nodes,
                s.missing_lines or s.evidence,
                s.awaited_nodes,
                s.siblings,
            )
            for s in live
            if s.status in ("INCOMPLETE", "WAITING")
        ),
        nodes=live[-1].nodes if live else (),
        unopenable=tuple(s.location for s in live if s.consolidated and s.unopenable),
        uploading=tuple(
            RunUpload(s.location, s.uploading, s.percent) for s in summaries if s.uploading
        ),
        training="ended" if live and live[-1].checkpoint == FINAL else training,
    )


def interval(ended: Iterable[float]) -> float | None:
    """Return the median seconds between the `RECENT` newest times; None for less than `LEAST`."""
    newest = sorted(set(ended))[-RECENT:]
    gaps = sorted(later - earlier for earlier, later in pairwise(newest))
    return gaps[len(gaps) // 2] if len(newest) >= LEAST else None


def count_statuses(summaries: Iterable[Summary]) -> dict[str, int]:
    """Return how many locations have each status, in the order of `STATUSES`, without zeros."""
    counts = Counter(s.status for s in summaries)
    return {status: counts[status] for status in STATUSES if counts[status]}


def _first_point(summaries: Sequence[Summary], written: Mapping[str, float]) -> Point | None:
    """Return the point of the first of these locations; None if there is none."""
    for s in summaries:
        return Point(s.checkpoint, s.location, s.step, s.status, written[s.location], s.arrived)
    return None


def _trainings(nodes: Iterable[Node]) -> dict[str, str]:
    """Return the state of each run's newest training: runs, if on any node, else gone, else ended.

    Trainings that began within `SAME` seconds on several nodes are one.
    """
    trainings = [
        (run, train) for node in nodes for run, train in node.trains.items() if train.state
    ]
    newest: dict[str, float] = {}
    for run, train in trainings:
        newest[run] = max(train.began, newest.get(run, train.began))
    states: dict[str, set[str]] = defaultdict(set)
    for run, train in trainings:
        if train.began > newest[run] - SAME:
            states[run].add(train.state)
    return {
        run: next(s for s in ("runs", "gone", "ended") if s in run_states)
        for run, run_states in states.items()
    }
