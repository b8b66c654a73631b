"""``ckptsync pull``: a checkpoint, or a consolidated model, out of a store into a directory that a training can go on from."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.places import asked_store, reached
from ckptsync.cli.progress import shown, silent
from ckptsync.config.units import show_size
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.pull.bringing import Pulled, carry_out, foreseen
from ckptsync.pull.landing import Landing
from ckptsync.pull.ordering import Asked, Ordered, check_apart, inside, ordered, retired
from ckptsync.pull.wanted import Order
from ckptsync.stores.contract import Store

_LINES = 20


def run(args: argparse.Namespace) -> int:
    """Look, bring what is missing, say where it lies; the exit code of the worst that could not be given."""
    store, what = _store(args)
    destination = Path(args.destination).absolute()
    check_apart(store, destination)
    found = ordered(store, Asked(what, "any" if args.unverified else "verified", args.node or "", args.consolidated))
    landing = _own(destination, found.order) if args.consolidated else Landing(destination, found.order)
    name = f"{found.run}/{found.place}"
    if args.dry_run:
        pulled = foreseen(landing)
    else:
        with (silent if args.json else shown)(f"pulling {name}") as progress:
            pulled = carry_out(store, landing, progress, reached(args).limits.threads)
    notes = [*found.order.notes, *found.order.lacking, *_remarks(store, found, landing, pulled)]
    result = described(found, pulled, notes, args)
    output.print_json(result) if args.json else _show(result)
    return int(result["exit_code"])


def _own(directory: Path, order: Order) -> Landing:
    """A model's directory is its own."""
    directory = directory.resolve() if directory.name in ("", "..") else directory
    if not directory.name:
        raise ConfigError(f"{directory}: no directory for a model", hint="name a new one")
    return Landing(directory.parent, replace(order, name=directory.name))


def described(found: Ordered, pulled: Pulled, notes: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """For ``--json``."""
    codes = [e.exit_code for e in pulled.failed.values()]
    return {
        "run": found.run,
        "place": found.place,
        "word": found.word,
        "part": "model" if args.consolidated else args.node or "whole",
        "directory": str(pulled.where),
        "files": pulled.files,
        "bytes": pulled.size,
        "there": {"files": pulled.there, "bytes": pulled.there_size},
        "failed": {path: str(e) for path, e in sorted(pulled.failed.items())},
        "pointers": list(pulled.pointers),
        "notes": notes,
        "dry_run": args.dry_run,
        "exit_code": Corrupt.exit_code if Corrupt.exit_code in codes else 3 if codes else 0,
    }


def _store(args: argparse.Namespace) -> tuple[Store, str]:
    """Of a run that is named, the store is named apart; a URL or a path names both."""
    is_place = "://" in args.what or args.what.startswith(("/", "./", "../"))
    if is_place and (args.url or args.config):
        raise ConfigError(f"{args.what}: a place in a store, and a store beside it, are given", hint="give one of them")
    if is_place:
        return inside(args.what, reached(args))
    return asked_store(args), args.what


def _remarks(store: Store, found: Ordered, landing: Landing, pulled: Pulled) -> list[str]:
    said = []
    if pulled.failed:
        if reason := retired(store, found.run, found.place):
            said.append(f"{found.run}/{found.place} is being let go: {reason}")
        else:
            place = f"{store.url.rstrip('/')}/{found.run}/{found.place}"
            first = "" if found.word == "DAMAGED" else f"`{shlex.join(['ckptsync', 'verify', place])}` records the damage; then "
            said.append(f"{first}a node that still has the bytes uploads them again; `ckptsync repair` says which")
        said.append("what could be had is kept, and the same command goes on with it")
    said += [f"{other}: left by another pull of {landing.order.name}, not needed by this one" for other in landing.others()]
    return said


def _show(result: dict[str, Any]) -> None:
    name = output.clean(f"{result['run']}/{result['place']}")
    part = {"whole": "", "model": ", its consolidated model"}.get(result["part"], f", what {result['part']} needs")
    print(f"{name} ({result['word']}){output.clean(part)}: {result['files']} files, {show_size(result['bytes'])}")
    if result["there"]["files"]:
        print(f"  there already: {result['there']['files']} files, {show_size(result['there']['bytes'])}")
    for path, why in list(result["failed"].items())[:_LINES]:
        print(output.clean(f"  not given: {path}: {why}"))
    if len(result["failed"]) > _LINES:
        print(f"  and {len(result['failed']) - _LINES} more (--json has all)")
    for note in result["notes"]:
        print(output.clean(f"  note: {note}"))
    beside = f", beside it {', '.join(result['pointers'])}" if result["pointers"] else ""
    state = "would be in" if result["dry_run"] else "nothing is in place; what could be had is in" if result["failed"] else "in"
    print(output.clean(f"{state} {result['directory']}{beside}"))
