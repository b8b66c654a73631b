"""One location in full, as plain values, for the page and `ls RUN/CHECKPOINT`.

The catalogue has a summary of each location. The details (files, damage, reports) are too many to
keep for all, so `read_details` reads them from the records of the one location that is asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ckptsync.catalogue.location_summary import Summary
from ckptsync.catalogue.uncached import read_location
from ckptsync.layouts.file_names import rank
from ckptsync.records.location_status import LocationState, unanswered_findings
from ckptsync.records.report import DAMAGE
from ckptsync.records.weights_record import ModelValues
from ckptsync.status.training_curves import Curve, value_at
from ckptsync.stores.contract import Store

FILES = 1000  # of a location that are shown
DAMAGED = 100  # files of a location, ranges and tensors of a file


def describe_progress(summary: Summary, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return when a location was saved, uploaded, merged and verified, its metrics and its weights.

    A time is None if that has not happened.  A location without a manifest is not uploaded, and has
    no values of the stored curves, which end before it.
    """
    curves = curves if summary.manifests else {}
    return {
        "step": summary.step,
        "saved": summary.ended or None,
        "uploaded": (summary.arrived or None) if summary.manifests else None,
        "merged": summary.merged or None,
        "verified": (summary.proof.when or None) if summary.status == "VERIFIED" else None,
        "kept": bool(summary.kept),
        "metrics": dict(summary.metrics),
        **{metric: value_at(curves, metric, summary.step) for metric in ("loss", "eval_loss")},
        "weights": describe_weights(summary.weights),
    }


def describe_weights(values: ModelValues | None) -> dict[str, Any] | None:
    """Return the values of a model by group of layers; None if no head counted them."""
    if values is None:
        return None
    return {
        "nonfinite": {"tensors": values.nonfinite, "first": list(values.first)},
        "uncounted": values.uncounted,
        "groups": {
            g.group: {
                "tensors": g.tensors,
                "elements": g.size,
                "norm": g.norm,
                "min": g.low,
                "max": g.high,
                "zeros": g.zeros,
                "nan": g.nans,
                "infinite": g.infinities,
            }
            for g in values.groups
        },
    }


def read_details(store: Store, summary: Summary) -> dict[str, Any]:
    """Read the records of a location, and return its files, damage and reports for JSON.

    At most `FILES` files (``files_total`` counts all), and `DAMAGED` damaged files and reports.  A
    location without records has none of them; unreadable records are in ``unreadable``.  Raises
    StoreError.
    """
    state = read_location(store, summary.run, summary.location)
    location = state.of(summary.run, summary.location)
    files = [*_files(location)] if location else []
    return {
        "ranks": dict(summary.ranks),
        "reason_kept": summary.kept or None,
        "retired": summary.retired or summary.shards_retired or None,
        "files": files[:FILES],
        "files_total": len(files),
        "damage": [*_damage(location)][:DAMAGED] if location else [],
        "reports": [*_reports(location)] if location else [],
        "unreadable": [fault.text for fault in state.faults],
    }


def _files(location: LocationState) -> Iterator[dict[str, Any]]:
    """Yield each file of a location, by name, with its nodes and whether it is stored."""
    for path, sources in sorted(location.files.items()):
        nodes = sorted({node for source in sources for node in source.nodes})
        yield {
            "name": path,
            "bytes": sources[0].entry.size,
            "node": ", ".join(nodes),
            "rank": rank(path),
            "stored": any(
                location.sizes.get(source.name) == source.entry.size for source in sources
            ),
        }


def _damage(location: LocationState) -> Iterator[dict[str, Any]]:
    """Yield the damage that no later report answers; cut its ranges and tensors to `DAMAGED`."""
    for finding in unanswered_findings(location):
        if finding.kind in DAMAGE:
            yield {
                "file": finding.name,
                "kind": finding.kind,
                "detail": finding.detail,
                "ranges": [list(pair) for pair in finding.ranges[:DAMAGED]],
                "tensors": list(finding.tensors[:DAMAGED]),
            }


def _reports(location: LocationState) -> Iterator[dict[str, Any]]:
    """Yield the `DAMAGED` newest reports of a location, the newest first."""
    for report in sorted(location.records.reports.values(), key=lambda r: -r.n)[:DAMAGED]:
        yield {
            "n": report.n,
            "level": report.level,
            "verdict": report.verdict,
            "when": report.when or None,
            "read": report.read,
            "findings": len(report.findings),
        }


def commands(url: str, summary: Summary) -> dict[str, str]:
    """Return the commands that a person may want for a location; pull_model only for a model."""
    target = f"{summary.run}/{summary.location}"
    words = {
        "pull": ["pull", target, "DIR"],
        "verify": ["verify", target],
        "repair": ["repair", target],
        "keep": ["keep", target],
        "ls": ["ls", target],
    }
    if summary.consolidated:
        words["pull_model"] = ["pull", target, "DIR", "--consolidated"]
    return {
        name: shlex.join(["ckptsync", *arguments, "--store", url])
        for name, arguments in words.items()
    }
