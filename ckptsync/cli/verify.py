"""``ckptsync verify``: prove what a store, or a checkpoint in a plain directory, holds.

What is still arriving in a store is listed and no failure; in a plain directory nothing can arrive, so what is missing is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.places import reached
from ckptsync.config.units import show_size
from ckptsync.records.report import Finding, Level, Report
from ckptsync.verify.findings import exit_code
from ckptsync.verify.target import InStore, Plain, target, verify

MOST_TENSORS = 10


def run(args: argparse.Namespace) -> int:
    """Verify each target; a line for each place as it is done, then its findings."""
    reports, access = [], reached(args)
    for url in args.targets:
        where = target(url, access)
        for report in verify(where, level(where, args.level), time.time()):
            reports.append(report)
            if not args.json:
                print("\n".join(lines(report)), flush=True)
    if args.json:
        output.print_json({"reports": [described(report) for report in reports], "exit_code": exit_code(reports)})
    elif not reports:
        print("nothing to verify: no checkpoint has arrived yet")
    return exit_code(reports)


def level(where: InStore | Plain, asked: Level | None) -> Level:
    """A store has recorded digests; a plain directory has only its own metadata."""
    return asked or ("digest" if isinstance(where, InStore) else "parse")


def described(report: Report) -> dict[str, Any]:
    """One report, for ``--json``."""
    kept = ("run", "checkpoint", "place", "level", "verdict", "read")
    return {key: getattr(report, key) for key in kept} | {"findings": [asdict(f) for f in report.findings]}


def lines(report: Report) -> Iterator[str]:
    """The verdict with the level that was run and the bytes that were read, then what was found."""
    name = f"{report.run}/{report.place}" if report.run else report.place
    words = {"ok": "ok", "damaged": "DAMAGED", "arriving": "ARRIVING" if report.run else "incomplete"}
    yield output.clean(f"{name}: {words[report.verdict]} (level {report.level}, {show_size(report.read)} read)")
    for finding in report.findings:
        yield output.clean(f"  {_told(finding)}")


def _told(finding: Finding) -> str:
    where = f"{finding.name}: " if finding.name else ""
    ranges = "".join(f"; bytes {start} to {end}" for start, end in finding.ranges[:3])
    shown = finding.tensors[:MOST_TENSORS]
    more = f" and {len(finding.tensors) - len(shown)} more" if len(finding.tensors) > len(shown) else ""
    tensors = f"; overlaps {', '.join(shown)}{more}" if shown else ""
    return f"{finding.kind}: {where}{finding.detail}{ranges}{tensors}"
