"""Find files that are not of one save by the times at which they were written.  Pure.

Ranks of one save write within minutes, and metadata after its shards.  So shards that are newer
than their own metadata, or too far apart, are of several saves.  Times are compared within one
directory, never across the clocks of several machines.  Copying may lose them: then files follow
each other as fast as the disk or the network takes them, and that never counts against them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.layouts.file_names import DCP_SHARD, METADATA, is_of_one_rank, join
from ckptsync.walk import SAME_MOMENT, SLOW

APART = 1800.0  # seconds that ranks of one save may be apart: their barrier would have given up
_LOST = "if only the times were lost in copying:"


def check_times(
    written: Mapping[str, float], sizes: Mapping[str, int], reads: Collection[str]
) -> None:
    """Raise Incomplete or Corrupt if files of one directory cannot be of one save.

    Incomplete: shards are newer than the metadata of their save.  Corrupt: they are too far apart.
    DeepSpeed's model and optimizer files are of one save, also where only some of them are read.

    Args:
        written: The time at which each file was last written to, in seconds.
        sizes: The sizes of the files.
        reads: The names that a merge copies from.

    """
    groups: defaultdict[str, list[str]] = defaultdict(list)
    states = (name for name in written if name.endswith("_states.pt"))
    for name in sorted({*reads, *states} & written.keys()):
        groups[_group(name)].append(name)
    for folder in sorted({_group(name) for name in reads} & groups.keys()):
        # of other metadata than that of a distributed checkpoint it may be the optimizer's
        shards = [name for name in groups[folder] if name.endswith(DCP_SHARD)]
        if (metadata := join(folder, METADATA)) in written:
            _check_overwritten(metadata, shards, written, sizes)
        for name in written:
            directory, _, base = name.rpartition("/")
            # of ranks that know of no other each ends its own save
            if directory == folder and is_of_one_rank(base):
                first = name.removesuffix(METADATA) + "_"
                shards_of_rank = [shard for shard in shards if shard.startswith(first)]
                _check_overwritten(name, shards_of_rank, written, sizes)
        _check_together(groups[folder], written, sizes)


def notes_on_times(
    nodes: Mapping[str, Mapping[str, float]], reads: Collection[str]
) -> tuple[str, ...]:
    """Return notes on nodes that began more than `APART` after the node before had ended.

    ``nodes``: of each node's directory, when its files were last written to, in seconds; only
    those of ``reads`` count.  This is no error: clocks of nodes differ, and shards are copied by
    hand without their times.
    """
    spans = []
    for node, written in nodes.items():
        if times := [written[name] for name in reads if name in written]:
            spans.append((min(times), max(times), node))
    spans.sort()
    return tuple(
        f"{later} was written {_duration(late - end)} after {earlier}: are they of one save?"
        for (_, end, earlier), (late, _, later) in pairwise(spans)
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


def _check_overwritten(
    metadata: str, shards: Iterable[str], written: Mapping[str, float], sizes: Mapping[str, int]
) -> None:
    """Raise Incomplete if the first shard written after ``metadata`` is much newer than it.

    torch writes metadata last: a save over a checkpoint leaves the old one until its end. "Much" is
    `SAME_MOMENT` and the time in which a slow disk writes the shard.
    """
    newer = [(written[shard], shard) for shard in shards if written[shard] > written[metadata]]
    if not newer:
        return
    first, shard = min(newer)
    after = first - written[metadata]
    if after > SAME_MOMENT + sizes[shard] / SLOW:
        raise Incomplete(
            f"{shard}: written {_duration(after)} after {metadata}, which ends a save",
            hint=(
                f"a save that is not finished overwrote it; {_LOST} touch {metadata}, or merge with"
                " --ignore-times"
            ),
        )


def _check_together(
    names: Iterable[str], written: Mapping[str, float], sizes: Mapping[str, int]
) -> None:
    """Raise Corrupt if a file is over `APART` seconds, and its writing time, behind the one before.

    The order is that of the times in ``written``.
    """
    order = sorted(names, key=written.__getitem__)
    for n, (before, after) in enumerate(pairwise(order), 1):
        apart = written[after] - written[before]
        if apart <= APART + sizes[after] / SLOW:
            continue
        odd_files, other_files, when = (
            (order[:n], order[n:], "before")
            if n <= len(order) - n
            else (order[n:], order[:n], "after")
        )
        raise Corrupt(
            f"{odd_files[0]}: written {_duration(apart)} {when} {other_files[0]}, so they are not"
            " of one save",
            hint=(
                f"fetch the files of one save; {_LOST} touch them all, or merge with --ignore-times"
            ),
        )


def _duration(seconds: float) -> str:
    """Return seconds as a text in a suitable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
