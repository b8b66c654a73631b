"""Find files that are not of one save by the times at which they were written.  Pure.

Shards newer than their own metadata, or too far apart, are of several saves.

Times are compared within one directory, never across the clocks of several machines.  Copying may
lose them: then files follow each other as fast as the disk or the network takes them, and that
never counts against them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.layouts.file_names import DCP_SHARD, METADATA, is_of_one_rank, join
from ckptsync.walk import SAME_MOMENT, SLOW

APART = 1800.0  # seconds that ranks of one save may be apart: their barrier would have given up
_LOST = "if only the times were lost in copying:"


@dataclass(frozen=True, slots=True)
class Dated:
    """A file's size, and when it was last written to, in seconds."""

    size: int
    written: float


def check_times(files: Mapping[str, Dated], reads: Collection[str]) -> None:
    """Raise Incomplete or Corrupt if files cannot be of one save.

    Incomplete: shards are newer than the metadata of their save.  Corrupt: they are too far apart.

    ``files`` are those of one directory, ``reads`` the names that a merge copies from.  DeepSpeed's
    model and optimizer files are of one save, also where only some of them are read.
    """
    groups: defaultdict[str, dict[str, Dated]] = defaultdict(dict)
    states = (name for name in files if name.endswith("_states.pt"))
    for name in sorted({*reads, *states} & files.keys()):
        groups[_group(name)][name] = files[name]
    for folder in sorted({_group(name) for name in reads} & groups.keys()):
        # of other metadata than that of a distributed checkpoint it may be the optimizer's
        shards = {name: dated for name, dated in groups[folder].items() if name.endswith(DCP_SHARD)}
        if (metadata := join(folder, METADATA)) in files:
            _check_overwritten(metadata, files[metadata], shards)
        for name in files:
            where, _, base = name.rpartition("/")
            # of ranks that know of no other each ends its own save
            if where == folder and is_of_one_rank(base):
                first = name.removesuffix(METADATA) + "_"
                own = {shard: dated for shard, dated in shards.items() if shard.startswith(first)}
                _check_overwritten(name, files[name], own)
        _check_together(groups[folder])


def notes_on_times(
    nodes: Mapping[str, Mapping[str, Dated]], reads: Collection[str]
) -> tuple[str, ...]:
    """Return notes on nodes whose shards were written further apart than one save takes.

    ``nodes`` has one directory a node.

    No error: clocks of nodes differ, and shards are copied by hand without their times.
    """
    spans = []
    for node, files in nodes.items():
        if times := [files[name].written for name in reads if name in files]:
            spans.append((min(times), max(times), node))
    spans.sort()
    return tuple(
        f"{other} was written {_duration(late - end)} after {one}: are they of one save?"
        for (_, end, one), (late, _, other) in pairwise(spans)
        if late - end > APART
    )


def _group(name: str) -> str:
    """Return the directory of a file.

    All parameters of a universal checkpoint are one group: a conversion writes them, while model
    files keep their times.
    """
    folder = name.rpartition("/")[0]
    parent = folder.rpartition("/")[0]
    return parent if parent.rpartition("/")[2] == "zero" else folder


def _check_overwritten(name: str, metadata: Dated, shards: Mapping[str, Dated]) -> None:
    """torch writes ``.metadata`` when all shards are there.

    A save over a checkpoint leaves the old one until then.
    """
    newer = [
        (dated.written, shard)
        for shard, dated in shards.items()
        if dated.written > metadata.written
    ]
    if not newer:
        return
    first, shard = min(newer)
    if first - metadata.written > SAME_MOMENT + shards[shard].size / SLOW:
        raise Incomplete(
            f"{shard}: written {_duration(first - metadata.written)} after {name}, which ends a"
            " save",
            hint=(
                f"a save that is not finished overwrote it; {_LOST} touch {name}, or merge with"
                " --ignore-times"
            ),
        )


def _check_together(shards: Mapping[str, Dated]) -> None:
    """Raise Corrupt where no file was written for longer than the ranks of a save wait."""
    order = sorted(shards, key=lambda name: shards[name].written)
    for n, (one, two) in enumerate(pairwise(order), 1):
        apart = shards[two].written - shards[one].written
        if apart <= APART + shards[two].size / SLOW:
            continue
        odd, others, when = (
            (order[:n], order[n:], "before")
            if n <= len(order) - n
            else (order[n:], order[:n], "after")
        )
        raise Corrupt(
            f"{odd[0]}: written {_duration(apart)} {when} {others[0]}, so they are not of one save",
            hint=(
                f"fetch the files of one save; {_LOST} touch them all, or merge with --ignore-times"
            ),
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
