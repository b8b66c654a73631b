"""``ckptsync push``: upload one checkpoint, or every checkpoint of a directory, now."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    access_of,
    add_bandwidth,
    add_dry_run,
    add_store_option,
    configuration,
    named_store,
    store_url,
    with_store,
)
from ckptsync.cli.output import Progress, say
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.quantities import show_size
from ckptsync.records.store_paths import checked_node
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import create_store, is_store
from ckptsync.stores.urls import SCHEMES, Remote, located
from ckptsync.walk import SPOOL
from ckptsync.worker.file_selection import Selection
from ckptsync.worker.node_identity import node_id
from ckptsync.worker.options import RunDir, checked_run, push_command
from ckptsync.worker.push import Offer, find_offer, plan_push, push
from ckptsync.worker.results import UploadProgress

KEPT = "are stored; the same command continues"
SHOWN = 12  # names of files that are left out
PRESETS = ("all", "no-optimizer", "weights")


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "directories",
        metavar="DIR",
        nargs="+",
        help="a checkpoint, or an output directory of checkpoints",
    )
    add_store_option(command)
    add(
        "--as",
        dest="name",
        metavar="NAME",
        default="",
        help="upload all of DIR as one checkpoint of this name (default: its own)",
    )
    add(
        "--send",
        choices=PRESETS,
        help="all; no-optimizer: no optimizer states; weights: only the model (default: as -c says,"
        " or all)",
    )
    for flag, text in (
        ("--include", "upload only files whose path or name matches; may be repeated"),
        ("--exclude", "leave out files whose path or name matches; may be repeated"),
    ):
        add(flag, metavar="GLOB", action="append", help=text)
    add(
        "--run",
        metavar="NAME",
        help="the run's name in the store (default: the output directory's name)",
    )
    add("--node", metavar="ID", help="the node's id in the store (default: computed)")
    add_bandwidth(command)
    add_dry_run(command, "uploaded")


def run(args: argparse.Namespace) -> int:
    """Upload each directory; a file that the store has already is not uploaded again."""
    _check_directories(args)
    url, config = store_url(args), configuration(args)
    node = _checked_node(args.node) or (config.node if config else "") or node_id()
    worker = config.worker if config else None
    selection = Selection(
        args.send or (worker.send if worker else "all"),
        _globs("--include", args.include) or (worker.include if worker else ()),
        _globs("--exclude", args.exclude) or (worker.exclude if worker else ()),
    )
    runs: tuple[RunDir, ...] = ()
    if worker:
        from ckptsync.config.output_dirs import existing_directories

        there = existing_directories(worker.runs, url).runs
        runs = tuple(RunDir(one.name, Path(one.path)) for one in there)
    access = access_of(args)
    located(url)  # a URL that names no store is refused before a directory is read
    uploads = [
        _planned(args, Path(directory), url, runs, node=node, selection=selection)
        for directory in args.directories
    ]
    left_out = [path for one in uploads for path in one.left_out]
    if args.dry_run:
        rows = [
            {**_described(save), "run": one.offer.run, "phase": "would be sent"}
            for one in uploads
            for save in one.plan
        ]
        return _show(args, url, rows, left_out)
    rows = []
    for one in uploads:
        store = open_or_make_store(args, one.offer.root)
        with output.progress(args, f"uploading {one.offer.run}", KEPT) as progress:
            passed = counted(progress, sum(save.size for save in one.plan))
            sent = push(
                one.offer, store, node, passed, threads=access.limits.threads, selection=selection
            )
        rows += [_described(save) for save in sent]
    return _show(args, url, rows, left_out)


class _Upload(NamedTuple):
    """One directory's checkpoints, what is planned of each, and what is in none of them."""

    offer: Offer
    plan: Sequence[UploadProgress]
    left_out: Sequence[str]


def _check_directories(args: argparse.Namespace) -> None:
    """Raise ConfigError where the last word names a store, or one name is for several."""
    *others, last = args.directories
    is_store_like = "://" in last or not Path(last).exists() or is_store(last)
    if (others or "://" in last) and is_store_like:
        why = f"{last}: is no directory of checkpoints; --store names the store"
        raise ConfigError(why, hint=with_store(args, last))
    if others and args.name:
        raise ConfigError("--as is the name of one checkpoint", hint="push each directory alone")


def _planned(
    args: argparse.Namespace,
    directory: Path,
    url: str,
    runs: tuple[RunDir, ...],
    *,
    node: str,
    selection: Selection,
) -> _Upload:
    """Find what a directory offers, and plan its upload.  Raises ConfigError."""
    offer = find_offer(directory, runs, args.name, url)
    try:
        name = checked_run(args.run or offer.run)
    except ConfigError as e:
        raise e if args.run else ConfigError(str(e), hint="give the run a name: --run NAME") from e
    plan = plan_push(offer, node, selection)
    added = {path for one in plan for path in one.added}
    # of one directory as always by its name in it, of several by the path that finds it
    left_out = [entry for entry in offer.left_out if str(directory.resolve() / entry) not in added]
    if len(args.directories) > 1:
        left_out = [f"{directory}/{entry}" for entry in left_out]
    return _Upload(replace(offer, run=name), plan, left_out)


def open_or_make_store(args: argparse.Namespace, output_dir: Path) -> Store:
    """Open the store, or make it where none was before.  Raises ConfigError."""
    from ckptsync.service.store_connection import Absent, check_not_gone, remembers

    def opened(url: str, options: Mapping[str, object], limits: Limits) -> Store:
        served = [str(output_dir)] if remembers(output_dir / SPOOL, url) else []
        is_local = not isinstance(located(url), Remote)
        if (served or is_local) and not is_store(url, options, limits):
            try:
                check_not_gone(url, served)
            except Absent as e:
                raise ConfigError(str(e), hint=e.hint) from e
        return create_store(url, options, limits)

    return named_store(args, opened)


def _checked_node(node: str | None) -> str:
    try:
        return checked_node(node) if node else ""
    except Corrupt as e:
        raise ConfigError(f"--node: {e}") from e


def _globs(flag: str, given: list[str] | None) -> tuple[str, ...]:
    for glob in given or ():
        if not glob or glob.startswith("/"):
            why = f"{flag}: {glob!r} is not a glob of files in a checkpoint"
            raise ConfigError(why, hint='such as "*.safetensors", or "optimizer*"')
    return tuple(given or ())


def counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that adds the bytes of a chunk and shows progress.

    A chunk that must be read again counts less than 0.
    """
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(max(0, min(done, total)), total)

    return add


def notes(url: str) -> list[str]:
    """Return what a user should know of stores of this kind."""
    where = located(url)
    if not isinstance(where, Remote) or where.scheme in SCHEMES:
        return []
    from ckptsync.stores.fsspec import NOTE

    return [NOTE]


def _described(one: UploadProgress) -> dict[str, Any]:
    row = asdict(one)
    row["bytes"] = row.pop("size")
    return {key: value for key, value in row.items() if key not in ("k", "detail")}


def _show(
    args: argparse.Namespace, url: str, found: list[dict[str, Any]], left_out: Sequence[str]
) -> int:
    if args.json:
        result = {"store": url, "dry_run": args.dry_run, "checkpoints": found}
        output.print_json({**result, "left_out": left_out, "notes": notes(url)})
        return 0
    for one in found:
        where = f" as {one['location']}" if one["location"] not in ("", one["checkpoint"]) else ""
        amount = "the store had every file already"
        if one["files"]:
            amount = f"{one['files']} files, {show_size(one['bytes'])}"
        say(f"{one['run']}/{one['checkpoint']}: {one['phase']}{where}, {amount}")
        for note in one["notes"]:
            say(f"  note: {note}")
        if one["left_out"]:
            say(f"  left out: {_listed(one['left_out'])}")
    if left_out:
        say(f"not uploaded, not part of a checkpoint: {_listed(left_out)}")
        say(f"  {_how_to_upload(args, left_out)}")
    if args.dry_run:
        say("nothing was uploaded; files that the store has already would not be uploaded again")
    return 0


def _how_to_upload(args: argparse.Namespace, left_out: Sequence[str]) -> str:
    """Say how to upload what lies beside checkpoints: directories, each as one checkpoint."""
    folder = next((name for name in left_out if name.endswith("/")), None)
    if folder is None:
        return "to upload such files, move them into a directory, and push it with --as NAME"
    directory = Path(folder) if len(args.directories) > 1 else Path(args.directories[0], folder)
    store = [
        *(["--store", args.url] if args.url else []),
        *(["-c", args.config] if args.config else []),
    ]
    command = push_command(directory, *store, whole=True)
    run = f" --run {shlex.quote(args.run)}" if args.run else ""
    return f"to upload a directory of these as it is: {command}{run}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more (--json lists them)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
