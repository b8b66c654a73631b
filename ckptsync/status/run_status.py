"""Each run, as its checkpoints and its trainers have it.

Pure; times are seconds on the store's clock.
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
    """A location; when its newest file was written (``ended``), its newest manifest ``arrived``.

    Where the date is too early, ``ended`` is that of the checkpoint before it.
    """

    checkpoint: str
    location: str
    step: int | None
    status: Status
    ended: float
    arrived: float


@dataclass(frozen=True, slots=True)
class IncompleteSave:
    """A location that is not whole, and that no node is uploading.

    ``lost``: what is missing and which node should have it, as far as is known; ``awaited``: those
    nodes. ``siblings``: other locations with parts of it, or of what may be it.
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

    ``percent``: how much of what its model needs is there, None where that is not known.
    """

    location: str
    nodes: tuple[str, ...]
    percent: int | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``checkpoints``: status → locations. Sizes in bytes, of the checkpoints and of the models.

    ``newest``, ``verified`` (the newest that is) and ``unverified`` (of those that are not
    verified, the one that has waited longest) leave out what is RETIRED or in CONFLICT. ``every``:
    seconds from one checkpoint to the next, None while too few are known. ``proven``: when the
    verified location was read whole whose last time is the longest ago. ``nodes``: where its newest
    checkpoint comes from. ``training``: runs, ended, gone, or empty where no hook says.
    ``unopenable``: locations whose models lack their configuration.
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
    """Return all runs that have a checkpoint, by name."""
    by_run: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        by_run[summary.run].append(summary)
    trainings = _trainings(nodes)
    return tuple(
        describe_run(name, its, trainings.get(name, "")) for name, its in sorted(by_run.items())
    )


def describe_run(name: str, found: Sequence[Summary], training: str = "") -> RunStatus:
    """Return one run, of its locations."""
    stored = [s for s in found if s.manifests]
    live = [s for s in by_age(stored) if s.status not in ("RETIRED", "CONFLICT")]
    written = times_written(live)
    verified = [s for s in live if s.status == "VERIFIED"]
    whole = [s for s in live if s.status in ("COMPLETE", "CONSOLIDATED", "DAMAGED")]
    waiting = sorted((s for s in whole if not s.proof.holds), key=lambda s: (s.arrived, s.location))
    return RunStatus(
        run=name,
        checkpoints=count_statuses(found),
        size=sum(s.size for s in found),
        model_size=sum(s.model_size for s in found),
        newest=_point(live[-1:], written),
        verified=_point(verified[-1:], written),
        unverified=_point(waiting[:1], written),
        every=interval([s.ended for s in stored]),
        proven=min((s.proof.when for s in verified), default=None),
        incomplete=tuple(
            IncompleteSave(
                s.location, s.arrived, s.nodes, s.lost or s.evidence, s.awaited, s.siblings
            )
            for s in live
            if s.status in ("INCOMPLETE", "WAITING")
        ),
        nodes=live[-1].nodes if live else (),
        unopenable=tuple(s.location for s in live if s.consolidated and s.unopenable),
        uploading=tuple(
            RunUpload(s.location, s.uploading, s.percent) for s in found if s.uploading
        ),
        training="ended" if live and live[-1].checkpoint == FINAL else training,
    )


def interval(ended: Iterable[float]) -> float | None:
    """Return the median of the newest gaps between checkpoints, in seconds; None for too few."""
    newest = sorted(set(ended))[-RECENT:]
    gaps = sorted(later - earlier for earlier, later in pairwise(newest))
    return gaps[len(gaps) // 2] if len(newest) >= LEAST else None


def count_statuses(summaries: Iterable[Summary]) -> dict[str, int]:
    """Return how many locations have each status, in the order of `STATUSES`."""
    counts = Counter(s.status for s in summaries)
    return {status: counts[status] for status in STATUSES if counts[status]}


def _point(found: Sequence[Summary], written: Mapping[str, float]) -> Point | None:
    for s in found:
        return Point(s.checkpoint, s.location, s.step, s.status, written[s.location], s.arrived)
    return None


def _trainings(nodes: Iterable[Node]) -> dict[str, str]:
    """Return the state of each run's newest training.

    It is ``runs`` if any node says so, else ``gone`` if any does.
    """
    known = [(run, train) for node in nodes for run, train in node.trains.items() if train.state]
    newest: dict[str, float] = {}
    for run, train in known:
        newest[run] = max(train.began, newest.get(run, train.began))
    states: dict[str, set[str]] = defaultdict(set)
    for run, train in known:
        if train.began > newest[run] - SAME:
            states[run].add(train.state)
    return {
        run: next(s for s in ("runs", "gone", "ended") if s in its) for run, its in states.items()
    }
