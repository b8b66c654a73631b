"""Whether the directories given hold one save: names, metadata, copies and times are asked, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ckptsync.digest import digest_stream
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.layouts import dcp
from ckptsync.layouts.dcp_metadata import metadata_files
from ckptsync.merge.dated import Dated, check_dates, remark_apart
from ckptsync.merge.prepare import Job
from ckptsync.model import Extent, Files, read
from ckptsync.stores.tree import Overlay, Tree


class Named(Protocol):
    """A path, of whatever kind."""

    @property
    def name(self) -> str:
        """Its last part."""
        ...


Judge = Callable[[Mapping[str, Dated], Collection[str]], None]  # as `check_dates`
_STEP = re.compile(r"(?:checkpoint|step|global_step|iter|epoch)[-_]?([0-9]+)")
_PIECE = 4 << 20


def check_saves(trees: Sequence[Tree], job: Job, judge: Judge = check_dates) -> None:
    """Raise Incomplete or Corrupt where something beside the shards says that they are not all of one save that was finished.

    ``judge`` is asked of those times that say when files were made.
    """
    if job.source.partition(":")[0] == dcp.NAME:
        _check_metadata(trees, {name.rpartition("/")[0] for name in job.reads})
    for tree in trees:
        judge(_dated(tree), job.reads)


def _check_metadata(trees: Sequence[Tree], folders: Collection[str]) -> None:
    """torch gives every save an id, so that the metadata of two never are the same; and writes it beside, before it takes the old one's place."""
    for name in sorted({name for tree in trees for folder in folders for name in metadata_files(tree.sizes(), folder)}):
        holders = [tree for tree in trees if name in tree.sizes()]
        if len(holders) > 1 and len({_digest(holder, name) for holder in holders}) > 1:
            raise Corrupt(
                f"{name}: differs between the directories given", hint="they hold different saves: give only those of one save"
            )
        for holder in holders:
            if holder.holds(f"{name}.tmp"):
                hint = "wait for it; if it was killed, its shards lie over those of the older save: take another checkpoint"
                raise Incomplete(f"{holder.root}/{name}.tmp: a save over this one has not ended", hint=hint)


def ignored(_files: Mapping[str, Dated], _reads: Collection[str]) -> None:
    """The judge of files that were copied without their times."""


def remarks(trees: Sequence[Tree], job: Job) -> tuple[str, ...]:
    """What a reader should know of directories that times do not forbid to take for one save."""
    return remark_apart({tree.root: _dated(tree) for tree in trees}, job.reads)


def check_steps(sources: Sequence[Named]) -> None:
    """Raise ConfigError for ``checkpoint-400`` beside ``checkpoint-500``: nobody means one model by them."""
    found = {match[1].lstrip("0"): place for place in sources if (match := _STEP.fullmatch(place.name))}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise ConfigError(f"{one} and {other}: two steps of a training", hint="give the directories of one step, one a node")


def check_unchanged(trees: Sequence[Tree]) -> None:
    """Raise Incomplete if a file of these was written to, replaced or deleted since they were looked at."""
    changed = [f"{tree.root}/{name}" for tree in trees for name in tree.changed()]
    if changed:
        raise Incomplete(
            f"{changed[0]}: changed while it was read",
            hint="the checkpoint is still being written: merge again when it is finished",
        )


def check_duplicates(files: Overlay, job: Job) -> None:
    """Raise Corrupt if a file that several nodes have is not the same on all of them."""
    for name in sorted(job.reads):
        holders = files.duplicates(name)
        if len(holders) > 1 and len({_digest(holder, name) for holder in holders}) > 1:
            raise Corrupt(
                f"{name}: differs between the directories given", hint="they hold different saves: give only those of one save"
            )


def _dated(tree: Tree) -> dict[str, Dated]:
    sizes = tree.sizes()
    return {name: Dated(sizes[name], written) for name, written in tree.written().items()}


def _digest(files: Files, name: str) -> str:
    size = files.sizes()[name]
    return digest_stream((read(files, Extent(name, at, min(_PIECE, size - at))) for at in range(0, size, _PIECE)), size).digest
