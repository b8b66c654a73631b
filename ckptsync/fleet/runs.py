"""Each run as its checkpoints and its trainers have it.  Pure; times are seconds on the store's clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptsync.catalogue.summary import Summary
from ckptsync.fleet.nodes import Node
from ckptsync.records.saves import Sibling
from ckptsync.records.state import STATUSES, Status

FINAL = "final"  # what the trainer leaves in a run's root when it has ended
RECENT = 8  # checkpoints whose times say how often they come
LEAST = 3  # of them, before anything is said


@dataclass(frozen=True, slots=True)
class Point:
    """A location.  ``ended``: when its newest file was written, ``arrived``: when the store had its newest manifest."""

    checkpoint: str
    location: str
    step: int | None
    status: Status
    ended: float
    arrived: float


@dataclass(frozen=True, slots=True)
class Arriving:
    """A location that is not whole.  ``lost``: what is missing and who should have it, as far as is known; ``awaited``: those nodes.

    ``siblings``: other locations with parts of it, or of what may be it.
    """

    location: str
    since: float
    nodes: tuple[str, ...]
    lost: tuple[str, ...]
    awaited: tuple[str, ...] = ()
    siblings: tuple[Sibling, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """``checkpoints``: word → locations.  ``size`` and ``model_size`` in bytes, of the checkpoints' own files and of the consolidated models.

    ``newest``, ``verified`` (the newest that is) and ``unverified`` (of those that have not been verified, the one that has waited longest) leave out what
    is retired or ambiguous.  ``every``: seconds from one checkpoint to the next, ``None`` while too few are known.  ``proven``: when the verified
    location was read whole whose last time is the longest ago.  ``nodes``: where its newest checkpoint comes from.
    ``training``: runs, ended, gone, or empty where no hook has told.  ``unopenable``: locations whose models lack their configuration.
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
    arriving: tuple[Arriving, ...]
    nodes: tuple[str, ...]
    training: str
    unopenable: tuple[str, ...] = ()


def runs(summaries: Iterable[Summary], nodes: Iterable[Node]) -> tuple[Run, ...]:
    """All that have a checkpoint, by name."""
    by_run: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        by_run[summary.run].append(summary)
    trainings = _trainings(nodes)
    return tuple(run(name, found, trainings.get(name, "")) for name, found in sorted(by_run.items()))


def run(name: str, found: Sequence[Summary], training: str = "") -> Run:
    """One run, of its locations."""
    statuses = Counter(s.status for s in found)
    live = sorted((s for s in found if s.status not in ("RETIRED", "CONFLICT")), key=lambda s: (s.ended, s.location))
    verified = [s for s in live if s.status == "VERIFIED"]
    waiting = [s for s in live if s.status in ("COMPLETE", "CONSOLIDATED", "DAMAGED") and not s.proof.holds]
    return Run(
        run=name,
        checkpoints={status: statuses[status] for status in STATUSES if statuses[status]},
        size=sum(s.size for s in found),
        model_size=sum(s.model_size for s in found),
        newest=_point(live[-1:]),
        verified=_point(verified[-1:]),
        unverified=_point(sorted(waiting, key=lambda s: (s.arrived, s.location))[:1]),
        every=every([s.ended for s in found]),
        proven=min((s.proof.when for s in verified), default=None),
        arriving=tuple(
            Arriving(s.location, s.arrived, s.nodes, s.lost or s.evidence, s.awaited, s.siblings)
            for s in live
            if s.status == "ARRIVING"
        ),
        nodes=live[-1].nodes if live else (),
        unopenable=tuple(s.location for s in live if s.consolidated and s.unopenable),
        training="ended" if live and live[-1].checkpoint == FINAL else training,
    )


def every(ended: Iterable[float]) -> float | None:
    """How many seconds lie between two checkpoints, by the newest of them: half are further apart, half nearer."""
    newest = sorted(set(ended))[-RECENT:]
    gaps = sorted(later - earlier for earlier, later in pairwise(newest))
    return gaps[len(gaps) // 2] if len(newest) >= LEAST else None


def _point(found: Sequence[Summary]) -> Point | None:
    return next((Point(s.checkpoint, s.location, s.step, s.status, s.ended, s.arrived) for s in found), None)


def _trainings(nodes: Iterable[Node]) -> dict[str, str]:
    """Of each run what the newest training says; ``runs`` if any node says so, else ``gone`` if any does."""
    told = [(run, train) for node in nodes for run, train in node.trains.items() if train.state]
    newest = {run: max(t.began for r, t in told if r == run) for run in {run for run, _ in told}}
    states: dict[str, set[str]] = defaultdict(set)
    for run_, train in told:
        if train.began > newest[run_] - SAME:
            states[run_].add(train.state)
    return {run_: next(s for s in ("runs", "gone", "ended") if s in found) for run_, found in states.items()}


SAME = 600.0  # seconds within which the nodes of one training begin
