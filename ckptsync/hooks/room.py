"""The disk must not fill up because of us: where nobody empties the spool, the hook gives up what it kept, oldest first."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckptsync.spool import folders, pins
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS

FLOOR = 1.5  # saves that must still fit on the disk after each commit: the trainer writes the next one before it deletes one


def free(spool: Path) -> int:
    """Bytes that this user can still write there.  Raises OSError."""
    with folders.opened(spool) as fd:
        disk = os.fstatvfs(fd)
    return disk.f_bavail * disk.f_frsize


def given_up(found: tuple[Pin, ...], newest: Path, wanted: int) -> tuple[Pin, ...]:
    """Which pins to let go to gain ``wanted`` bytes: stored ones first, then the oldest; never ``newest``.

    A pin whose files still have the trainer's own names takes no room, so letting it go would gain none.
    """
    chosen: list[Pin] = []
    for pin in sorted(found, key=lambda p: (not p.stored, _age(p))):
        gain = _gain(pin)
        if wanted > 0 and gain and pin.path.name != newest.name:
            chosen.append(pin)
            wanted -= gain
    return tuple(chosen)


def make_room(output_dir: Path, newest: Path, size: int) -> tuple[Pin, ...]:
    """Keep room for the next save; what was given up is returned, out of sight already, for `remove`.  Raises OSError."""
    lacking = int(FLOOR * size) - free(output_dir / OURS)
    if lacking <= 0:
        return ()
    chosen = given_up(pins.pins(output_dir), newest, lacking)
    return tuple(pin for pin in chosen if _is_hidden(pin))


def remove(given: tuple[Pin, ...]) -> None:
    """Delete what was given up; freeing many GB takes a file system seconds."""
    for pin in given:
        forget(_hidden(pin))


def forget(folder: Path) -> None:
    """Remove a directory of the spool as far as that is possible: the worker sweeps what is left."""
    with contextlib.suppress(OSError):
        folders.remove(folder)


def _is_hidden(pin: Pin) -> bool:
    return folders.renamed(pin.path, _hidden(pin))  # else somebody was quicker


def _hidden(pin: Pin) -> Path:
    return pin.path.with_name(f".gone-hook-{os.getpid()}-{pin.path.name}")


def _gain(pin: Pin) -> int:
    return sum(f.size for f in pin.files if f.links == 1)


def _age(pin: Pin) -> tuple[float, int]:
    return (pin.commit.at if pin.commit else pin.pulse / 1e9, pin.k)
