"""All that a page about a store would show, as one value: `overview` makes it, `document` is its JSON.  Pure; times are seconds on the store's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptsync.catalogue.summary import Catalogue
from ckptsync.fleet.alarm_rules import Scene, lacking, of_locations, of_nodes
from ckptsync.fleet.alarms import SEVERITIES, Alarm, Patience, Room
from ckptsync.fleet.nodes import Node, Told, nodes
from ckptsync.fleet.runs import Run, runs
from ckptsync.records.state import STATUSES

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What was read: ``now`` on the store's clock; ``room`` where the store can tell."""

    store: str
    catalogue: Catalogue
    told: Told
    now: float
    room: Room | None = None


@dataclass(frozen=True, slots=True)
class Overview:
    """``at``: when what it says was read.  ``checkpoints``: word → locations, of all runs."""

    store: str
    at: float
    alarms: tuple[Alarm, ...]
    nodes: tuple[Node, ...]
    runs: tuple[Run, ...]
    checkpoints: dict[str, int]
    size: int
    model_size: int
    room: Room | None
    catalogue: Catalogue


def overview(seen: Seen, patience: Patience) -> Overview:
    """The same for the same arguments."""
    found = nodes(seen.told, seen.now)
    made = runs(seen.catalogue.summaries, found)
    statuses = Counter(s.status for s in seen.catalogue.summaries)
    return Overview(
        store=seen.store,
        at=seen.now,
        alarms=_alarms(Scene(seen.catalogue, found, made, seen.room, seen.now, patience)),
        nodes=found,
        runs=made,
        checkpoints={status: statuses[status] for status in STATUSES if statuses[status]},
        size=sum(run.size for run in made),
        model_size=sum(run.model_size for run in made),
        room=seen.room,
        catalogue=seen.catalogue,
    )


def _alarms(scene: Scene) -> tuple[Alarm, ...]:
    """The critical ones first, then the oldest."""
    found = (*of_locations(scene), *of_nodes(scene))
    return tuple(sorted(found, key=lambda a: (SEVERITIES.index(a.severity), a.since or scene.now, a.key)))


def document(seen: Overview) -> dict[str, Any]:
    """Of plain values, as docs/monitoring.md has it.  The locations are `ckptsync ls`'s, and no part of it."""
    return {
        "format": FORMAT,
        "store": seen.store,
        "at": seen.at,
        "alarms": [_alarm(a) for a in seen.alarms],
        "nodes": [asdict(n) for n in seen.nodes],
        "runs": [asdict(r) for r in seen.runs],
        "checkpoints": seen.checkpoints,
        "size": seen.size,
        "model_size": seen.model_size,
        "room": asdict(seen.room) if seen.room else None,
        "repairs": _repairs(seen.catalogue, seen.nodes),
        "retired": _retired(seen.catalogue),
        "kept": _kept(seen.catalogue),
        "unreadable": [f"{fault.name}: {fault.error}" for fault in seen.catalogue.faults],
    }


def _alarm(alarm: Alarm) -> dict[str, Any]:
    return {"kind": alarm.kind, **asdict(alarm)}


def _repairs(catalogue: Catalogue, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """What is damaged, whether something was sent again since, and who cannot."""
    return [
        {
            "run": s.run,
            "location": s.location,
            "reports": len(s.proof.damage),
            "said": s.proof.said,
            "changed": s.proof.changed or None,
            "findings": list(s.evidence),
            "nodes": list(s.nodes),
            "lacking": list(lacking(s, nodes)),
        }
        for s in catalogue.summaries
        if s.status == "DAMAGED"
    ]


def _retired(catalogue: Catalogue) -> list[dict[str, Any]]:
    """What has a tombstone and is still there, all of it or the trainer's own files."""
    return [
        {
            "run": s.run,
            "location": s.location,
            "scope": "location" if s.retired else "shards",
            "reason": s.retired or s.let_go,
            "since": s.said or None,
            "begun": s.begun,
            "size": s.size + (s.model_size if s.retired else 0),
        }
        for s in catalogue.summaries
        if s.status == "RETIRED" or (s.let_go and not s.done)
    ]


def _kept(catalogue: Catalogue) -> list[dict[str, Any]]:
    """What a person keeps, whatever the rules say."""
    return [{"run": s.run, "location": s.location, "reason": s.kept} for s in catalogue.summaries if s.kept]
