"""A rank's part of a save: its mark, which of several marks was the last, and what the last one says of the pin."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from ckptsync.spool import folders, marks
from ckptsync.spool.marks import Begun, Commit, RankMark


def mark(spool: Path, begun: Begun, save: str, checkpoint: str, step: int) -> RankMark:
    """Say that this rank has written all of its part, now.  Raises OSError."""
    b = begun
    made = RankMark(b.train, save, checkpoint, step, b.rank, b.world, b.local_world, b.host, b.pid, time.time())
    write(spool, made)
    return made


def write(spool: Path, mark: RankMark) -> None:
    """The same with what was learnt later.  Raises OSError."""
    marks.write_mark(marks.save_folder(spool, mark.checkpoint, mark.save) / f"rank-{mark.rank}.json", mark)


def is_last(spool: Path, mark: RankMark, ranks: Iterable[int]) -> bool:
    """Whether all ``ranks`` have marked this save, and nobody else was told so: two may see all marks, and one of them is the last."""
    folder = marks.save_folder(spool, mark.checkpoint, mark.save)
    if not all(folders.status(folder / f"rank-{rank}.json") for rank in ranks):
        return False
    return folders.create(folder / "pinning")


def commit(begun: Begun, save: str, checkpoint: str, step: int, ranks: tuple[int, ...]) -> Commit:
    """What is said of a pin, but for its files.  ``save`` may be empty: then the files' times tell which parts belong together."""
    b = begun
    return Commit(b.train, save, checkpoint, step, b.world, ranks, b.host, b.trainer, time.time(), {})
