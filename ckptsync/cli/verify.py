"""``ckptsync verify``: check every byte of a store, or of a checkpoint in a directory.

In a store, an incomplete checkpoint is listed and no failure; in a plain directory nothing is on
its way, so a missing file is one.  A target that cannot be verified to its end is reported, and the
others are verified all the same.  New findings of a store are recorded in it.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptsync.catalogue.location_summary import who_repairs
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    IN_STORE,
    access_of,
    add_bandwidth,
    add_targets,
    is_path,
    named_store,
    option_value,
    store_run_location,
    with_store,
)
from ckptsync.cli.output import Progress, say
from ckptsync.cli.progress import add_progress, with_progress
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError, without_frames
from ckptsync.quantities import show_size
from ckptsync.records.report import DAMAGE, LEVELS, Report, checked_level
from ckptsync.safe_open import read_named
from ckptsync.stores import path_or_url
from ckptsync.stores.opening import Access
from ckptsync.verifier.expected_files import LIMIT, ExpectedFile, decode_baseline, encode_baseline
from ckptsync.verifier.level_digest import Sample
from ckptsync.verifier.tracked_files import ReadCounter
from ckptsync.verifier.verification import (
    InStore,
    PlainDirectory,
    VerifyOptions,
    record_directory,
    resolve_target,
    verify,
)
from ckptsync.verifier.write_reports import exit_code, write_report

KEPT = "were read; the findings so far are recorded, and the same command begins again"
Target = tuple[str, InStore | PlainDirectory, VerifyOptions]
Stopped = list[tuple[str, CkptsyncError]]
"""Targets as the user named them, with why they were not verified to their end."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add_targets(
        command,
        f"{IN_STORE} | PATH",
        "a run or a checkpoint in the store, or a directory or URL (default: all of the store)",
    )
    add(
        "--level",
        metavar=f"{{{','.join(LEVELS)}}}",
        help="stat: names and sizes; digest: every byte; parse: every header, index and metadata;"
        " load: every tensor, with torch, in a process with limits (default: digest for a store,"
        " parse for a directory)",
    )
    add(
        "--sample",
        metavar="PERCENT",
        help="compare only a random part of all bytes, for example 10%%; the result says what it"
        " covers",
    )
    add(
        "--baseline",
        metavar="FILE",
        help="for a directory: compare with the checksums that --record has written to FILE",
    )
    add(
        "--record",
        metavar="FILE",
        help="for a directory without damage: write the checksums of all its files to a new file",
    )
    add(
        "--always-report",
        action="store_true",
        help="write a report to the store also where it has no news, as a head's schedule needs it",
    )
    add_bandwidth(command)
    add_progress(command)


def run(args: argparse.Namespace) -> int:
    """Verify each target, and print its verdict, its findings and what to do."""
    return with_progress(args, _run, "verifying", KEPT)


def _run(args: argparse.Namespace, progress: Progress) -> int:
    reports: list[Report] = []
    recorded: set[int] = set()  # places of reports that were written
    stopped: Stopped = []
    # by URL; a store that refuses a report is not tried again
    unwritten: dict[str, StoreError] = {}
    targets = _targets(args, access_of(args), stopped, ReadCounter(progress))
    for url, where, how in targets:
        try:
            for one in verify(where, how):
                reports.append(one.report)
                store = where.store if isinstance(where, InStore) else None
                if store and one.news and store.url not in unwritten:
                    try:
                        write_report(store, one.news)
                        recorded.add(len(reports) - 1)
                    except StoreError as e:
                        if args.always_report:
                            raise
                        unwritten[store.url] = without_frames(e)
                for line in () if args.json else report_lines(one.report):
                    say(line)
                if store and one.report.verdict == "damaged" and not args.json:
                    location = f"{one.report.run}/{one.report.location}"
                    command = shlex.join(["ckptsync", "repair", location, "--store", store.url])
                    more = who_repairs(f.name for f in one.report.findings if f.kind in DAMAGE)
                    say(f"  hint: `{command}` says what can be done; {more}")
        except CkptsyncError as e:  # noqa: PERF203 - reported below, once the others are verified
            stopped.append((url, without_frames(e)))
    code = exit_code(reports)
    # damage outweighs an error, and an error a missing file
    if stopped and code != Corrupt.exit_code:
        code = stopped[0][1].exit_code
    if args.record and not code:
        _record(targets[0][1], Path(args.record))
    _print_errors(args, stopped, unwritten)
    if args.json:
        output.print_json(
            {
                "reports": [
                    {**describe_report(report), "recorded": place in recorded}
                    for place, report in enumerate(reports)
                ],
                "errors": [{"target": url, **output.describe_error(e)} for url, e in stopped],
                "not_recorded": {url: str(e) for url, e in unwritten.items()},
            },
            code,
        )
    elif not (reports or stopped):
        say("nothing to verify: the store has no checkpoints yet")
    return code


def _print_errors(
    args: argparse.Namespace, stopped: Stopped, unwritten: dict[str, StoreError]
) -> None:
    for url, refused in () if args.json else unwritten.items():
        say(f"ckptsync: warning: the findings were not recorded: {refused}", to_stderr=True)
        reason = "`ls`, `repair` and the workers act on recorded findings only"
        say(f"ckptsync: hint: verify {url} with a key that may write: {reason}", to_stderr=True)
    for url, error in () if args.progress else stopped:
        output.print_error(error, as_json=args.json, about=url)


def _targets(
    args: argparse.Namespace, access: Access, stopped: Stopped, progress: ReadCounter
) -> list[Target]:
    """Return what to verify, and how.  Raises ConfigError where options do not go together."""
    asked = option_value("--level", checked_level, args.level) if args.level else None
    found: list[tuple[str, InStore | PlainDirectory]] = []
    for url in args.targets or [""]:
        try:
            found.append((url, _resolved(args, url, access)))
        except StoreError as e:  # noqa: PERF203 - of this target; a URL that cannot be one is a ConfigError
            stopped.append((url, without_frames(e)))
    has_directory = any(isinstance(where, PlainDirectory) for _, where in found)
    has_store = any(isinstance(where, InStore) for _, where in found)
    if (args.baseline or args.record) and (has_store or len(args.targets) > 1):
        why = "--baseline and --record are for one plain directory"
        hint = "leave them out: a store has recorded the digests of its files"
        raise ConfigError(why, hint=hint)
    sample = _sample(args.sample)
    if sample and args.level in ("stat", "load"):
        why = f"a sample is compared at level digest, and --level is {args.level}"
        raise ConfigError(why, hint="leave --sample or --level out")
    if sample and has_directory and not args.baseline:
        why = "a sample of a plain directory needs digests to compare with"
        raise ConfigError(why, hint="give --baseline, or leave --sample out")
    known = _baseline(Path(args.baseline)) if args.baseline else None
    if args.record and Path(args.record).exists():
        why = f"{args.record}: exists, and a baseline is never overwritten"
        raise ConfigError(why, hint="give another name")
    now, targets = time.time(), []
    for url, where in found:
        # a store has recorded digests, a plain directory has only its own metadata
        level = asked or ("digest" if isinstance(where, InStore) else "parse")
        always = args.always_report
        how = VerifyOptions(
            level, now, sample, known, progress, always_report=always, expect=progress.expect
        )
        targets.append((url, where, how))
    return targets


def _resolved(args: argparse.Namespace, what: str, access: Access) -> InStore | PlainDirectory:
    """Return what a word names: a directory or URL, or a run or checkpoint of the named store.

    A word without the marks of a path is one if it exists and no option names a store.  Raises
    ConfigError, StoreError.
    """
    if not what:
        return InStore(named_store(args))
    is_named = bool(args.url or args.config)
    if not (is_path(what) or (not is_named and Path(what).exists())):
        return InStore(*store_run_location(args, what))
    where = resolve_target(what, access)
    if isinstance(where, InStore) and not where.run:
        raise ConfigError(f"{what}: is a store; --store names it", hint=with_store(args, what))
    return where


def _sample(text: str | None) -> Sample | None:
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        why = f"--sample {text}: expected a percentage above 0 and at most 100"
        raise ConfigError(why, hint="such as 10%")
    return Sample(share, time.time_ns())


def _baseline(path: Path) -> tuple[ExpectedFile, ...]:
    try:
        data = read_named(path, LIMIT)
    except OSError as e:
        why = f"{path}: {(e.strerror or str(e)).lower()}"
        raise ConfigError(why, hint="--record FILE writes a baseline") from e
    return decode_baseline(data, str(path))


def _record(where: InStore | PlainDirectory, path: Path) -> None:
    assert isinstance(where, PlainDirectory)
    data = encode_baseline(record_directory(path_or_url.tree(where.source, where.access)))
    try:
        with path.open("xb") as file:
            file.write(data)
    except OSError as e:
        why = f"{path}: {(e.strerror or str(e)).lower()}"
        raise ConfigError(why, hint="give another name") from e


def describe_report(report: Report) -> dict[str, Any]:
    """Return a report for ``--json``."""
    keys = ("run", "checkpoint", "location", "level", "verdict", "read", "findings")
    names = {"size": "bytes", "of_size": "of_bytes"}
    readings = [
        {names.get(key, key): value for key, value in asdict(reading).items()}
        for reading in report.readings
    ]
    return {**{key: getattr(report, key) for key in keys}, "readings": readings}


def report_lines(report: Report) -> Iterator[str]:
    """Yield the verdict, then the findings, then what each level looked at."""
    name = f"{report.run}/{report.location}" if report.run else report.location
    incomplete = "INCOMPLETE" if report.run else "incomplete"
    verdict = {"ok": "ok", "damaged": "DAMAGED"}.get(report.verdict, incomplete)
    yield f"{name}: {verdict} (level {report.level}, {show_size(report.read)} read)"
    for finding in report.findings:
        where = f"{finding.name}: " if finding.name else ""
        yield f"  {finding.kind}: {where}{finding.detail}"
    if len(report.readings) > 2:
        levels = []
        for r in report.readings:
            if r.level != "stat":
                tensors = f", {r.tensors} tensors" if r.tensors else ""
                size = f"{show_size(r.size)}{tensors}"
                levels.append(f"{r.level} {r.files} of {r.of_files} files, {size}")
        yield f"  read: {'; '.join(levels)}"
