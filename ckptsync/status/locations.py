"""The locations of a store as plain values, for `ls --json`, `status --json` and the page.

The keys are an interface (docs/json.md), so they are written out here once, apart from the fields
of `Summary`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.status.live_catalogue import NodeProgress, by_location


def describe_locations(
    url: str, summaries: Sequence[Summary], running: Sequence[NodeProgress] = ()
) -> list[dict[str, Any]]:
    """Return locations as ``--json`` has them, each with the progress of nodes on it.

    ``summaries``: all of their runs, since each names its newer save. ``url``: the store's.
    """
    newer, entries = newer_saves(summaries), by_location(running)
    return [
        {
            "run": summary.run,
            "checkpoint": summary.checkpoint,
            "location": summary.location,
            "status": summary.status,
            "newer": newer.get((summary.run, summary.location)),
            "evidence": list(summary.evidence),
            "lost": list(summary.missing_lines),
            "doubts": list(summary.doubts),
            "siblings": [
                {
                    "location": sibling.location,
                    "nodes": list(sibling.nodes),
                    "against": list(sibling.against),
                    "join": sibling.command(url, summary.run, summary.location),
                }
                for sibling in summary.siblings
            ],
            "nodes": list(summary.nodes),
            "files": summary.files,
            "bytes": summary.whole or summary.size,
            "model_complete": summary.model,
            "uploading": (
                {"nodes": list(summary.uploading), "percent": summary.percent}
                if summary.uploading
                else None
            ),
            "running": [e.document() for e in entries.get((summary.run, summary.location), ())],
            "resume_complete": summary.resume,
            "missing_for_resume": list(summary.lacks),
            "model": model_url(url, summary),
            "model_damaged": bool(summary.suspects),
            "left_out": list(summary.left_out),
            "unnamed": {"files": summary.unnamed_files, "first": list(summary.unnamed)},
            "weights_findings": [
                {"kind": f.kind, "text": f.text, "tensors": f.tensors, "first": list(f.first)}
                for f in summary.weights_findings
            ],
            "missing_to_open": list(summary.to_open),
            "hint": summary.supply_hint or None,
            "proof": {
                "holds": summary.proof.holds,
                "verdict": summary.proof.verdict,
                "level": summary.proof.level,
                "when": summary.proof.when or None,
            },
        }
        for summary in summaries
    ]


def newer_saves(summaries: Iterable[Summary]) -> Mapping[tuple[str, str], str]:
    """Return, by run and location of an older save of a checkpoint, the location of the newest.

    A resumed training writes ``final`` once more, for example.  A location that may be another part
    of the same save is not a newer one; retired ones are left out.
    """
    runs: dict[str, list[Summary]] = {}
    for summary in summaries:
        if not summary.retired:
            runs.setdefault(summary.run, []).append(summary)
    older = {}
    for run, saves in runs.items():
        if len({s.checkpoint for s in saves}) == len(saves):
            continue
        newest = {s.checkpoint: s for s in by_age(saves)}
        for summary in saves:
            last = newest[summary.checkpoint].location
            if last not in (summary.location, *(sibling.location for sibling in summary.siblings)):
                older[run, summary.location] = last
    return older


def model_url(url: str, summary: Summary) -> str | None:
    """Return the URL of a location's consolidated model; None if it has none."""
    if not summary.consolidated:
        return None
    return f"{url.rstrip('/')}/{consolidated_prefix(summary.run, summary.location).rstrip('/')}"
