"""What the times of files tell of a save: shards written after their own metadata, or far apart.  Only of one directory, never across clocks.

Copying may lose times: then files follow each other as fast as the disk or the network takes them, and that is never held against them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.formats.dcp_metadata import METADATA
from ckptsync.formats.joining import join

AT_ONCE = 5.0  # seconds by which clocks of nodes that share a directory may differ, and files follow each other
APART = 1800.0  # seconds that ranks of one save may be apart: their barrier would have given up
SLOW = 25 << 20  # bytes a second of the slowest copying that is not taken for another save

_DOWNLOADED = ("whole", "peft")  # models that are fetched file by file, over days
_WITHOUT_METADATA = "dcp_safetensors"  # a .metadata beside its shards is the optimizer's, which may be saved before them


@dataclass(frozen=True, slots=True)
class Dated:
    """A file's size, and when it was last written to, in seconds."""

    size: int
    written: float


def check_dates(layout: str, files: Mapping[str, Dated], reads: Collection[str]) -> None:
    """Raise Incomplete if shards are newer than the metadata of their save, Corrupt if they cannot be of one save.

    ``files`` are those of one directory, ``reads`` the names that a merge copies from: they, and what stands beside them under such a
    name (the optimizer states beside a model file), are one save.
    """
    if layout in _DOWNLOADED:
        return
    kinds = {_kind(name) for name in reads if name in files}
    for folder, _ in sorted(kinds):
        together = {name: dated for name, dated in files.items() if name.rpartition("/")[0] == folder and _kind(name) in kinds}
        metadata = join(folder, METADATA)
        if metadata in files and layout != _WITHOUT_METADATA:
            _check_overwritten(metadata, files[metadata], together)
        _check_together(together)


def _kind(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    return folder, base.rpartition(".")[2]


def _check_overwritten(name: str, metadata: Dated, shards: Mapping[str, Dated]) -> None:
    """torch writes ``.metadata`` when all shards are there; saving over a checkpoint leaves the old one until then."""
    newer = sorted((dated.written, shard) for shard, dated in shards.items() if dated.written > metadata.written)
    if not newer:
        return
    first, shard = newer[0]
    if first - metadata.written > AT_ONCE + shards[shard].size / SLOW:
        raise Incomplete(
            f"{shard}: written {_told(first - metadata.written)} after {name}, which ends a save",
            hint=f"it was overwritten by a save that is not finished; if only the times were lost in copying: touch {name}",
        )


def _check_together(shards: Mapping[str, Dated]) -> None:
    for older, newer in _gaps(shards):
        odd, others = (older, newer) if len(older) <= len(newer) else (newer, older)
        apart = shards[newer[0]].written - shards[older[-1]].written
        when = "before" if odd is older else "after"
        raise Corrupt(
            f"{odd[0]}: written {_told(apart)} {when} {others[0]}, so they are not of one save",
            hint="fetch those of one save; if they are of one and only their times were lost in copying: touch them all",
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
