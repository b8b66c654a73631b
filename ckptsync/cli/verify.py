"""``ckptsync verify``: check every byte of a store, or of a checkpoint in a directory.

`verifier` reads and judges; this module chooses targets and level, prints the findings, and records
those of a store in it, where workers and heads find them.  In a store an incomplete checkpoint is
no failure, as files may still come; in a plain directory a missing file is one.  An error of one
target does not stop the others.
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
from ckptsync.stores.contract import Store
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
"""Targets as the user named them, each with the error that ended its verification."""

NOTES = """\
Of a store the exit code is 10 for damage, and 0 if a checkpoint is incomplete (it is listed).

A URL or path below a store (`.ckptsync/store.json`) is a checkpoint of that store; any other is
a plain directory. Level `load` copies one file at a time into TMPDIR.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
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
    """Verify each target; print its verdict, its findings, and the command that repairs.

    Return 10 for damage, else the code of the first error, 3 for a missing file, or 0.
    """
    return with_progress(args, _run, "verifying", KEPT)


def _run(args: argparse.Namespace, progress: Progress) -> int:
    """Do what `run` says; report the bytes read to ``progress``.

    Raises ConfigError for contradicting options, and a StoreError of a report with
    ``--always-report``.
    """
    reports: list[Report] = []
    recorded: set[int] = set()  # indexes of reports that were written
    stopped: Stopped = []
    # by URL; a store that refuses a report is not tried again
    unwritten: dict[str, StoreError] = {}
    targets = _targets(args, access_of(args), stopped, ReadCounter(progress))
    for url, where, options in targets:
        store = where.store if isinstance(where, InStore) else None
        try:
            for verified in verify(where, options):
                reports.append(verified.report)
                if store and verified.news and store.url not in unwritten:
                    try:
                        write_report(store, verified.news)
                        recorded.add(len(reports) - 1)
                    except StoreError as e:
                        if args.always_report:
                            raise
                        unwritten[store.url] = without_frames(e)
                if not args.json:
                    _show(verified.report, store)
        except CkptsyncError as e:  # reported below, once the others are verified
            stopped.append((url, without_frames(e)))
    code = exit_code(reports)
    # damage outweighs an error, and an error a missing file
    if stopped and code != Corrupt.exit_code:
        code = stopped[0][1].exit_code
    if args.record and not code:
        _record(targets[0][1], Path(args.record))
    _print_errors(args, stopped, unwritten)
    if args.json:
        rows = [{**describe_report(r), "recorded": n in recorded} for n, r in enumerate(reports)]
        errors = [{"target": url, **output.describe_error(e)} for url, e in stopped]
        not_recorded = {url: str(e) for url, e in unwritten.items()}
        document = {"reports": rows, "errors": errors, "not_recorded": not_recorded}
        output.print_json(document, code)
    elif not (reports or stopped):
        say("nothing to verify: the store has no checkpoints yet")
    return code


def _show(report: Report, store: Store | None) -> None:
    """Print a report for people; for damage in a store also the command that repairs it."""
    for line in report_lines(report):
        say(line)
    if store and report.verdict == "damaged":
        location = f"{report.run}/{report.location}"
        command = shlex.join(["ckptsync", "repair", location, "--store", store.url])
        repairers = who_repairs(f.name for f in report.findings if f.kind in DAMAGE)
        say(f"  hint: `{command}` says what can be done; {repairers}")


def _print_errors(
    args: argparse.Namespace, stopped: Stopped, unwritten: dict[str, StoreError]
) -> None:
    """Print targets that could not be verified, and stores that refused reports, on stderr.

    Refused reports are left out with ``--json``, errors of targets with ``--progress``.
    """
    for url, refusal in () if args.json else unwritten.items():
        say(f"ckptsync: warning: the findings were not recorded: {refusal}", to_stderr=True)
        reason = "`ls`, `repair` and the workers act on recorded findings only"
        say(f"ckptsync: hint: verify {url} with a key that may write: {reason}", to_stderr=True)
    for url, error in () if args.progress else stopped:
        output.print_error(error, as_json=args.json, about=url)


def _targets(
    args: argparse.Namespace, access: Access, stopped: Stopped, progress: ReadCounter
) -> list[Target]:
    """Return what to verify, and how; append a target whose store cannot be opened to ``stopped``.

    Raises ConfigError for contradicting options, and for a target that cannot be one.
    """
    chosen_level = option_value("--level", checked_level, args.level) if args.level else None
    resolved: list[tuple[str, InStore | PlainDirectory]] = []
    for url in args.targets or [""]:
        try:
            resolved.append((url, _resolve(args, url, access)))
        except StoreError as e:  # noqa: PERF203 - of this target; a URL that cannot be one is a ConfigError
            stopped.append((url, without_frames(e)))
    has_directory = any(isinstance(where, PlainDirectory) for _, where in resolved)
    has_store = any(isinstance(where, InStore) for _, where in resolved)
    if (args.baseline or args.record) and (has_store or len(args.targets) > 1):
        why = "--baseline and --record are for one plain directory"
        hint = "leave them out: a store has recorded the digests of its files"
        raise ConfigError(why, hint=hint)
    sample = _parse_sample(args.sample)
    if sample and args.level in ("stat", "load"):
        why = f"a sample is compared at level digest, and --level is {args.level}"
        raise ConfigError(why, hint="leave --sample or --level out")
    if sample and has_directory and not args.baseline:
        why = "a sample of a plain directory needs digests to compare with"
        raise ConfigError(why, hint="give --baseline, or leave --sample out")
    baseline = _read_baseline(Path(args.baseline)) if args.baseline else None
    if args.record and Path(args.record).exists():
        why = f"{args.record}: exists, and a baseline is never overwritten"
        raise ConfigError(why, hint="give another name")
    now, targets = time.time(), []
    for url, where in resolved:
        # a store has recorded digests, a plain directory has only its own metadata
        level = chosen_level or ("digest" if isinstance(where, InStore) else "parse")
        always = args.always_report
        options = VerifyOptions(
            level, now, sample, baseline, progress, always_report=always, expect=progress.expect
        )
        targets.append((url, where, options))
    return targets


def _resolve(args: argparse.Namespace, target: str, access: Access) -> InStore | PlainDirectory:
    """Return what a word names: a directory or URL, or a run or checkpoint of the named store.

    "" names the whole store.  A word counts as a path if it looks like one, or if it exists and no
    option names a store.  Raises ConfigError, StoreError.
    """
    if not target:
        return InStore(named_store(args))
    is_named = bool(args.url or args.config)
    if not (is_path(target) or (not is_named and Path(target).exists())):
        return InStore(*store_run_location(args, target))
    resolved = resolve_target(target, access)
    if isinstance(resolved, InStore) and not resolved.run:
        raise ConfigError(f"{target}: is a store; --store names it", hint=with_store(args, target))
    return resolved


def _parse_sample(text: str | None) -> Sample | None:
    """Return the sample of ``--sample PERCENT``, seeded by the clock; None without it.

    Raises ConfigError unless it is above 0 and at most 100.
    """
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


def _read_baseline(path: Path) -> tuple[ExpectedFile, ...]:
    """Return the files and checksums that ``--record`` wrote.

    Raises ConfigError if the file cannot be read, Corrupt for its content.
    """
    try:
        data = read_named(path, LIMIT)
    except OSError as e:
        why = f"{path}: {(e.strerror or str(e)).lower()}"
        raise ConfigError(why, hint="--record FILE writes a baseline") from e
    return decode_baseline(data, str(path))


def _record(target: InStore | PlainDirectory, path: Path) -> None:
    """Read a directory's files, and write their checksums to a new file.

    Raises ConfigError if it exists or cannot be written, and what reading raises.
    """
    assert isinstance(target, PlainDirectory)
    data = encode_baseline(record_directory(path_or_url.list_tree(target.source, target.access)))
    try:
        with path.open("xb") as file:
            file.write(data)
    except OSError as e:
        why = f"{path}: {(e.strerror or str(e)).lower()}"
        raise ConfigError(why, hint="give another name") from e


def describe_report(report: Report) -> dict[str, Any]:
    """Return a report for ``--json``, without ``recorded``."""
    keys = ("run", "checkpoint", "location", "level", "verdict", "read", "findings")
    names = {"size": "bytes", "of_size": "of_bytes"}
    readings = [
        {names.get(key, key): value for key, value in asdict(reading).items()}
        for reading in report.readings
    ]
    return {**{key: getattr(report, key) for key in keys}, "readings": readings}


def report_lines(report: Report) -> Iterator[str]:
    """Yield a report as lines for people: verdict, findings, and what each level has read.

    The last only if there are more than two readings; level stat is left out.
    """
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
