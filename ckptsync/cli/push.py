"""``ckptsync push``: send one checkpoint, or every one below a directory, now."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptsync import scan
from ckptsync.cli import output
from ckptsync.cli.places import options_for, reached
from ckptsync.cli.progress import Progress, shown, silent
from ckptsync.config.units import show_size
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.records.names import checked_node
from ckptsync.stores.generic.store import NOTE
from ckptsync.stores.opening import create_store
from ckptsync.stores.urls import Remote, located
from ckptsync.worker import result
from ckptsync.worker.options import checked_run
from ckptsync.worker.push import push_now, to_push

CONTINUED = frozenset({"s3", "sftp"})  # kinds of stores elsewhere in which a write that was interrupted goes on where it was


def run(args: argparse.Namespace) -> int:
    """Send; what the store has already is not sent again."""
    directory, node = Path(args.directory), checked(args.node or "")
    name, spots = to_push(directory)
    name = checked_run(args.run or name)
    located(args.url)
    access = reached(args)
    sizes = {spot.name: [file.size for file in scan.found(spot).files] for spot in spots}
    if args.dry_run:
        _say(args, [_planned(name, checkpoint, found) for checkpoint, found in sizes.items()])
        return 0
    store = create_store(args.url, options_for(args.url, access), access.limits)
    total = sum(map(sum, sizes.values()))
    with (silent if args.json else shown)(f"sending {name}") as progress:
        sent = push_now(directory, store, node, name, counting(progress, total), threads=access.limits.threads)
    _say(args, [_described(one) for one in sent])
    return 0


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
    place = located(url)
    return [NOTE] if isinstance(place, Remote) and place.scheme not in CONTINUED else []


def _planned(run: str, checkpoint: str, sizes: list[int]) -> dict[str, Any]:
    return {
        "run": run,
        "checkpoint": checkpoint,
        "phase": "would be sent",
        "files": len(sizes),
        "size": sum(sizes),
        "place": "",
        "notes": [],
    }


def _described(one: result.Progress) -> dict[str, Any]:
    return {key: value for key, value in asdict(one).items() if key not in ("k", "detail")}


def _say(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    if args.json:
        output.print_json({"store": args.url, "dry_run": args.dry_run, "checkpoints": found, "notes": notes(args.url)})
        return
    for one in found:
        where = f" as {one['place']}" if one["place"] not in ("", one["checkpoint"]) else ""
        amount = f"{one['files']} files, {show_size(one['size'])}" if one["files"] else "all of it was there already"
        print(output.clean(f"{one['run']}/{one['checkpoint']}: {one['phase']}{where}, {amount}"))
        for note in one["notes"]:
            print(output.clean(f"  note: {note}"))
    if args.dry_run:
        print("nothing was sent; files that the store has already would not be sent again")
