"""``ckptsync verify``: prove what a store, or a checkpoint in a plain directory, holds.

What is still arriving in a store is listed and no failure; in a plain directory nothing can arrive, so what is missing is.
A target that cannot be verified to its end is told, and hides nothing of the others.  What is new to a store is recorded in it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import add_bandwidth
from ckptsync.cli.locations import reached
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
from ckptsync.records.report import Finding, Level, Reading, Report
from ckptsync.stores import trees
from ckptsync.stores.contract import Store
from ckptsync.stores.trees import Access
from ckptsync.units import show_size
from ckptsync.verify import baseline
from ckptsync.verify.expected import Expected
from ckptsync.verify.findings import exit_code
from ckptsync.verify.plain import record
from ckptsync.verify.reporting import write_report
from ckptsync.verify.sampling import Sample
from ckptsync.verify.target import Asked, InStore, Plain, target, verify

MOST_TENSORS = 10
Stopped = list[tuple[str, CkptsyncError]]
"""Targets as they were named, with why they were not verified to their end."""


LEVELS = ("stat", "digest", "parse", "load", "model")
DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument("targets", metavar="PATH_OR_URL", nargs="+", help="a store, a run or a location in one, or a directory")
    command.add_argument(
        "--level",
        choices=LEVELS,
        help="stat: names and sizes; digest: every byte; parse: every header, index and metadata; load: every tensor, with torch, in a"
        " process with limits; model: the class of transformers accepts exactly these weights, and a small model runs (default: digest for"
        " a store, parse for a directory)",
    )
    command.add_argument(
        "--sample",
        metavar="PERCENT",
        help="compare only a random part of all bytes, for example 10%%; the result says what it covers",
    )
    command.add_argument(
        "--baseline", metavar="FILE", help="for a directory: compare with the digests that --record has written to FILE"
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="for a directory without damage: write the digests of all its files to a new file",
    )
    add_bandwidth(command)


def run(args: argparse.Namespace) -> int:
    """Verify each target; print a line for each location as it is done, then its findings; at last what to do about damage."""
    reports: list[Report] = []
    stopped: Stopped = []
    unwritten: dict[str, StoreError] = {}
    asked = _targets(args, reached(args), stopped)
    for url, where, how in asked:
        try:
            for one in verify(where, how):
                reports.append(one.report)
                if isinstance(where, InStore) and one.news:
                    _tell_store(where.store, one.news, unwritten)
                if not args.json:
                    print("\n".join(lines(one.report)), flush=True)
                    _advise(where, one.report)
        except CkptsyncError as e:  # noqa: PERF203 - told below, once the others are verified
            stopped.append((url, e))
    code = _code(reports, stopped)
    if args.record and not code:
        _record(asked[0][1], Path(args.record))
    for url, refused in () if args.json else unwritten.items():
        hint = f"verify {url} with a key that may write: `ls`, `repair` and the workers act on what is recorded"
        print(output.clean(f"ckptsync: warning: nothing was recorded: {refused}"), file=sys.stderr)
        print(output.clean(f"ckptsync: hint: {hint}"), file=sys.stderr)
    for url, error in stopped:
        _tell(url, error, as_json=args.json)
    if args.json:
        errors = [{"target": url, **_described(e)} for url, e in stopped]
        not_recorded = {url: str(e) for url, e in unwritten.items()}
        told = {
            "reports": [described(report) for report in reports],
            "errors": errors,
            "not_recorded": not_recorded,
            "exit_code": code,
        }
        output.print_json(told)
    elif not (reports or stopped):
        print("nothing to verify: no checkpoint has arrived yet")
    return code


def _tell_store(store: Store, news: Report, unwritten: dict[str, StoreError]) -> None:
    """Record what was found.  A store that refuses is asked once: what was found holds all the same."""
    if store.url not in unwritten:
        try:
            write_report(store, news)
        except StoreError as e:
            unwritten[store.url] = e


def _advise(where: InStore | Plain, report: Report) -> None:
    """Print the next command for damage in a store."""
    if isinstance(where, InStore) and report.verdict == "damaged":
        command = shlex.join(["ckptsync", "repair", where.store.url, f"{report.run}/{report.location}"])
        print(
            output.clean(f"  hint: `{command}` says what can be done; a worker that still has the files uploads them again"),
            flush=True,
        )


def _code(reports: Sequence[Report], stopped: Stopped) -> int:
    """Damage outweighs an error, and an error what is incomplete."""
    code = exit_code(reports)
    return code if not stopped or code == Corrupt.exit_code else stopped[0][1].exit_code


def _targets(args: argparse.Namespace, access: Access, stopped: Stopped) -> list[tuple[str, InStore | Plain, Asked]]:
    """What is verified, and how; raises ConfigError where options do not go together."""
    where = _named(args.targets, access, stopped)
    named = [found for _, found in where]
    if (args.baseline or args.record) and not (len(args.targets) == 1 and all(isinstance(found, Plain) for found in named)):
        raise ConfigError(
            "a baseline is of one plain directory",
            hint="what is in a store has its digests recorded: leave --baseline and --record out",
        )
    sample = _sample(args.sample)
    if sample and args.level in ("stat", "load", "model"):
        raise ConfigError(
            f"a sample is compared at level digest, and --level is {args.level}", hint="leave --sample or --level out"
        )
    if sample and not args.baseline and any(isinstance(found, Plain) for found in named):
        raise ConfigError(
            "a sample of a plain directory needs digests to compare with", hint="give --baseline, or leave --sample out"
        )
    known = _baseline(Path(args.baseline)) if args.baseline else None
    if args.record and Path(args.record).exists():
        raise ConfigError(f"{args.record}: already there, and a baseline is never written over", hint="give another name")
    now = time.time()
    return [(url, found, Asked(level(found, args.level), now, sample, known)) for url, found in where]


def _named(urls: Sequence[str], access: Access, stopped: Stopped) -> list[tuple[str, InStore | Plain]]:
    found: list[tuple[str, InStore | Plain]] = []
    for url in urls:
        try:
            found.append((url, target(url, access)))
        except StoreError as e:  # noqa: PERF203 - of this one: a URL that cannot be is a ConfigError, and nothing is begun
            stopped.append((url, e))
    return found


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
        with path.open("rb") as file:
            data = file.read(baseline.LIMIT + 1)
    except OSError as e:
        raise ConfigError(f"{path}: {(e.strerror or str(e)).lower()}", hint="--record FILE writes a baseline") from e
    return baseline.decode(data, str(path))


def _record(where: InStore | Plain, path: Path) -> None:
    assert isinstance(where, Plain)
    data = baseline.encode(record(trees.tree(where.location, where.access)))
    try:
        with path.open("xb") as file:
            file.write(data)
    except OSError as e:
        raise ConfigError(f"{path}: {(e.strerror or str(e)).lower()}", hint="give another name") from e


def _tell(url: str, error: CkptsyncError, *, as_json: bool) -> None:
    """On stderr, as of a command that ends with it."""
    if as_json:
        print(json.dumps(_described(error)), file=sys.stderr)
        return
    print(output.clean(f"ckptsync: error: {'' if url in str(error) else f'{url}: '}{error}"), file=sys.stderr)
    if error.hint:
        print(output.clean(f"ckptsync: hint: {error.hint}"), file=sys.stderr)


def _described(error: CkptsyncError) -> dict[str, Any]:
    return {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}


def described(report: Report) -> dict[str, Any]:
    """One report, for ``--json``."""
    kept = ("run", "checkpoint", "location", "level", "verdict", "read")
    more = {"readings": [asdict(r) for r in report.readings], "findings": [asdict(f) for f in report.findings]}
    return {key: getattr(report, key) for key in kept} | more


def lines(report: Report) -> Iterator[str]:
    """The verdict with the level that was reached and the bytes that were read, then what was found, then what each level looked at."""
    name = f"{report.run}/{report.location}" if report.run else report.location
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
