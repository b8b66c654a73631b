"""Saves that fire no ``on_save``: Trainer's just-in-time checkpoint when a SIGTERM comes, and whoever calls its saving directly.

What this rank itself writes last into a checkpoint tells that its part is done: its random state, or ``trainer_state.json`` on the
rank that writes that.  Seen from another rank's files nothing could be said, since ranks do not wait for each other.
"""

from __future__ import annotations

from pathlib import Path

from ckptsync.hooks.here import Here
from ckptsync.hooks.pinning import SENTINEL

Stamp = tuple[int, int]


class Unheard:
    """Which checkpoints this rank has written since it was last told of them."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._known: dict[str, Stamp | None] = {}
        self.follow(here.output_dir)

    @property
    def last(self) -> str:
        """What this rank writes last into a checkpoint."""
        if self._here.has_state or self._here.only_model:
            return "trainer_state.json"
        return "rng_state.pth" if self._here.world == 1 else f"rng_state_{self._here.rank}.pth"

    def follow(self, folder: Path) -> None:
        """Checkpoints are made in this directory; what lies there now was told of."""
        self._folder = folder
        self._known = {path.name: self._stamp(path) for path in folder.glob("checkpoint-*")}

    def hear(self, checkpoint: str) -> None:
        """Its save was told of by ``on_save``."""
        self._known[checkpoint] = self._stamp(self._folder / checkpoint)

    def since(self, checkpoint: str) -> bool:
        """Whether this rank finished a save of it of which nobody has told; it is told of by this."""
        stamp = self._stamp(self._folder / checkpoint)
        if stamp is None or stamp == self._known.get(checkpoint) or (self._folder / checkpoint / SENTINEL).exists():
            return False
        self._known[checkpoint] = stamp
        return True

    def all_since(self) -> list[str]:
        """Every checkpoint of which `since` is true."""
        return [path.name for path in sorted(self._folder.glob("checkpoint-*")) if self.since(path.name)]

    def _stamp(self, path: Path) -> Stamp | None:
        try:
            state = (path / self.last).stat()
        except OSError:
            return None  # not there, or not yet
        return state.st_mtime_ns, state.st_ino
