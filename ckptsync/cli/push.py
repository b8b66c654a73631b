"""``ckptsync push``: upload one checkpoint, or every checkpoint of a directory, now."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    access_of,
    add_bandwidth,
    add_dry_run,
    configuration,
    named_store,
    store_url,
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
from ckptsync.worker.push import find_offer, plan_push, push
from ckptsync.worker.results import UploadProgress

SHOWN = 12  # names of files that are left out
PRESETS = ("all", "no-optimizer", "weights")


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("directory", metavar="DIR", help="a checkpoint, or an output directory of checkpoints")
    add(
        "url",
        metavar="STORE_URL",
        nargs="?",
        help="the store, a path or a URL (default: the store of -c, or $CKPTSYNC_STORE)",
    )
    add(
        "--as",
        dest="name",
        metavar="NAME",
        default="",
        help="upload all of DIR as one checkpoint of this name (default: its own)",
    )
    add(
        "-c",
        "--config",
        metavar="CONFIG",
        help="a worker's configuration: its store, limits, node, names of runs, and which files it"
        " uploads",
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
    """Upload; a file that the store has already is not uploaded again."""
    url, config, directory = store_url(args), configuration(args), Path(args.directory)
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
    located(url)  # a URL that names no store is refused before the directory is read
    offer = find_offer(directory, runs, args.name, url)
    try:
        name = checked_run(args.run or offer.run)
    except ConfigError as e:
        raise e if args.run else ConfigError(str(e), hint="give the run a name: --run NAME") from e
    plan = plan_push(offer, node, selection)
    added = {path for one in plan for path in one.added}
    left_out = [entry for entry in offer.left_out if str(directory.resolve() / entry) not in added]
    if args.dry_run:
        found = [{**_described(one), "run": name, "phase": "would be sent"} for one in plan]
        return _show(args, url, found, left_out)
    store = _store(args, offer.root)
    offer = replace(offer, run=name)
    with output.progress(args, f"uploading {name}") as progress:
        passed, threads = counted(progress, sum(one.size for one in plan)), access.limits.threads
        sent = push(offer, store, node, passed, threads=threads, selection=selection)
    return _show(args, url, [_described(one) for one in sent], left_out)


def _store(args: argparse.Namespace, output_dir: Path) -> Store:
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
    return {key: value for key, value in asdict(one).items() if key not in ("k", "detail")}


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
            amount = f"{one['files']} files, {show_size(one['size'])}"
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
    store = ["-c", args.config] if args.config else [args.url or ""]
    command = push_command(Path(args.directory, folder), *store, whole=True)
    run = f" --run {shlex.quote(args.run)}" if args.run else ""
    return f"to upload a directory of these as it is: {command}{run}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more (--json lists them)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
