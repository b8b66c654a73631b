"""``ckptsync pull``: download a checkpoint or a consolidated model from a store.

`downloader` finds, plans and downloads; this module turns options into a request, and tells the
user what else a training needs: other nodes' shards, the best checkpoint, repairs of damaged files.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.catalogue.location_summary import who_repairs
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    IN_STORE,
    access_of,
    add_bandwidth,
    add_dry_run,
    add_store_option,
    store_and_name,
)
from ckptsync.cli.output import say
from ckptsync.downloader.download import Download, Result
from ckptsync.downloader.download_plan import PullPlan
from ckptsync.downloader.find import (
    FoundCheckpoint,
    PullRequest,
    absent_best,
    check_outside,
    find,
    why_retired,
)
from ckptsync.downloader.logs import pull_logs
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.quantities import show_size
from ckptsync.safe_names import LOGS
from ckptsync.stores.contract import Store

MOST_LINES = 20
KEPT = "are here; the same command continues"
DETAILS = (
    "Every byte is checked as it is read. A damaged file is not delivered (exit code 10), and the"
    " files that were downloaded stay for the next try."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    add(
        "target",
        metavar=IN_STORE,
        help="a run, which means RUN/latest, its newest VERIFIED checkpoint; or one checkpoint; or"
        " its URL or path in a store",
    )
    add(
        "destination",
        metavar="DST",
        help="an output directory, in which the checkpoint appears whole or not at all;"
        " with --consolidated, the model's own directory",
    )
    add_store_option(command)
    part = command.add_mutually_exclusive_group()
    part.add_argument(
        "--node",
        metavar="ID",
        help="download only what that node needs to resume: its own files, and files of no rank",
    )
    part.add_argument(
        "--consolidated", action="store_true", help="download the consolidated model instead"
    )
    part.add_argument(
        "--logs",
        action="store_true",
        help="download the run's logs instead, to DST/logs/NODE/",
    )
    add(
        "--nnodes",
        metavar="N",
        type=int,
        help="how many nodes will resume: a note says what to do where another number saved the"
        " checkpoint and its shards are DeepSpeed's",
    )
    add(
        "--unverified",
        action="store_true",
        help="allow a checkpoint that is not VERIFIED, is retired, or is incomplete; never a"
        " damaged file",
    )
    add_bandwidth(command)
    add_dry_run(command, "downloaded")


def run(args: argparse.Namespace) -> int:
    """Find the checkpoint, download it unless it is a dry run, and print where it is.

    With ``--logs``, the same for the run's logs (`_pull_logs`).  Return 10 if a file is damaged, 3
    if one failed otherwise, else 0.  Raises ConfigError, Incomplete, StoreError; Corrupt for a
    conflict.
    """
    if args.nnodes is not None and args.nnodes < 1:
        raise ConfigError(f"--nnodes: expected at least 1, not {args.nnodes}")
    destination = Path(args.destination).absolute()
    store, name = store_and_name(args, args.target)
    check_outside(store, destination)
    if args.logs:
        return _pull_logs(args, store, name, destination)
    request = PullRequest(
        name, "any" if args.unverified else "verified", args.node or "", args.consolidated
    )
    checkpoint = find(store, request)
    download = _download(destination, checkpoint.plan, is_model=args.consolidated)
    if args.dry_run:
        result = download.preview()
    else:
        with output.progress(
            args, f"downloading {checkpoint.run}/{checkpoint.location}", KEPT
        ) as progress:
            result = download.run(store, progress, access_of(args).limits.threads)
    notes = [
        *checkpoint.plan.notes,
        *checkpoint.plan.missing,
        *_failure_notes(store, checkpoint, result),
    ]
    notes += [
        f"{directory}: left by another pull, and not needed by this one"
        for directory in download.leftovers()
    ]
    if args.nnodes and not args.consolidated:
        notes += _nodes_note(args.nnodes, checkpoint, download.directory)
    if not (args.dry_run or args.consolidated or result.failed):
        notes += _best_note(result.directory)
    codes = {e.exit_code for e in result.failed.values()}
    document = {
        "run": checkpoint.run,
        "location": checkpoint.location,
        "status": checkpoint.status,
        "part": "model" if args.consolidated else args.node or "whole",
        "directory": str(result.directory),
        "files": result.files,
        "bytes": result.size,
        "there": {"files": result.there, "bytes": result.there_size},
        "failed": {path: str(e) for path, e in sorted(result.failed.items())},
        "pointers": list(result.pointers),
        "notes": notes,
        "dry_run": args.dry_run,
        "exit_code": Corrupt.exit_code if Corrupt.exit_code in codes else 3 if codes else 0,
    }
    output.print_json(document) if args.json else _show(document)
    return int(document["exit_code"])


def _pull_logs(args: argparse.Namespace, store: Store, run: str, destination: Path) -> int:
    """Download a run's logs, and print where they are.

    Return the greatest exit code of the files that failed, 0 if none did.  With ``--dry-run``
    download nothing.  Raises ConfigError if the run has no logs, StoreError.
    """
    run = run.strip("/")
    done = pull_logs(store, run, destination, access_of(args).limits.threads, dry=args.dry_run)
    codes = {e.exit_code for e in done.failed.values()}
    result = {
        "run": run,
        "location": "",
        "status": "",
        "part": LOGS,
        "directory": str(done.directory),
        "files": done.files,
        "bytes": done.size,
        "there": {"files": done.there, "bytes": done.there_size},
        "failed": {path: str(e) for path, e in sorted(done.failed.items())},
        "pointers": [],
        "notes": [],
        "dry_run": args.dry_run,
        "exit_code": max(codes, default=0),
    }
    output.print_json(result) if args.json else _show(result)
    return int(result["exit_code"])


def _download(directory: Path, plan: PullPlan, *, is_model: bool) -> Download:
    """Return the download of a checkpoint, or of a model, which becomes ``directory`` itself.

    Raises ConfigError if that has no name, as ``/``.
    """
    if not is_model:
        return Download(directory, plan)
    directory = directory.resolve() if directory.name in ("", "..") else directory
    if not directory.name:
        why = f"{directory}: cannot become a model's directory"
        raise ConfigError(why, hint="name a new directory")
    return Download(directory.parent, replace(plan, name=directory.name))


def _best_note(directory: Path) -> list[str]:
    """Return a note if the best checkpoint, which the Trainer loads at its end, is missing."""
    best = absent_best(directory)
    note = (
        f"trainer_state.json names {best} as the best checkpoint, and it does not exist here: pull"
        " it to that place, too, or load_best_model_at_end loads nothing"
    )
    return [note] if best else []


def _nodes_note(count: int, checkpoint: FoundCheckpoint, directory: Path) -> list[str]:
    """Return a note if ``count`` nodes cannot resume from DeepSpeed's shards as they are."""
    is_sharded = any(file.under.endswith("_optim_states.pt") for file in checkpoint.plan.files)
    if count == len(checkpoint.nodes) or not is_sharded:
        return []
    universal = directory.parent / f"{directory.name}-universal"
    command = shlex.join(["ckptsync", "convert", str(directory), str(universal)])
    note = (
        f"nodes that saved it: {len(checkpoint.nodes)}, nodes that will resume: {count}; DeepSpeed"
        f" reads these shards on as many ranks as wrote them; for another number, `{command} --to"
        " universal`, and load_universal in DeepSpeed's configuration"
    )
    return [note]


def _failure_notes(store: Store, checkpoint: FoundCheckpoint, done: Result) -> list[str]:
    """Return notes on what the user can do about files that failed; [] if none failed.

    Reads the store to tell whether retention deletes them.  Raises StoreError.
    """
    if not done.failed:
        return []
    name = f"{checkpoint.run}/{checkpoint.location}"
    kept_note = "the files that could be downloaded are kept; the same command continues with them"
    if reason := why_retired(store, checkpoint.run, checkpoint.location):
        return [f"retention is deleting {name}: {reason}", kept_note]
    command = shlex.join(["ckptsync", "verify", name, "--store", store.url])
    verify_note = "" if checkpoint.status == "DAMAGED" else f"`{command}` records the damage; then "
    failed = (file.name for file in checkpoint.plan.files if file.under in done.failed)
    names = [file_name.removeprefix(f"{checkpoint.run}/") for file_name in failed]
    repair = shlex.join(["ckptsync", "repair", name, "--store", store.url])
    repair_note = f"{who_repairs(names)}; `{repair}` shows who can"
    return [f"{verify_note}{repair_note}", kept_note]


def _show(result: dict[str, Any]) -> None:
    """Print a result for people, with at most `MOST_LINES` failed files."""
    parts = {"whole": "", LOGS: "", "model": ", its consolidated model"}
    part = parts.get(result["part"], f", what {result['part']} needs")
    amount = f"{result['files']} files, {show_size(result['bytes'])}"
    name = f"{result['run']}/{result['location']} ({result['status']})"
    name = f"logs of {result['run']}" if result["part"] == LOGS else name
    say(f"{name}{part}: {amount}")
    if (present := result["there"])["files"]:
        say(f"  there already: {present['files']} files, {show_size(present['bytes'])}")
    for path, why in list(result["failed"].items())[:MOST_LINES]:
        say(f"  failed: {path}: {why}")
    if len(result["failed"]) > MOST_LINES:
        say(f"  and {len(result['failed']) - MOST_LINES} more (--json lists all)")
    for note in result["notes"]:
        say(f"  note: {note}")
    outcome = "in"
    if result["dry_run"]:
        outcome = "would be in"
    elif result["failed"]:
        outcome = "not complete; the files that could be downloaded are in"
    beside = f", beside it {', '.join(result['pointers'])}" if result["pointers"] else ""
    say(f"{outcome} {result['directory']}{beside}")
