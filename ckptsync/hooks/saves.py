"""One rank's saves in one output directory: its introduction, the mark of each save that it has written, and the pins.

Each rank marks its part of a save when it has written it.  The last rank to mark, of those that write into the directory, makes
the pin.  `ckptsync.hooks.hf_saves` calls this at the Trainer's events, `ckptsync.hooks.mark_saved` when a script says so.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.errors import CkptsyncError
from ckptsync.hooks import pinning, ranks
from ckptsync.hooks.pinning import Say, Source
from ckptsync.spool import folders, marks
from ckptsync.spool.marks import Begun, Commit, RankMark
from ckptsync.walk import OURS

_log = logging.getLogger("ckptsync.hook")
_FORGET_EVERY = 64  # pins


class RankSaves:
    """``begun`` is this rank's introduction (`ranks.introduce`).  Methods raise OSError or one of ckptsync's errors."""

    def __init__(self, output_dir: Path, begun: Begun) -> None:
        self.output_dir, self.spool, self.begun = output_dir, output_dir / OURS, begun
        self._saved: Counter[str] = Counter()
        self._pinned = 0

    def update(self, **changes: Any) -> None:
        """Write the introduction again with these changes."""
        self.begun = replace(self.begun, **changes)
        ranks.rewrite(self.spool, self.begun)

    def count(self, checkpoint: str) -> int:
        """Count a further save of this name; return how many there were before."""
        self._saved[checkpoint] += 1
        return self._saved[checkpoint] - 1

    def save_id(self, checkpoint: str, n: int) -> str:
        """Return the id of a save, the same on every rank; empty while the training has no name."""
        return marks.save_id(self.begun.train, checkpoint, n) if self.begun.train else ""

    def mark(self, save: str, checkpoint: str, step: int) -> RankMark:
        """Mark this rank's part of a save as written, now."""
        b = self.begun
        made = RankMark(b.train, save, checkpoint, step, b.rank, b.world, b.local_world, b.host, b.pid, time.time())
        self.rewrite_mark(made)
        return made

    def rewrite_mark(self, mark: RankMark) -> None:
        """Write a mark again, with what is known by now."""
        marks.write_mark(marks.save_folder(self.spool, mark.checkpoint, mark.save) / f"rank-{mark.rank}.json", mark)

    def is_last(self, mark: RankMark, writers: Iterable[int]) -> bool:
        """Return whether all ``writers`` have marked this save, to one of them only: several may see all marks."""
        folder = marks.save_folder(self.spool, mark.checkpoint, mark.save)
        if not all(folders.status(folder / f"rank-{rank}.json") for rank in writers):
            return False
        return folders.create(folder / "pinning")

    def pin(self, source: Source, save: str, step: int, writers: tuple[int, ...], say: Say) -> None:
        """Pin a save that all ``writers`` have written.  With an empty ``save``, files' times tell which nodes' parts belong together."""
        b = self.begun
        commit = Commit(b.train, save, source.checkpoint, step, b.world, writers, b.host, b.trainer, time.time(), {})
        pinning.pin(self.output_dir, source, commit, say)
        self._pinned += 1
        if self._pinned % _FORGET_EVERY == 0:
            ranks.forget_saves(self.spool)


class HookLog:
    """Writes messages to the spool's hook.log, where the worker reads them, and the first of each kind to the trainer's log."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def write(self, text: str, spool: Path | None = None, rank: int = 0, *, again: bool = False) -> None:
        """Log one message; ``again``: also in the trainer's log, whatever was there before."""
        if spool is not None:
            with contextlib.suppress(OSError, CkptsyncError):  # the spool may be what is wrong
                marks.say(spool, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rank {rank}: {text}")
        kind = re.sub(r"[0-9]+", "", text)[:80]
        if again or kind not in self._seen:
            self._seen.add(kind)
            _log.warning("ckptsync: %s", text)
