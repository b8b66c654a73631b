"""``ckptsync push``: send one checkpoint, or every one below a directory, now."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import add_bandwidth, add_dry_run
from ckptsync.cli.locations import configuration, options_for, reached
from ckptsync.cli.output import Progress, shown, silent
from ckptsync.config.runs import existing_directories
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.records.names import checked_node
from ckptsync.stores.generic.store import NOTE
from ckptsync.stores.opening import create_store
from ckptsync.stores.urls import Remote, located
from ckptsync.units import show_size
from ckptsync.worker import result
from ckptsync.worker.node import node_id
from ckptsync.worker.options import RunDir, checked_run
from ckptsync.worker.push import offered_to, planned, push_now
from ckptsync.worker.selecting import Selection

CONTINUED = frozenset({"s3", "sftp"})  # kinds of stores elsewhere in which a write that was interrupted goes on where it was

SHOWN = 12  # names of what is left out


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line wants, and where it says nothing the configuration."""

    url: str
    node: str
    selection: Selection
    runs: tuple[RunDir, ...]


PRESETS = ("all", "no-optimizer", "weights")
DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument("directory", metavar="DIR", help="a checkpoint, or an output directory of checkpoints")
    command.add_argument(
        "url", metavar="STORE_URL", nargs="?", help="the store, a path or a URL (default: the store of -c, or $CKPTSYNC_STORE)"
    )
    command.add_argument(
        "--as", dest="name", metavar="NAME", default="", help="upload all of DIR as one checkpoint of this name (default: its own)"
    )
    command.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help="a worker's configuration: its store, limits, node, names of runs, and which files it uploads",
    )
    command.add_argument(
        "--send",
        choices=PRESETS,
        help="all; no-optimizer: no optimizer states; weights: only the model (default: as -c says, or all)",
    )
    command.add_argument(
        "--include", metavar="GLOB", action="append", help="only files whose path or name matches; may be repeated"
    )
    command.add_argument("--exclude", metavar="GLOB", action="append", help="no file whose path or name matches; may be repeated")
    command.add_argument("--run", metavar="NAME", help="the run's name in the store (default: the output directory's name)")
    command.add_argument("--node", metavar="ID", help="the node's id in the store (default: computed)")
    add_bandwidth(command)
    add_dry_run(command, "uploaded")


def run(args: argparse.Namespace) -> int:
    """Send; what the store has already is not sent again."""
    asked = _asked(args, configuration(args))
    directory, access = Path(args.directory), reached(args)
    located(asked.url)
    offer = offered_to(asked.url, directory, asked.runs, args.name)
    name = _run_name(args.run, offer.run)
    plan = planned(offer, asked.node, asked.selection)
    added = {path for one in plan for path in one.added}
    left_out = [entry for entry in offer.left_out if str(directory.resolve() / entry) not in added]
    if args.dry_run:
        _say(args, asked.url, [{**_described(one), "run": name, "phase": "would be sent"} for one in plan], left_out)
        return 0
    store = create_store(asked.url, options_for(asked.url, access), access.limits)
    total = sum(one.size for one in plan)
    with (silent if args.json else shown)(f"sending {name}") as progress:
        passed, threads = counting(progress, total), access.limits.threads
        sent = push_now(
            directory,
            store,
            asked.node,
            name,
            passed,
            threads=threads,
            selection=asked.selection,
            runs=asked.runs,
            name=args.name,
        )
    _say(args, asked.url, [_described(one) for one in sent], left_out)
    return 0


def _asked(args: argparse.Namespace, config: Config | None) -> Asked:
    if config and args.url:
        raise ConfigError(f"{args.url}: a store and a configuration are given", hint="give one of them")
    url = config.store.url if config else args.url or os.environ.get("CKPTSYNC_STORE", "")
    if not url:
        raise ConfigError("no store was named", hint="give its URL, a configuration with -c, or set CKPTSYNC_STORE")
    worker = config.worker if config else None
    return Asked(
        url,
        checked(args.node or "") or (config.node if config else "") or node_id(),
        Selection(
            args.send or (worker.send if worker else "all"),
            _globs("--include", args.include) or (worker.include if worker else ()),
            _globs("--exclude", args.exclude) or (worker.exclude if worker else ()),
        ),
        tuple(RunDir(r.name, Path(r.path)) for r in existing_directories(worker.runs, url).runs) if worker else (),
    )


def _run_name(given: str | None, found: str) -> str:
    """Return the run's name in the store; ``found``: a directory's, which a store may not be able to keep."""
    try:
        return checked_run(given or found)
    except ConfigError as e:
        raise e if given else ConfigError(str(e), hint="give the run a name: --run NAME") from e


def _globs(flag: str, given: list[str] | None) -> tuple[str, ...]:
    wrong = next((glob for glob in given or () if not glob or glob.startswith("/")), None)
    if wrong is not None:
        raise ConfigError(f"{flag}: {wrong!r} is no glob of a checkpoint's files", hint='such as "*.safetensors", or "optimizer*"')
    return tuple(given or ())


def checked(node: str) -> str:
    """A node id that may be, or the empty string; raises ConfigError."""
    try:
        return checked_node(node) if node else ""
    except Corrupt as e:
        raise ConfigError(f"--node: {e}") from e


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """From bytes of each chunk that is read, or has to be read again, to bytes done of all files."""
    done = 0

    def passed(count: int) -> None:
        nonlocal done
        done += count
        progress(max(0, min(done, total)), total)

    return passed


def notes(url: str) -> list[str]:
    """What is to be known of stores of this kind."""
    location = located(url)
    return [NOTE] if isinstance(location, Remote) and location.scheme not in CONTINUED else []


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more (--json lists them)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _described(one: result.Progress) -> dict[str, Any]:
    return {key: value for key, value in asdict(one).items() if key not in ("k", "detail")}


def _say(args: argparse.Namespace, url: str, found: list[dict[str, Any]], left_out: Sequence[str]) -> None:
    if args.json:
        told = {"store": url, "dry_run": args.dry_run, "checkpoints": found, "left_out": left_out, "notes": notes(url)}
        output.print_json(told)
        return
    for one in found:
        where = f" as {one['location']}" if one["location"] not in ("", one["checkpoint"]) else ""
        amount = f"{one['files']} files, {show_size(one['size'])}" if one["files"] else "all of it was there already"
        print(output.clean(f"{one['run']}/{one['checkpoint']}: {one['phase']}{where}, {amount}"))
        for note in one["notes"]:
            print(output.clean(f"  note: {note}"))
        if one["left_out"]:
            print(output.clean(f"  left out: {_listed(one['left_out'])}"))
    if left_out:
        print(output.clean(f"left out, in no checkpoint: {_listed(left_out)}"))
        print("  to send a directory whole: name it, with --as NAME where it is to have another name")
    if args.dry_run:
        print("nothing was sent; files that the store has already would not be sent again")
