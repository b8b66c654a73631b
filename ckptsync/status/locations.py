"""The locations of a store as plain values: of `ls --json`, `status --json` and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.status.live_catalogue import NodeProgress, by_location


def describe_locations(
    url: str, summaries: Sequence[Summary], running: Sequence[NodeProgress] = ()
) -> list[dict[str, Any]]:
    """Return locations of the store at ``url``, as ``--json`` has them, with what nodes do."""
    newer, entries = newer_saves(summaries), by_location(running)
    return [
        {
            "run": seen.run,
            "checkpoint": seen.checkpoint,
            "location": seen.location,
            "status": seen.status,
            "newer": newer.get((seen.run, seen.location)),
            "evidence": list(seen.evidence),
            "lost": list(seen.lost),
            "doubts": list(seen.doubts),
            "siblings": [
                {
                    "location": other.location,
                    "nodes": list(other.nodes),
                    "against": list(other.against),
                    "join": other.command(url, seen.run, seen.location),
                }
                for other in seen.siblings
            ],
            "nodes": list(seen.nodes),
            "files": seen.files,
            "bytes": seen.whole or seen.size,
            "model_complete": seen.model,
            "uploading": (
                {"nodes": list(seen.uploading), "percent": seen.percent} if seen.uploading else None
            ),
            "running": [e.document() for e in entries.get((seen.run, seen.location), ())],
            "resume_complete": seen.resume,
            "missing_for_resume": list(seen.lacks),
            "model": model_url(url, seen),
            "model_damaged": bool(seen.suspects),
            "left_out": list(seen.left_out),
            "unnamed": {"files": seen.unnamed_files, "first": list(seen.unnamed)},
            "weights_findings": [
                {"kind": f.kind, "text": f.text, "tensors": f.tensors, "first": list(f.first)}
                for f in seen.weights_findings
            ],
            "missing_to_open": list(seen.to_open),
            "hint": seen.to_give or None,
            "proof": {
                "holds": seen.proof.holds,
                "verdict": seen.proof.verdict,
                "level": seen.proof.level,
                "when": seen.proof.when or None,
            },
        }
        for seen in summaries
    ]


def newer_saves(summaries: Iterable[Summary]) -> Mapping[tuple[str, str], str]:
    """Return, by run and location of an older save, the location of the newest one.

    A training that was resumed writes ``final`` once more.  A location that may be another part of
    a save is not a newer one.
    """
    runs: dict[str, list[Summary]] = {}
    for seen in summaries:
        if not seen.retired:
            runs.setdefault(seen.run, []).append(seen)
    older = {}
    for run, its in runs.items():
        if len({s.checkpoint for s in its}) == len(its):
            continue
        newest = {s.checkpoint: s for s in by_age(its)}
        for seen in its:
            last = newest[seen.checkpoint].location
            if last not in (seen.location, *(other.location for other in seen.siblings)):
                older[run, seen.location] = last
    return older


def model_url(url: str, seen: Summary) -> str | None:
    """Return where the consolidated model of a location lies; None if it has none."""
    if not seen.consolidated:
        return None
    return f"{url.rstrip('/')}/{consolidated_prefix(seen.run, seen.location).rstrip('/')}"
