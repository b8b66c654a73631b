"""What the times of files tell of a save: shards written after their own metadata, or far apart.  Only of one directory, never across clocks.

Copying may lose times: then files follow each other as fast as the disk or the network takes them, and that is never held against them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.layouts.dcp_metadata import METADATA, is_of_one_rank
from ckptsync.layouts.names import join

AT_ONCE = 5.0  # seconds by which clocks of nodes that share a directory may differ, and files follow each other
APART = 1800.0  # seconds that ranks of one save may be apart: their barrier would have given up
SLOW = 25 << 20  # bytes a second of the slowest copying that is not taken for another save


@dataclass(frozen=True, slots=True)
class Dated:
    """A file's size, and when it was last written to, in seconds."""

    size: int
    written: float


def check_dates(files: Mapping[str, Dated], reads: Collection[str]) -> None:
    """Raise Incomplete if shards are newer than the metadata of their save, Corrupt if they cannot be of one save.

    ``files`` are those of one directory, ``reads`` the names that a merge copies from.  DeepSpeed's model and optimizer files are of one save,
    also where only some of them are read.
    """
    groups: defaultdict[str, dict[str, Dated]] = defaultdict(dict)
    for name in sorted({*reads, *(name for name in files if name.endswith("_states.pt"))} & files.keys()):
        groups[_group(name)][name] = files[name]
    for folder in sorted({_group(name) for name in reads} & groups.keys()):
        metadata = join(folder, METADATA)
        shards = {
            name: dated for name, dated in groups[folder].items() if name.endswith(".distcp")
        }  # of others it may be the optimizer's
        if metadata in files:
            _check_overwritten(metadata, files[metadata], shards)
        for own, prefix in _of_ranks(files, folder):  # of ranks that know of no other each ends its own save
            _check_overwritten(own, files[own], {name: dated for name, dated in shards.items() if name.startswith(prefix)})
        _check_together(groups[folder])


def remark_apart(places: Mapping[str, Mapping[str, Dated]], reads: Collection[str]) -> tuple[str, ...]:
    """What to say of directories, one a node, whose shards were written longer apart than one save takes.

    No more than that: clocks of nodes differ, and shards are copied by hand without their times.
    """
    spans = []
    for place, files in places.items():
        if times := [files[name].written for name in reads if name in files]:
            spans.append((min(times), max(times), place))
    spans.sort()
    return tuple(
        f"{other} was written {_told(late - end)} after {one}: are they of one save?"
        for (_, end, one), (late, _, other) in pairwise(spans)
        if late - end > APART
    )


def _of_ranks(files: Mapping[str, Dated], folder: str) -> Iterator[tuple[str, str]]:
    """``__3.metadata``, and how that rank's shards begin."""
    for name in files:
        where, _, base = name.rpartition("/")
        if where == folder and is_of_one_rank(base):
            yield name, name.removesuffix(METADATA) + "_"


def _group(name: str) -> str:
    """The directory; of a universal checkpoint all of its parameters', which a conversion writes while model files keep their times."""
    folder = name.rpartition("/")[0]
    parent = folder.rpartition("/")[0]
    return parent if parent.rpartition("/")[2] == "zero" else folder


def _check_overwritten(name: str, metadata: Dated, shards: Mapping[str, Dated]) -> None:
    """torch writes ``.metadata`` when all shards are there; saving over a checkpoint leaves the old one until then."""
    newer = sorted((dated.written, shard) for shard, dated in shards.items() if dated.written > metadata.written)
    if not newer:
        return
    first, shard = newer[0]
    if first - metadata.written > AT_ONCE + shards[shard].size / SLOW:
        raise Incomplete(
            f"{shard}: written {_told(first - metadata.written)} after {name}, which ends a save",
            hint=f"it was overwritten by a save that is not finished; if only the times were lost in copying: touch {name}, or merge with --ignore-times",
        )


def _check_together(shards: Mapping[str, Dated]) -> None:
    for older, newer in _gaps(shards):
        odd, others = (older, newer) if len(older) <= len(newer) else (newer, older)
        apart = shards[newer[0]].written - shards[older[-1]].written
        when = "before" if odd is older else "after"
        raise Corrupt(
            f"{odd[0]}: written {_told(apart)} {when} {others[0]}, so they are not of one save",
            hint="fetch those of one save; if they are of one and only their times were lost in copying: touch them all, or merge with --ignore-times",
        )


def _gaps(shards: Mapping[str, Dated]) -> Iterator[tuple[list[str], list[str]]]:
    """Where nothing was written for longer than one save waits: the names before, and those behind."""
    order = sorted(shards, key=lambda name: shards[name].written)
    for n, (one, two) in enumerate(pairwise(order), 1):
        if shards[two].written - shards[one].written > APART + shards[two].size / SLOW:
            yield order[:n], order[n:]


def _told(seconds: float) -> str:
    return (
        f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
    )
