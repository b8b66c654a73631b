"""Everything that is known of a store as one value: `overview` makes it, `document` is its JSON.

Pure. Times are seconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptsync.catalogue.location_summary import Catalogue, Summary
from ckptsync.status.alarm_rules import Room, Scene, find_alarms, list_lacking
from ckptsync.status.alarm_sending import SEVERITIES, Alarm, Patience
from ckptsync.status.nodes import Node, NodeFiles, list_nodes
from ckptsync.status.run_status import RunStatus, count_statuses, list_runs

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Overview:
    """``at``: when what it says was read. ``checkpoints``: status → locations, of all runs.

    ``alarms``: those that hold, the critical ones first, then the oldest.
    """

    store: str
    at: float
    alarms: tuple[Alarm, ...]
    nodes: tuple[Node, ...]
    runs: tuple[RunStatus, ...]
    checkpoints: dict[str, int]
    size: int
    model_size: int
    room: Room | None
    catalogue: Catalogue


def overview(
    store: str,
    catalogue: Catalogue,
    files: NodeFiles,
    now: float,
    *,
    room: Room | None,
    patience: Patience,
) -> Overview:
    """Return all that is known of a store.

    ``now`` is on its clock; ``room`` if the store can tell.
    """
    nodes = list_nodes(files, now)
    runs = list_runs(catalogue.shown, nodes)
    alarms = find_alarms(Scene(catalogue, nodes, runs, room, now, patience))
    return Overview(
        store=store,
        at=now,
        alarms=tuple(
            sorted(alarms, key=lambda a: (SEVERITIES.index(a.severity), a.since or now, a.key))
        ),
        nodes=nodes,
        runs=runs,
        checkpoints=count_statuses(catalogue.shown),
        size=sum(run.size for run in runs),
        model_size=sum(run.model_size for run in runs),
        room=room,
        catalogue=catalogue,
    )


def document(seen: Overview) -> dict[str, Any]:
    """Return plain values, as docs/monitoring.md has them; the locations are `ckptsync ls`'s."""
    summaries = seen.catalogue.summaries
    return {
        "format": FORMAT,
        "store": seen.store,
        "at": seen.at,
        "alarms": [{"kind": a.kind, **asdict(a)} for a in seen.alarms],
        "nodes": [asdict(n) for n in seen.nodes],
        "runs": [asdict(r) for r in seen.runs],
        "checkpoints": seen.checkpoints,
        "size": seen.size,
        "model_size": seen.model_size,
        "room": asdict(seen.room) if seen.room else None,
        "repairs": [_repair(s, seen.nodes) for s in summaries if s.status == "DAMAGED"],
        "retired": [
            {
                "run": s.run,
                "location": s.location,
                "scope": "location" if s.retired else "shards",
                "reason": s.retired or s.shards_retired,
                "since": s.marked_at or None,
                "begun": s.begun,
                "size": s.size + (s.model_size if s.retired else 0),
            }
            for s in summaries
            if s.status == "RETIRED" or (s.shards_retired and not s.done)
        ],
        "kept": [
            {"run": s.run, "location": s.location, "reason": s.kept} for s in summaries if s.kept
        ],
        "unreadable": [f"{fault.name}: {fault.error}" for fault in seen.catalogue.faults],
    }


def _repair(s: Summary, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return what is damaged, what was uploaded again since, and which nodes cannot."""
    return {
        "run": s.run,
        "location": s.location,
        "reports": len(s.proof.damage),
        "said": s.proof.damaged_at,
        "changed": s.proof.rewritten_at or None,
        "findings": list(s.evidence),
        "nodes": list(s.nodes),
        "lacking": list(list_lacking(s, nodes)),
    }
