"""``ckptsync verify``: prove what a store, or a checkpoint in a plain directory, holds.

What is still arriving in a store is listed and no failure; in a plain directory nothing can arrive, so what is missing is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.junit import junit
from ckptsync.cli.places import reached
from ckptsync.config.units import show_size
from ckptsync.errors import ConfigError
from ckptsync.records.report import Finding, Level, Reading, Report
from ckptsync.stores import trees
from ckptsync.stores.trees import Access
from ckptsync.verify import baseline
from ckptsync.verify.expected import Expected
from ckptsync.verify.findings import exit_code
from ckptsync.verify.plain import record
from ckptsync.verify.sampling import Sample
from ckptsync.verify.target import Asked, InStore, Plain, target, verify

MOST_TENSORS = 10


def run(args: argparse.Namespace) -> int:
    """Verify each target; a line for each place as it is done, then its findings."""
    reports, access = [], reached(args)
    asked = _targets(args, access)
    for where, how in asked:
        for report in verify(where, how):
            reports.append(report)
            if not args.json:
                print("\n".join(lines(report)), flush=True)
    if args.record and not exit_code(reports):
        _record(asked[0][0], Path(args.record))
    if args.junit:
        _write(Path(args.junit), junit(reports).encode(), "w")
    if args.json:
        output.print_json({"reports": [described(report) for report in reports], "exit_code": exit_code(reports)})
    elif not reports:
        print("nothing to verify: no checkpoint has arrived yet")
    return exit_code(reports)


def _targets(args: argparse.Namespace, access: Access) -> list[tuple[InStore | Plain, Asked]]:
    """What is verified, and how; raises ConfigError where options do not go together."""
    named = [target(url, access) for url in args.targets]
    if (args.baseline or args.record) and not (len(named) == 1 and isinstance(named[0], Plain)):
        raise ConfigError(
            "a baseline is of one plain directory",
            hint="what is in a store has its digests recorded: leave --baseline and --record out",
        )
    sample = _sample(args.sample)
    if sample and args.level in ("stat", "load", "model"):
        raise ConfigError(
            f"a sample is compared at level digest, and --level is {args.level}", hint="leave --sample or --level out"
        )
    if sample and not args.baseline and any(isinstance(where, Plain) for where in named):
        raise ConfigError(
            "a sample of a plain directory needs digests to compare with", hint="give --baseline, or leave --sample out"
        )
    known = _baseline(Path(args.baseline)) if args.baseline else None
    if args.record and Path(args.record).exists():
        raise ConfigError(f"{args.record}: already there, and a baseline is never written over", hint="give another name")
    now = time.time()
    return [(where, Asked(level(where, args.level), now, sample, known)) for where in named]


def level(where: InStore | Plain, asked: Level | None) -> Level:
    """A store has recorded digests; a plain directory has its own metadata, which is looked at above them."""
    return asked or ("digest" if isinstance(where, InStore) else "parse")


def _sample(text: str | None) -> Sample | None:
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--sample {text}: a percentage above 0 and at most 100 wanted", hint="such as 10%")
    return Sample(share, time.time_ns())


def _baseline(path: Path) -> tuple[Expected, ...]:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: {(e.strerror or str(e)).lower()}", hint="--record FILE writes a baseline") from e
    return baseline.decode(data, str(path))


def _record(where: InStore | Plain, path: Path) -> None:
    assert isinstance(where, Plain)
    _write(path, baseline.encode(record(trees.tree(where.place, where.access))), "x")


def _write(path: Path, data: bytes, how: str) -> None:
    try:
        with path.open(f"{how}b") as file:
            file.write(data)
    except OSError as e:
        raise ConfigError(f"{path}: {(e.strerror or str(e)).lower()}", hint="give another name") from e


def described(report: Report) -> dict[str, Any]:
    """One report, for ``--json``."""
    kept = ("run", "checkpoint", "place", "level", "verdict", "read")
    more = {"readings": [asdict(r) for r in report.readings], "findings": [asdict(f) for f in report.findings]}
    return {key: getattr(report, key) for key in kept} | more


def lines(report: Report) -> Iterator[str]:
    """The verdict with the level that was reached and the bytes that were read, then what was found, then what each level looked at."""
    name = f"{report.run}/{report.place}" if report.run else report.place
    words = {"ok": "ok", "damaged": "DAMAGED", "arriving": "ARRIVING" if report.run else "incomplete"}
    yield output.clean(f"{name}: {words[report.verdict]} (level {report.level}, {show_size(report.read)} read)")
    for finding in report.findings:
        yield output.clean(f"  {_told(finding)}")
    if len(report.readings) > 2:
        yield f"  looked at: {_looked_at(report.readings)}"


def _looked_at(readings: Sequence[Reading]) -> str:
    def one(reading: Reading) -> str:
        tensors = f", {reading.tensors} tensors" if reading.tensors else ""
        return f"{reading.level} {reading.files} of {reading.of_files} files, {show_size(reading.size)}{tensors}"

    return "; ".join(one(reading) for reading in readings if reading.level != "stat")


def _told(finding: Finding) -> str:
    where = f"{finding.name}: " if finding.name else ""
    ranges = "".join(f"; bytes {start} to {end}" for start, end in finding.ranges[:3])
    shown = finding.tensors[:MOST_TENSORS]
    more = f" and {len(finding.tensors) - len(shown)} more" if len(finding.tensors) > len(shown) else ""
    tensors = f"; overlaps {', '.join(shown)}{more}" if shown else ""
    return f"{finding.kind}: {where}{finding.detail}{ranges}{tensors}"
