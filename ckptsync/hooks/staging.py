"""The first save of a training on several nodes: its files are linked before anybody knows whose parts belong here, and pinned when that is known.

Until all ranks have spoken nobody can say who writes into this directory; then it is the next save, and rotation may have been here.  So each
rank makes links at once, and notes whose marks it saw before.  Of those who saw all that count, one makes its links the pin.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import CkptsyncError
from ckptsync.hooks import linking, pinning, room
from ckptsync.hooks.here import Here
from ckptsync.hooks.pinning import Say
from ckptsync.scan import Spot
from ckptsync.spool import folders, marks
from ckptsync.spool.folders import children
from ckptsync.spool.marks import Commit, RankMark
from ckptsync.walk import Stat, walk

_OURS = re.compile(r"\.new-hook-([0-9a-f]{16})-.+")


@dataclass(frozen=True, slots=True)
class Staged:
    """Links in ``fresh`` to all ``files`` of a save, made when these ranks had marked it, and nobody's pin yet."""

    mark: RankMark
    seen: frozenset[int]
    fresh: Path
    files: tuple[Stat, ...]

    def is_whole(self, ranks: Collection[int]) -> bool:
        """Whether all who write here, ``ranks``, had written before the links were made."""
        return self.seen.issuperset(ranks)

    def publish(self, here: Here, commit: Commit, say: Say) -> None:
        """As `ckptsync.hooks.pinning.pin`."""
        found = {s.path: (s.size, s.mtime) for s in self.files}
        marks.write_mark(self.fresh / "commit.json", replace(commit, files=found))
        pinning.publish(here, commit.checkpoint, self.fresh, _size(self.files), say)

    def drop(self) -> None:
        """Let go of the links."""
        room.forget(self.fresh)


def stage(here: Here, spot: Spot, mark: RankMark, process: str) -> Staged | None:
    """Links to what lies there now; ``None`` where there can be none, or other ranks still write: then the worker judges the files."""
    marked = [m for m in marks.marks(here.spool, mark.checkpoint) if m.save == mark.save]
    if any(m.host != mark.host for m in marked):
        return None  # a disk that nodes share: the last of all pins, and a thousand ranks need no links each
    seen = frozenset(m.rank for m in marked)
    fresh = here.spool / "pins" / f".new-hook-{process}-{spot.name}"
    try:
        files = walk(spot.path, spot.only).files
        made = Staged(mark, seen, fresh, files)
        if files and room.free(here.spool) > room.FLOOR * _size(files) and _is_linked(made, spot):
            return made
    except (OSError, CkptsyncError):  # files come and go while other ranks write, and theirs is the whole look
        pass
    room.forget(fresh)
    return None


def sweep(spool: Path) -> None:
    """Let go of what processes have left that are gone: they have no introduction any more."""
    for path in children(spool / "pins"):
        of = _OURS.fullmatch(path.name)
        if of and folders.status(marks.begun_path(spool, of[1])) is None:
            room.forget(path)


def _is_linked(made: Staged, spot: Spot) -> bool:
    """Whether all of it could be, and nothing changed meanwhile.  A copy would take what a training's step has not got, time and room."""
    copies = linking.link(spot.path, made.files, made.fresh)
    linking.close(copies)
    return not copies and walk(spot.path, spot.only).files == made.files


def _size(files: Collection[Stat]) -> int:
    return sum(s.size for s in files)
