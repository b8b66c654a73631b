"""``ckptsync pull``: download a checkpoint or a consolidated model from a store."""

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
    """Find the checkpoint, download it, print where it is.

    Return the exit code of the worst file that failed.
    """
    if args.nnodes is not None and args.nnodes < 1:
        raise ConfigError(f"--nnodes: expected at least 1, not {args.nnodes}")
    destination = Path(args.destination).absolute()
    store, what = store_and_name(args, args.target)
    check_outside(store, destination)
    if args.logs:
        return _pull_logs(args, store, what, destination)
    request = PullRequest(
        what, "any" if args.unverified else "verified", args.node or "", args.consolidated
    )
    found = find(store, request)
    download = _download(destination, found.plan, is_model=args.consolidated)
    if args.dry_run:
        done = download.preview()
    else:
        with output.progress(args, f"downloading {found.run}/{found.location}", KEPT) as progress:
            done = download.run(store, progress, access_of(args).limits.threads)
    notes = [*found.plan.notes, *found.plan.missing, *_failure_notes(store, found, done)]
    notes += [
        f"{other}: left by another pull, and not needed by this one"
        for other in download.leftovers()
    ]
    if args.nnodes and not args.consolidated:
        notes += _nodes_note(args.nnodes, found, download.directory)
    if not (args.dry_run or args.consolidated or done.failed):
        notes += _best_note(done.directory)
    codes = {e.exit_code for e in done.failed.values()}
    result = {
        "run": found.run,
        "location": found.location,
        "status": found.status,
        "part": "model" if args.consolidated else args.node or "whole",
        "directory": str(done.directory),
        "files": done.files,
        "bytes": done.size,
        "there": {"files": done.there, "bytes": done.there_size},
        "failed": {path: str(e) for path, e in sorted(done.failed.items())},
        "pointers": list(done.pointers),
        "notes": notes,
        "dry_run": args.dry_run,
        "exit_code": Corrupt.exit_code if Corrupt.exit_code in codes else 3 if codes else 0,
    }
    output.print_json(result) if args.json else _show(result)
    return int(result["exit_code"])


def _pull_logs(args: argparse.Namespace, store: Store, run: str, destination: Path) -> int:
    """Download the logs of a run, and print where they are.  Return the exit code."""
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
    """Return the download of a checkpoint, or of a model, which becomes the directory itself."""
    if not is_model:
        return Download(directory, plan)
    directory = directory.resolve() if directory.name in ("", "..") else directory
    if not directory.name:
        why = f"{directory}: cannot become a model's directory"
        raise ConfigError(why, hint="name a new directory")
    return Download(directory.parent, replace(plan, name=directory.name))


def _best_note(directory: Path) -> list[str]:
    """Return a note if the best checkpoint, which a trainer loads at the end, is not here."""
    best = absent_best(directory)
    note = (
        f"trainer_state.json names {best} as the best checkpoint, and it does not exist here: pull"
        " it to that place, too, or load_best_model_at_end loads nothing"
    )
    return [note] if best else []


def _nodes_note(count: int, checkpoint: FoundCheckpoint, directory: Path) -> list[str]:
    """Return what to do where ``count`` nodes cannot read shards as they are."""
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


def _failure_notes(store: Store, found: FoundCheckpoint, done: Result) -> list[str]:
    """Return what a user can do about files that failed."""
    if not done.failed:
        return []
    name = f"{found.run}/{found.location}"
    kept = "the files that could be downloaded are kept; the same command continues with them"
    if reason := why_retired(store, found.run, found.location):
        return [f"retention is deleting {name}: {reason}", kept]
    command = shlex.join(["ckptsync", "verify", name, "--store", store.url])
    first = "" if found.status == "DAMAGED" else f"`{command}` records the damage; then "
    failed = (file.name for file in found.plan.files if file.under in done.failed)
    names = [one.removeprefix(f"{found.run}/") for one in failed]
    repair = shlex.join(["ckptsync", "repair", name, "--store", store.url])
    again = f"{who_repairs(names)}; `{repair}` shows who can"
    return [f"{first}{again}", kept]


def _show(result: dict[str, Any]) -> None:
    parts = {"whole": "", LOGS: "", "model": ", its consolidated model"}
    part = parts.get(result["part"], f", what {result['part']} needs")
    amount = f"{result['files']} files, {show_size(result['bytes'])}"
    name = f"{result['run']}/{result['location']} ({result['status']})"
    name = f"logs of {result['run']}" if result["part"] == LOGS else name
    say(f"{name}{part}: {amount}")
    if (there := result["there"])["files"]:
        say(f"  there already: {there['files']} files, {show_size(there['bytes'])}")
    for path, why in list(result["failed"].items())[:MOST_LINES]:
        say(f"  failed: {path}: {why}")
    if len(result["failed"]) > MOST_LINES:
        say(f"  and {len(result['failed']) - MOST_LINES} more (--json lists all)")
    for note in result["notes"]:
        say(f"  note: {note}")
    state = "in"
    if result["dry_run"]:
        state = "would be in"
    elif result["failed"]:
        state = "not complete; the files that could be downloaded are in"
    beside = f", beside it {', '.join(result['pointers'])}" if result["pointers"] else ""
    say(f"{state} {result['directory']}{beside}")
