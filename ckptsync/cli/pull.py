"""``ckptsync pull``: download a checkpoint or a consolidated model from a store, to resume a training from it."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import add_bandwidth, add_dry_run, add_store_option
from ckptsync.cli.locations import asked_store, reached
from ckptsync.cli.output import shown, silent
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.pull.download import Download, Result
from ckptsync.pull.find import Found, Request, check_outside, find, split_url, why_retired
from ckptsync.pull.plan import Plan
from ckptsync.stores.contract import Store
from ckptsync.units import show_size

_LINES = 20


DETAILS = """Every byte is checked as it is read. A damaged file is not delivered (exit code 10),
and what was downloaded stays for the next try."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument(
        "what",
        metavar="RUN[/CHECKPOINT]",
        help="a run, which means RUN/latest, its newest VERIFIED checkpoint; or one checkpoint; or its URL or path in a store",
    )
    command.add_argument(
        "destination",
        metavar="DST",
        help="an output directory, in which the checkpoint appears whole or not at all; with --consolidated, the model's own directory",
    )
    add_store_option(command)
    part = command.add_mutually_exclusive_group()
    part.add_argument("--node", metavar="ID", help="only what that node needs to resume: its own files, and files of no rank")
    part.add_argument("--consolidated", action="store_true", help="the consolidated model instead")
    command.add_argument(
        "--unverified",
        action="store_true",
        help="also a checkpoint that is not VERIFIED, retired, or incomplete; never a damaged file",
    )
    add_bandwidth(command)
    add_dry_run(command, "downloaded")


def run(args: argparse.Namespace) -> int:
    """Find the checkpoint, download it, print where it is; return the exit code of the worst file that failed."""
    store, what = _store(args)
    destination = Path(args.destination).absolute()
    check_outside(store, destination)
    found = find(store, Request(what, "any" if args.unverified else "verified", args.node or "", args.consolidated))
    download = _model_download(destination, found.plan) if args.consolidated else Download(destination, found.plan)
    name = f"{found.run}/{found.location}"
    if args.dry_run:
        done = download.preview()
    else:
        with (silent if args.json else shown)(f"pulling {name}") as progress:
            done = download.run(store, progress, reached(args).limits.threads)
    notes = [*found.plan.notes, *found.plan.missing, *_remarks(store, found, download, done)]
    result = _described(found, done, notes, args)
    output.print_json(result) if args.json else _show(result)
    return int(result["exit_code"])


def _model_download(directory: Path, plan: Plan) -> Download:
    """Return the download of a model: the named directory itself becomes the model's."""
    directory = directory.resolve() if directory.name in ("", "..") else directory
    if not directory.name:
        raise ConfigError(f"{directory}: cannot become a model's directory", hint="name a new directory")
    return Download(directory.parent, replace(plan, name=directory.name))


def _described(found: Found, done: Result, notes: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    codes = [e.exit_code for e in done.failed.values()]
    return {
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


def _store(args: argparse.Namespace) -> tuple[Store, str]:
    """Return the store, and the run (and checkpoint) in it: a URL or a path names both."""
    is_location = "://" in args.what or args.what.startswith(("/", "./", "../"))
    if is_location and (args.url or args.config):
        raise ConfigError(f"{args.what}: names a store, and another store is given", hint="give one of them")
    if is_location:
        return split_url(args.what, reached(args))
    return asked_store(args), args.what


def _remarks(store: Store, found: Found, download: Download, done: Result) -> list[str]:
    notes = []
    if done.failed:
        if reason := why_retired(store, found.run, found.location):
            notes.append(f"retention is deleting {found.run}/{found.location}: {reason}")
        else:
            location = f"{store.url.rstrip('/')}/{found.run}/{found.location}"
            first = (
                "" if found.status == "DAMAGED" else f"`{shlex.join(['ckptsync', 'verify', location])}` records the damage; then "
            )
            notes.append(f"{first}a node that still has the bytes uploads them again; `ckptsync repair` says which")
        notes.append("the files that could be downloaded are kept; the same command continues with them")
    notes += [
        f"{other}: left by another pull of {download.plan.name}, and not needed by this one" for other in download.leftovers()
    ]
    return notes


def _show(result: dict[str, Any]) -> None:
    name = output.clean(f"{result['run']}/{result['location']}")
    part = {"whole": "", "model": ", its consolidated model"}.get(result["part"], f", what {result['part']} needs")
    print(f"{name} ({result['status']}){output.clean(part)}: {result['files']} files, {show_size(result['bytes'])}")
    if result["there"]["files"]:
        print(f"  there already: {result['there']['files']} files, {show_size(result['there']['bytes'])}")
    for path, why in list(result["failed"].items())[:_LINES]:
        print(output.clean(f"  failed: {path}: {why}"))
    if len(result["failed"]) > _LINES:
        print(f"  and {len(result['failed']) - _LINES} more (--json lists all)")
    for note in result["notes"]:
        print(output.clean(f"  note: {note}"))
    beside = f", beside it {', '.join(result['pointers'])}" if result["pointers"] else ""
    state = (
        "would be in"
        if result["dry_run"]
        else "not complete; the files that could be downloaded are in"
        if result["failed"]
        else "in"
    )
    print(output.clean(f"{state} {result['directory']}{beside}"))
