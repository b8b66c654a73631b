"""``ckptsync push``: upload one checkpoint, or every checkpoint of a directory, now.

A user may want to upload without a worker, or what a worker refuses.  `worker.push` finds, plans
and uploads; this module reads options and configuration, and prints what was left out and why.
"""

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
SHOWN = 12  # the number of left-out files whose names are printed
PRESETS = ("all", "no-optimizer", "weights")

NOTES = """\
DIR is a checkpoint by its name, such as `checkpoint-500`; else each checkpoint in it is
uploaded that a worker would find, and the final model as `final`; else, if `inspect` can read
DIR, or it is a copy of a checkpoint, all of it as one checkpoint of its own name. The run is
the directory above.

A worker's configuration (`-c`) gives the defaults of `--send`, `--include` and `--exclude`.
Names in a store have letters, digits, `_`, `.` and `-`; `--as` is refused if DIR holds
checkpoints with names of their own.

Unknown layouts (`weights.npz`, `model.gguf`, Orbax, …) are stored and can be pulled. They stay
INCOMPLETE and are never merged.

Links below DIR are not followed; a link that you name is. Empty directories are not kept. What
is left out, such as logs, is listed, with the command that uploads it. Configuration and
tokenizer that the checkpoint lacks are looked for around it; a note names their source.

What is torn, open or, by the trainer's own record, not finished is refused (exit code 3). Where
nothing proves that a checkpoint is finished, `push` relies on you, and a note says so. It
commits nothing that changes meanwhile.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
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
    """Upload each directory unless it is a dry run, and print what was uploaded; return 0.

    All directories are planned before any is uploaded.  Files that the store has already are not
    uploaded again; the store is made if it is new.  Raises ConfigError, Incomplete, Corrupt,
    StoreError.
    """
    _check_directories(args)
    url, config = store_url(args), configuration(args)
    node = _checked_node(args.node) or (config.node if config else "") or node_id()
    worker = config.worker if config else None
    selection = Selection(
        args.send or (worker.send if worker else "all"),
        _checked_globs("--include", args.include) or (worker.include if worker else ()),
        _checked_globs("--exclude", args.exclude) or (worker.exclude if worker else ()),
    )
    runs: tuple[RunDir, ...] = ()
    if worker:
        from ckptsync.config.output_dirs import existing_directories

        directories = existing_directories(worker.runs, url).runs
        runs = tuple(RunDir(run.name, Path(run.path)) for run in directories)
    access = access_of(args)
    located(url)  # refuse a wrong URL before any directory is read
    uploads = [
        _plan_upload(args, Path(directory), url, runs, node=node, selection=selection)
        for directory in args.directories
    ]
    left_out = [path for upload in uploads for path in upload.left_out]
    if args.dry_run:
        rows = [
            {**_describe(save), "run": upload.offer.run, "phase": "would be sent"}
            for upload in uploads
            for save in upload.plan
        ]
        return _show(args, url, rows, left_out)
    rows = []
    for upload in uploads:
        store = open_or_make_store(args, upload.offer.root)
        with output.progress(args, f"uploading {upload.offer.run}", KEPT) as progress:
            add = counted(progress, sum(save.size for save in upload.plan))
            results = push(
                upload.offer, store, node, add, threads=access.limits.threads, selection=selection
            )
        rows += [_describe(save) for save in results]
    return _show(args, url, rows, left_out)


class _PlannedUpload(NamedTuple):
    """The checkpoints of a directory, the plan of each, and the entries that are in none."""

    offer: Offer
    plan: Sequence[UploadProgress]
    left_out: Sequence[str]


def _check_directories(args: argparse.Namespace) -> None:
    """Raise ConfigError if the last of several words, or a URL, may be a store.

    Also for ``--as`` with several directories.
    """
    *earlier, last = args.directories
    is_store_like = "://" in last or not Path(last).exists() or is_store(last)
    if (earlier or "://" in last) and is_store_like:
        why = f"{last}: is no directory of checkpoints; --store names the store"
        raise ConfigError(why, hint=with_store(args, last))
    if earlier and args.name:
        raise ConfigError("--as is the name of one checkpoint", hint="push each directory alone")


def _plan_upload(
    args: argparse.Namespace,
    directory: Path,
    url: str,
    runs: tuple[RunDir, ...],
    *,
    node: str,
    selection: Selection,
) -> _PlannedUpload:
    """Return the plan of a directory's upload, and what of it is left out; upload nothing.

    Of several directories the left-out entries are named with theirs.  Raises ConfigError.
    """
    offer = find_offer(directory, runs, args.name, url)
    try:
        name = checked_run(args.run or offer.run)
    except ConfigError as e:
        raise e if args.run else ConfigError(str(e), hint="give the run a name: --run NAME") from e
    plan = plan_push(offer, node, selection)
    uploaded = {path for save in plan for path in save.added}
    # named within the directory; by path if there are several directories
    left_out = [
        entry for entry in offer.left_out if str(directory.resolve() / entry) not in uploaded
    ]
    if len(args.directories) > 1:
        left_out = [f"{directory}/{entry}" for entry in left_out]
    return _PlannedUpload(replace(offer, run=name), plan, left_out)


def open_or_make_store(args: argparse.Namespace, output_dir: Path) -> Store:
    """Open the store, or make a new one.

    Raises ConfigError if a store of this directory's uploads, or a mount, has gone: a new one there
    would hide that.  Raises StoreError.
    """
    from ckptsync.service.store_connection import Absent, check_not_gone, remembers

    def open_checked(url: str, options: Mapping[str, object], limits: Limits) -> Store:
        """Return the store, made if need be; raise ConfigError as `check_not_gone` does Absent."""
        directories = [str(output_dir)] if remembers(output_dir / SPOOL, url) else []
        is_local = not isinstance(located(url), Remote)
        if (directories or is_local) and not is_store(url, options, limits):
            try:
                check_not_gone(url, directories)
            except Absent as e:
                raise ConfigError(str(e), hint=e.hint) from e
        return create_store(url, options, limits)

    return named_store(args, open_checked)


def _checked_node(node: str | None) -> str:
    """Return the id of ``--node``, "" if it is not given.  Raises ConfigError."""
    try:
        return checked_node(node) if node else ""
    except Corrupt as e:
        raise ConfigError(f"--node: {e}") from e


def _checked_globs(flag: str, globs: list[str] | None) -> tuple[str, ...]:
    """Return the globs of an option.  Raises ConfigError for an empty or absolute one."""
    for glob in globs or ():
        if not glob or glob.startswith("/"):
            why = f"{flag}: {glob!r} is not a glob of files in a checkpoint"
            raise ConfigError(why, hint='such as "*.safetensors", or "optimizer*"')
    return tuple(globs or ())


def counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that adds the bytes of a chunk, and reports the sum of ``total``.

    A chunk that must be read again has a negative count.
    """
    done = 0

    def add(count: int) -> None:
        """Add a chunk's bytes."""
        nonlocal done
        done += count
        progress(max(0, min(done, total)), total)

    return add


def notes(url: str) -> list[str]:
    """Return the warning on a store that fsspec opens, in a list; [] for any other URL."""
    path_or_url = located(url)
    if not isinstance(path_or_url, Remote) or path_or_url.scheme in SCHEMES:
        return []
    from ckptsync.stores.fsspec import NOTE

    return [NOTE]


def _describe(save: UploadProgress) -> dict[str, Any]:
    """Return the progress of a save for ``--json``."""
    row = asdict(save)
    row["bytes"] = row.pop("size")
    return {key: value for key, value in row.items() if key not in ("k", "detail")}


def _show(
    args: argparse.Namespace, url: str, rows: list[dict[str, Any]], left_out: Sequence[str]
) -> int:
    """Print the rows of all saves, as JSON or for people, and what was left out; return 0."""
    if args.json:
        result = {"store": url, "dry_run": args.dry_run, "checkpoints": rows}
        output.print_json({**result, "left_out": left_out, "notes": notes(url)})
        return 0
    for row in rows:
        where = f" as {row['location']}" if row["location"] not in ("", row["checkpoint"]) else ""
        amount = "the store had every file already"
        if row["files"]:
            amount = f"{row['files']} files, {show_size(row['bytes'])}"
        say(f"{row['run']}/{row['checkpoint']}: {row['phase']}{where}, {amount}")
        for note in row["notes"]:
            say(f"  note: {note}")
        if row["left_out"]:
            say(f"  left out: {_listed(row['left_out'])}")
    if left_out:
        say(f"not uploaded, not part of a checkpoint: {_listed(left_out)}")
        say(f"  {_how_to_upload(args, left_out)}")
    if args.dry_run:
        say("nothing was uploaded; files that the store has already would not be uploaded again")
    return 0


def _how_to_upload(args: argparse.Namespace, left_out: Sequence[str]) -> str:
    """Return how to upload files beside checkpoints: the command for the first directory.

    Without a directory in ``left_out`` it is advice to make one.
    """
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
    """Return the first `SHOWN` names with commas, and how many more there are."""
    more = f" and {len(names) - SHOWN} more (--json lists them)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
