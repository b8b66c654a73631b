"""What processes that are dead have left half done beside the pins: it holds the bytes of saves that nobody will ever send.

What was being made, or removed, goes.  A claim that was cut short is finished: its files may be the last there are.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.spool import folders
from ckptsync.spool.folders import children, refusals, remove, written
from ckptsync.spool.pins import pins, publish
from ckptsync.walk import OURS

_ABANDONED_AFTER = 6 * 3600.0  # seconds: no commit, and no copying for one, stands still for so long
_HALF_DONE = re.compile(r"\.(new|gone)-.+", re.DOTALL)
_CLAIM = re.compile(r"\.claim-([^@]+)@(.+)\.[0-9]{1,9}", re.DOTALL)


def sweep(output_dir: Path, node: str) -> None:
    """Put right what this node left; call it before anything else of the same node runs.  Raises StoreError or ConfigError."""
    for path in children(output_dir / OURS / "pins"):
        claimed = _CLAIM.fullmatch(path.name)
        if claimed and claimed[1] == node:
            _finish_claim(output_dir, path, claimed[2], node)
        elif path.name.startswith((f".new-{node}-", f".gone-{node}-")):
            with refusals(path):
                remove(path)
    for path in (path for pin in pins(output_dir) if pin.node == node for path in children(pin.path)):
        if path.name.startswith(folders.FRESH):  # a copy that was cut short
            with refusals(path):
                remove(path)
    tidy(output_dir, time.time())


def tidy(output_dir: Path, now: float) -> None:
    """The same of everybody else, long after he stopped: at any time.  ``now``: seconds since the epoch.  What cannot be removed stays."""
    for path in children(output_dir / OURS / "pins"):
        claimed = _CLAIM.fullmatch(path.name)
        if not (claimed or _HALF_DONE.fullmatch(path.name)) or not _is_abandoned(path, now):
            continue
        with contextlib.suppress(CkptsyncError), refusals(path):  # another user's, or gone: nothing that waits for it is kept back
            if claimed:
                publish(output_dir, claimed[2], path)  # whoever it is of: if he shows no pulse, it is claimed again
            else:
                remove(path)


def _finish_claim(output_dir: Path, path: Path, checkpoint: str, node: str) -> None:
    with contextlib.suppress(Incomplete), refusals(path):
        written(path, "owner.json", {"node": node})
        publish(output_dir, checkpoint, path)


def _is_abandoned(path: Path, now: float) -> bool:
    """Whether nobody has done anything to it, or in it, for long: a copy shows in the file that grows."""
    with contextlib.suppress(FileNotFoundError):
        return now - folders.newest(path) >= _ABANDONED_AFTER
    return False
